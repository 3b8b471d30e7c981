// A machine made of namespaces: its own network, processes, mounts and shared memory. Ending it ends every
// process in it, as pulling a plug does.
//
// The harness itself has one thread; what runs beside it is a process, so that it can be in other namespaces.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace penstock::chaos {

using Clock = std::chrono::steady_clock;

// A process in which a function of this program runs; SIGKILL at the end of the object.
class Helper {
 public:
  // Runs `body` in a child, which exits with what it returns.
  explicit Helper(const std::function<int()>& body);
  ~Helper();
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  int wait();  // exit code, or 128 + signal
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

struct CommandLine {
  std::vector<std::string> words;
  std::map<std::string, std::string> environment;  // all of it
  std::filesystem::path log;                       // both streams are appended to it
  std::filesystem::path folder;                    // working folder
  int most_descriptors = 0;                        // 0: as the harness
};

// A running command. Leads a process group of its own.
class Running {
 public:
  Running(pid_t waiter, pid_t pid) : waiter_(waiter), pid_(pid) {}
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  pid_t pid() const { return pid_; }
  // 128 + signal if it was killed; std::nullopt while it runs.
  std::optional<int> exit_code();

 private:
  pid_t waiter_;  // its parent, which also lives outside of the host
  pid_t pid_;     // as seen by the harness
  std::optional<int> ended_;
};

class Host {
 public:
  // `isolated`: in namespaces, otherwise on this machine. Throws StateError if they cannot be made.
  explicit Host(bool isolated);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  std::unique_ptr<Running> start(const CommandLine& command);

  enum class Enter { Network, NetworkAndMounts };
  // Starts `body` inside; it sees the processes of the harness.
  std::unique_ptr<Helper> helper(Enter where, const std::function<int()>& body);
  // The same, and waits for it. Throws StateError that begins with `what` unless it returns 0.
  void run(Enter where, const std::string& what, const std::function<int()>& body);

  // Files in its shared memory that were not there when it was created; none if it has ended.
  std::vector<std::string> shared_memory() const;
  void end();

 private:
  void open_namespaces();
  void enter(Enter where) const;
  std::filesystem::path memory_folder() const;

  const bool isolated_;
  pid_t maker_ = -1;  // parent of init, in the namespaces of the harness
  pid_t init_ = -1;   // process 1 of the host; -1: not isolated, or ended
  int network_ = -1, mounts_ = -1, processes_ = -1, shared_ = -1;
  std::vector<std::string> memory_before_;
};

// Puts the harness into mounts of its own (and a user namespace, unless it is root), so that it can mount
// disks and make hosts. Returns why that is not allowed; empty if it is. Call it once, before anything else.
std::string enter_own_mounts();

// Runs a program and waits; false unless it succeeded.
bool run_program(const std::vector<std::string>& words);
bool program_exists(const std::string& name);

}  // namespace penstock::chaos
