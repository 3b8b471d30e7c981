// Runs the launcher's driver as a separate process, with a deadline, and reports what it left behind.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/files.h"
#include "tests/processes.h"

namespace penstock::comm::launcher_test {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

inline std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

inline int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

inline bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds deadline = 10s) {
  const auto end = Clock::now() + deadline;
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

class TempFolder {
 public:
  TempFolder() {
    std::string name = (fs::temp_directory_path() / "penstock_launcher_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    remove_tree(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

// Live processes whose environment holds `entry`, with their command lines.
inline std::vector<std::string> processes_with(const std::string& entry) {
  std::vector<std::string> found;
  for (const test::Process& process : test::processes_of(entry))
    found.push_back(std::to_string(process.pid) + ": " + process.command);
  return found;
}

// Descriptors for the driver's output; -1: a file of the run.
struct Streams {
  int out = -1, err = -1;
};

// One run of the driver. Its output goes to files unless other descriptors are given.
class Launcher {
 public:
  explicit Launcher(std::vector<std::string> arguments, std::map<std::string, std::string> environment = {},
                    Streams streams = {})
      : mark_("PENSTOCK_TEST_MARK=" + std::to_string(getpid()) + "." +
              std::to_string(Clock::now().time_since_epoch().count())) {
    const char* driver = std::getenv("PENSTOCK_LAUNCHER_DRIVER");
    if (driver == nullptr)
      throw std::runtime_error("PENSTOCK_LAUNCHER_DRIVER is not set; run this test through ctest");
    arguments.insert(arguments.begin(), {driver, "launch"});
    std::vector<std::string> entries = {mark_};
    for (const char* kept :
         {"PATH", "HOME", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"})
      if (const char* value = std::getenv(kept)) entries.push_back(std::string(kept) + "=" + value);
    for (const auto& [name, value] : environment) entries.push_back(name + "=" + value);
    const auto argv = pointers(arguments), envp = pointers(entries);
    if (streams.out < 0)
      streams.out = open((folder_ / "out").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (streams.err < 0)
      streams.err = open((folder_ / "err").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(streams.out, 1);
      dup2(streams.err, 2);
      execve(argv[0], argv.data(), envp.data());
      _exit(99);
    }
  }
  ~Launcher() {
    if (!reaped_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Exit code, or -signal if it was killed itself, or -1000 if it did not end in time (then it is killed).
  int wait(std::chrono::milliseconds deadline = 20s) {
    int status = 0;
    const bool ended = eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, deadline);
    if (!ended) return -1000;
    reaped_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  std::string out() const { return read_file(folder_ / "out"); }
  std::string err() const { return read_file(folder_ / "err"); }
  bool shows(const std::string& text, int times = 1) {
    return eventually([&] { return count_of(out() + err(), text) >= times; });
  }
  void send(int signal) const { kill(pid_, signal); }
  pid_t pid() const { return pid_; }

  std::vector<std::string> processes() const { return processes_with(mark_); }
  bool nothing_left() const {
    return eventually([&] { return processes().empty(); }, 5s);
  }

 private:
  static std::vector<char*> pointers(const std::vector<std::string>& texts) {
    std::vector<char*> list;
    for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
    list.push_back(nullptr);
    return list;
  }

  TempFolder folder_;
  std::string mark_;
  pid_t pid_ = -1;
  bool reaped_ = false;
};

// Arguments that make every rank run a shell script.
inline std::vector<std::string> script(std::vector<std::string> options, const std::string& text) {
  options.insert(options.end(), {"--", "/bin/sh", "-c", text});
  return options;
}

}  // namespace penstock::comm::launcher_test
