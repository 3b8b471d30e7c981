// Starts one rank as a process, safely from a process that has other threads, and ends processes that ranks
// leave behind.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace penstock::comm {

// An owned file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

// A close-on-exec pipe, both ends above the standard streams so that a child can rearrange those freely.
// Throws StateError if the process has no descriptors left.
struct PipeEnds {
  Fd read, write;
};
PipeEnds make_pipe();

// The file to execute, or why there is none.
struct LaunchedProgram {
  std::string path;
  int exit_code = 0;  // 0: permissions allow executing it; else 126 or 127, as in shells
  std::string error;  // names the program and the remedy
};

// Looks up a name without '/' in `search_path` (the text of PATH); other names are used unchanged.
LaunchedProgram find_program(const std::string& name, const std::string& search_path);

// Guards against the launching process dying without cleanup, as after SIGKILL: the guard then kills every
// process group that was reported to it. It is a forked process that holds nothing but a pipe.
class OrphanGuard {
 public:
  OrphanGuard();   // throws StateError if no process can be created
  ~OrphanGuard();  // ends the guard and waits for it; kills nothing
  OrphanGuard(const OrphanGuard&) = delete;
  OrphanGuard& operator=(const OrphanGuard&) = delete;

  // A child reports itself through this descriptor by writing one pid_t.
  int report_fd() const { return pipe_.get(); }
  void forget(pid_t group);

 private:
  Fd pipe_;
  pid_t pid_ = -1;
};

struct SpawnedRank {
  pid_t pid = -1;      // also its process group
  Fd out, err;         // non-blocking read ends of its standard streams
  int exec_errno = 0;  // not 0: the program could not be executed; the child has ended, nothing else is set
};

// Starts a child that leads its own process group, is killed by the kernel when the calling thread ends,
// reads `input` (/dev/null if there is none), and has no signal blocked or caught. Only async-signal-safe
// calls are made between fork and exec. Throws StateError, with the remedy, if the system refuses a process
// or a descriptor.
SpawnedRank spawn_rank(const std::string& path, const std::vector<std::string>& command,
                       const std::vector<std::string>& environment, OrphanGuard& guard,
                       const std::string* input = nullptr);

// Whether the process is stopped, by SIGSTOP or a terminal, and does nothing until somebody continues it.
bool is_stopped(pid_t process);

// Makes this process the parent of its orphaned descendants during the object's lifetime, so that they can be
// found and reaped.
class Subreaper {
 public:
  Subreaper();
  ~Subreaper();
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;

 private:
  int before_ = 0;
};

// Kills and reaps the children of this process whose environment holds `entry` ("NAME=value"), and then their
// children, which become children of this process, until none is left. Returns how many were killed.
int kill_stray_processes(const std::string& entry);

}  // namespace penstock::comm
