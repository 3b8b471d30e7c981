// Finds the processes of a job by an entry of their environment, which everything that they start inherits.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

namespace penstock::test {

struct Process {
  pid_t pid = -1;
  std::string command;      // words separated by blanks
  std::string environment;  // as at its start: '\0' before, between and after the entries

  bool has(const std::string& entry) const {
    return environment.find('\0' + entry + '\0') != std::string::npos;
  }
};

// Live processes whose environment holds `entry` ("NAME=value"), in the order of their ids. Zombies have no
// environment. A process that ends meanwhile may be missing.
inline std::vector<Process> processes_of(const std::string& entry) {
  const auto text_of = [](const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  };
  std::vector<Process> found;
  for (const auto& folder : std::filesystem::directory_iterator("/proc")) {
    const std::string pid = folder.path().filename();
    if (pid.find_first_not_of("0123456789") != std::string::npos) continue;
    Process process{.pid = static_cast<pid_t>(std::stol(pid)), .command = {}, .environment = {}};
    process.environment = '\0' + text_of(folder.path() / "environ");
    if (!process.has(entry)) continue;
    process.command = text_of(folder.path() / "cmdline");
    std::replace(process.command.begin(), process.command.end(), '\0', ' ');
    found.push_back(std::move(process));
  }
  std::sort(found.begin(), found.end(), [](const Process& a, const Process& b) { return a.pid < b.pid; });
  return found;
}

}  // namespace penstock::test
