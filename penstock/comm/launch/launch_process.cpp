#include "penstock/comm/launch/launch_process.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "penstock/comm/launch/launch_signals.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

// fork runs handlers that libraries registered, and OpenBLAS's handler stops its threads in the parent. The
// child calls nothing that they protect, so they are skipped if the C library can do so. The thread sanitizer
// must see the fork.
pid_t fork_without_handlers() {
#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#if __GLIBC_PREREQ(2, 34)
  return _Fork();
#else
  return fork();
#endif
#else
  return fork();
#endif
}

Fd above_standard_streams(Fd fd) {
  if (fd.get() > 2) return fd;
  Fd moved(fcntl(fd.get(), F_DUPFD_CLOEXEC, 3));
  if (!moved)
    throw StateError(
        fmt::format("launch: cannot duplicate a descriptor: {}; raise `ulimit -n`", std::strerror(errno)));
  return moved;
}

bool executable_file(const std::string& path) {
  struct stat info = {};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && access(path.c_str(), X_OK) == 0;
}

// ---- the guard: async-signal-safe calls only ----

void close_all_from(unsigned int first) {
#ifdef SYS_close_range
  if (syscall(SYS_close_range, first, ~0u, 0u) == 0) return;
#endif
  rlimit limit = {};
  const unsigned int end = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < 65536
                               ? static_cast<unsigned int>(limit.rlim_cur)
                               : 65536u;
  for (unsigned int fd = first; fd < end; ++fd) close(static_cast<int>(fd));
}

[[noreturn]] void guard_main(int reports) {
  // Its own group: a ^C at the terminal is for the launcher. Signals stay blocked, as the caller left them.
  setpgid(0, 0);
  prctl(PR_SET_NAME, "penstock-guard");
  dup2(reports, 0);
  close_all_from(1);
  std::array<pid_t, kMaxLocalRanks> groups = {};
  std::size_t count = 0;
  while (true) {
    pid_t report = 0;
    const ssize_t got = read(0, &report, sizeof report);
    if (got < 0 && errno == EINTR) continue;
    if (got != static_cast<ssize_t>(sizeof report)) break;  // end of file: nobody is left to report
    if (report == 0) _exit(0);
    if (report > 0 && count < groups.size()) groups[count++] = report;
    if (report < 0)
      for (std::size_t i = 0; i < count; ++i)
        if (groups[i] == -report) groups[i--] = groups[--count];
  }
  for (std::size_t i = 0; i < count; ++i) kill(-groups[i], SIGKILL);
  _exit(0);
}

// ---- a rank between fork and exec: async-signal-safe calls only ----

struct ChildPlan {
  const char* path;
  char* const* argv;
  char* const* envp;
  int null_fd, out_fd, err_fd, failure_fd, guard_fd;
  pid_t parent;
};

