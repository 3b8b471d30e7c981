// Starting one rank as a process, safely from a process that has other threads, and freeing the host of what
// ranks leave.
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
// Throws StateError when the process has no descriptors left.
struct Pipe {
  Fd read, write;
};
Pipe make_pipe();

// What to execute: the file found, or why there is none.
struct Program {
  std::string path;
  int exit_code = 0;  // 0: can be executed as far as permissions tell; else 126 or 127, as shells have it
  std::string error;  // names the program and the remedy
};

// Looks a name without '/' up in `search_path` (the text of PATH); other names are taken as they are.
Program find_program(const std::string& name, const std::string& search_path);

// Watches over the launching process: when it disappears without a word, as after SIGKILL, the guard kills
// every process group that was reported to it. It is a forked process that holds nothing but a pipe.
class OrphanGuard {
 public:
  OrphanGuard();   // throws StateError when no process can be made
  ~OrphanGuard();  // ends the guard and waits for it; kills nothing
  OrphanGuard(const OrphanGuard&) = delete;
  OrphanGuard& operator=(const OrphanGuard&) = delete;

  // A child reports itself through this descriptor: one pid_t.
  int report_fd() const { return pipe_.get(); }
  void forget(pid_t group);

 private:
  Fd pipe_;
  pid_t pid_ = -1;
};

struct SpawnedRank {
  pid_t pid = -1;      // also its process group
  Fd out, err;         // non-blocking read ends of its standard streams
  int exec_errno = 0;  // not 0: the program could not be executed; the child is gone and nothing else is set
};

// The child leads its own process group, is killed by the kernel when the calling thread ends, reads
// /dev/null, and has no signal blocked or caught. Between fork and exec only async-signal-safe calls are
// made. Throws StateError, with the remedy, when the system refuses a process or a descriptor.
SpawnedRank spawn_rank(const std::string& path, const std::vector<std::string>& command,
                       const std::vector<std::string>& environment, OrphanGuard& guard);

// Makes this process the parent of its orphaned descendants while it exists, so that they can be found and
// reaped.
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
// children, which become ours, until none is left. Returns how many were killed.
int kill_strays(const std::string& entry);

}  // namespace penstock::comm
