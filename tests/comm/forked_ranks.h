// Runs a function as several forked processes that share a key-value store of files. For tests of transports.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/files.h"

namespace penstock::test {

// Inside a forked rank GoogleTest's checks would report into a process that nobody reads: throw instead.
#define RANK_CHECK(condition)                                                                             \
  do {                                                                                                    \
    if (!(condition))                                                                                     \
      throw std::runtime_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition); \
  } while (false)

// A folder as a key-value store: a key is a file, written under another name and then renamed.
class FileStore {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& bytes) const {
    const auto place = path_of(key);
    const auto draft = place.string() + ".draft" + std::to_string(getpid());
    std::ofstream(draft, std::ios::binary) << bytes;
    std::filesystem::rename(draft, place);
  }

  std::string get(const std::string& key, std::chrono::seconds limit = std::chrono::seconds(20)) const {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (!std::filesystem::exists(path_of(key))) {
      if (std::chrono::steady_clock::now() > deadline)
        throw std::runtime_error("store: nobody published " + key);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    std::ifstream file(path_of(key), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  FileStore sub(const std::string& name) const {
    std::filesystem::create_directories(folder_ / name);
    return FileStore(folder_ / name);
  }

  // A barrier of all `size` ranks.
  void barrier(const std::string& name, int rank, int size) const {
    set("barrier " + name + std::to_string(rank), "");
    for (int other = 0; other < size; ++other) get("barrier " + name + std::to_string(other));
  }

 private:
  std::filesystem::path path_of(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '_';
    return folder_ / key;
  }

  std::filesystem::path folder_;
};

// How each rank ended, as reported by waitpid: 0 for success. Ranks that still run at the deadline are killed
// (SIGKILL).
inline std::vector<int> run_ranks(int size, std::chrono::seconds limit,
                                  const std::function<void(int, const FileStore&)>& body) {
  std::string folder = (std::filesystem::temp_directory_path() / "penstock_ranks_XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) throw std::runtime_error("no temporary folder");
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t process = fork();
    if (process < 0) throw std::runtime_error("fork failed");
    if (process == 0) {
      int code = 0;
      try {
        body(rank, FileStore(folder));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        code = 1;
      }
      std::fflush(nullptr);
      _exit(code);
    }
    processes.push_back(process);
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::vector<int> status(processes.size(), -1);
  std::size_t left = processes.size();
  while (left > 0) {
    const bool late = std::chrono::steady_clock::now() > deadline;
    for (std::size_t rank = 0; rank < processes.size(); ++rank) {
      if (processes[rank] == 0) continue;
      if (late) kill(processes[rank], SIGKILL);
      if (waitpid(processes[rank], &status[rank], late ? 0 : WNOHANG) == processes[rank]) {
        if (late) std::fprintf(stderr, "rank %zu was still running at the deadline\n", rank);
        processes[rank] = 0;
        --left;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  remove_tree(folder);
  return status;
}

}  // namespace penstock::test