void reset_signals() {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action = {};
    if (sigaction(signal, nullptr, &action) != 0) continue;
    if (action.sa_handler == SIG_DFL) continue;
    // Signals that nohup and background shells ignore on purpose stay ignored.
    const bool on_purpose = signal == SIGHUP || signal == SIGINT || signal == SIGQUIT;
    if (action.sa_handler == SIG_IGN && on_purpose) continue;
    action = {};
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void child_main(const ChildPlan& plan) {
  setpgid(0, 0);
  const pid_t self = getpid();
  // Reported by the child itself, so that the guard knows the rank as soon as it exists.
  [[maybe_unused]] const ssize_t reported = write(plan.guard_fd, &self, sizeof self);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != plan.parent) _exit(127);  // it died before the line above took effect
  int error = 0;
  if (dup2(plan.null_fd, 0) < 0 || dup2(plan.out_fd, 1) < 0 || dup2(plan.err_fd, 2) < 0) {
    error = errno;
  } else {
    reset_signals();
    execve(plan.path, plan.argv, plan.envp);
    error = errno;
  }
  [[maybe_unused]] const ssize_t told = write(plan.failure_fd, &error, sizeof error);
  _exit(127);
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

// Parent of a process, from its stat line: the name in parentheses may itself hold spaces and parentheses.
pid_t parent_of(const std::string& stat_line) {
  const auto name_end = stat_line.rfind(')');
  if (name_end == std::string::npos || name_end + 4 >= stat_line.size()) return -1;
  return static_cast<pid_t>(std::strtol(stat_line.c_str() + name_end + 4, nullptr, 10));
}

std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<pid_t> children_with(const std::string& entry) {
  std::vector<pid_t> found;
  DIR* folder = opendir("/proc");
  if (folder == nullptr) return found;
  const std::string wanted = '\0' + entry + '\0';
  while (const dirent* item = readdir(folder)) {
    if (!std::isdigit(static_cast<unsigned char>(item->d_name[0]))) continue;
    const std::string process = std::string("/proc/") + item->d_name;
    if (parent_of(read_all(process + "/stat")) != getpid()) continue;
    if (('\0' + read_all(process + "/environ")).find(wanted) != std::string::npos)
      found.push_back(static_cast<pid_t>(std::strtol(item->d_name, nullptr, 10)));
  }
  closedir(folder);
  return found;
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

void Fd::reset() {
  if (fd_ >= 0) close(release());
}

PipeEnds make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw StateError(fmt::format("launch: cannot create a pipe: {}; raise `ulimit -n` or start fewer ranks",
                                 std::strerror(errno)));
  Fd read_end(ends[0]), write_end(ends[1]);
  return {above_standard_streams(std::move(read_end)), above_standard_streams(std::move(write_end))};
}

LaunchedProgram find_program(const std::string& name, const std::string& search_path) {
  LaunchedProgram program;
  const auto refuse = [&](int exit_code, std::string why) {
    program.exit_code = exit_code;
    program.error = std::move(why);
    return program;
  };
  if (name.find('/') == std::string::npos) {
    const std::string path = search_path.empty() ? "/usr/bin:/bin" : search_path;
    for (std::size_t begin = 0; begin <= path.size();) {
      const std::size_t end = std::min(path.find(':', begin), path.size());
      const std::string folder = path.substr(begin, end - begin);
      program.path = (folder.empty() ? "." : folder) + "/" + name;
      if (executable_file(program.path)) return program;
      begin = end + 1;
    }
    program.path.clear();
    struct stat here = {};
    const bool in_this_folder = stat(name.c_str(), &here) == 0 && S_ISREG(here.st_mode);
    return refuse(127,
                  fmt::format("program \"{}\" was not found in PATH ({}); {}", name, path,
                              in_this_folder ? fmt::format("there is one in this folder: use ./{}", name)
                                             : "check the spelling or give its path, such as ./" + name));
  }
  program.path = name;
  struct stat info = {};
  if (stat(name.c_str(), &info) != 0)
    return refuse(errno == EACCES ? 126 : 127,
                  fmt::format("program \"{}\" was not found: {}; check the path, or build the program first",
                              name, std::strerror(errno)));
  if (S_ISDIR(info.st_mode))
    return refuse(126, fmt::format("program \"{}\" is a folder; give the path of a file in it", name));
  if (access(name.c_str(), X_OK) != 0)
    return refuse(
        126,
        fmt::format(
            "program \"{}\" is not executable (mode {:o}): {}; run `chmod +x {}`, or start its interpreter: "
            "-- python3 {}",
            name, info.st_mode & 07777, std::strerror(errno), name, name));
  return program;
}

OrphanGuard::OrphanGuard() {
  PipeEnds pipe = make_pipe();
  const AllSignalsBlocked blocked;
  pid_ = fork_without_handlers();
  if (pid_ == 0) guard_main(pipe.read.get());
  if (pid_ < 0)
    throw StateError(
        fmt::format("launch: cannot start a process: {}; raise `ulimit -u`", std::strerror(errno)));
  pipe_ = std::move(pipe.write);
}

OrphanGuard::~OrphanGuard() {
  forget(0);
  pipe_.reset();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void OrphanGuard::forget(pid_t group) {
  const pid_t report = -group;
  // A killed guard cannot be notified; the launch itself does not depend on it.
  [[maybe_unused]] const ssize_t written = write(pipe_.get(), &report, sizeof report);
}

namespace {

// Returns a descriptor from which the text can be read, or -1.
int file_in_memory(const std::string& text) {
  const int fd = memfd_create("penstock-input", MFD_CLOEXEC);
  for (std::size_t done = 0; fd >= 0 && done < text.size();) {
    const ssize_t count = write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      close(fd);
      return -1;
    }
    done += static_cast<std::size_t>(count);
  }
  if (fd >= 0) lseek(fd, 0, SEEK_SET);
  return fd;
}

}  // namespace

SpawnedRank spawn_rank(const std::string& path, const std::vector<std::string>& command,
                       const std::vector<std::string>& environment, OrphanGuard& guard,
                       const std::string* input) {
  PipeEnds out = make_pipe(), err = make_pipe(), failure = make_pipe();
  fcntl(out.read.get(), F_SETFL, O_NONBLOCK);
  fcntl(err.read.get(), F_SETFL, O_NONBLOCK);
  Fd null_device(input != nullptr ? file_in_memory(*input) : open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null_device)
    throw StateError(fmt::format("launch: cannot open the standard input of a process: {}; raise `ulimit -n`",
                                 std::strerror(errno)));
  null_device = above_standard_streams(std::move(null_device));

  const std::vector<char*> argv = pointers(command);
  const std::vector<char*> envp = pointers(environment);
  const ChildPlan plan = {path.c_str(),        argv.data(),       envp.data(),
                          null_device.get(),   out.write.get(),   err.write.get(),
                          failure.write.get(), guard.report_fd(), getpid()};
  SpawnedRank rank;
  {
    const AllSignalsBlocked blocked;
    rank.pid = fork_without_handlers();
    if (rank.pid == 0) child_main(plan);
  }
  if (rank.pid < 0)
    throw StateError(fmt::format("launch: cannot start a process: {}; raise `ulimit -u` or start fewer ranks",
                                 std::strerror(errno)));
  setpgid(rank.pid,
          rank.pid);  // parent and child both do it: a signal to the group must not precede the group
  failure.write.reset();

  ssize_t got = 0;
  do got = read(failure.read.get(), &rank.exec_errno, sizeof rank.exec_errno);
  while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(sizeof rank.exec_errno))
    rank.exec_errno = 0;  // end of file: exec closed it
  if (rank.exec_errno != 0) {
    guard.forget(rank.pid);
    while (waitpid(rank.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    return rank;
  }
  rank.out = std::move(out.read);
  rank.err = std::move(err.read);
  return rank;
}

bool is_stopped(pid_t process) {
  const std::string stat = read_all("/proc/" + std::to_string(process) + "/stat");
  const auto name_end = stat.rfind(')');  // the name may itself hold parentheses
  return name_end != std::string::npos && name_end + 2 < stat.size() && stat[name_end + 2] == 'T';
}

Subreaper::Subreaper() {
  prctl(PR_GET_CHILD_SUBREAPER, &before_);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Subreaper::~Subreaper() { prctl(PR_SET_CHILD_SUBREAPER, before_); }

int kill_stray_processes(const std::string& entry) {
  int killed = 0;
  while (true) {
    const std::vector<pid_t> strays = children_with(entry);
    if (strays.empty()) return killed;
    for (const pid_t stray : strays) {
      kill(stray, SIGKILL);
      while (waitpid(stray, nullptr, 0) < 0 && errno == EINTR) {
      }
      ++killed;
    }
  }
}

}  // namespace penstock::comm
