#include "tests/chaos/host.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "penstock/errors.h"

namespace penstock::chaos {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what) {
  throw StateError(fmt::format("chaos: {}: {}", what, std::strerror(errno)));
}

int exit_code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

int wait_for(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) fail("waitpid");
  return exit_code_of(status);
}

// A child does not outlive the harness.
void die_with(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent && getppid() != 0) _exit(125);  // 0: the parent is in an outer process namespace
}

struct Pipe {
  Pipe() {
    if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe");
  }
  ~Pipe() {
    close(ends[0]);
    close(ends[1]);
  }
  int ends[2];
};

bool bring_up_loopback() {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  bool up = fd >= 0 && ioctl(fd, SIOCGIFFLAGS, &request) == 0;
  request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP);
  up = up && ioctl(fd, SIOCSIFFLAGS, &request) == 0;
  close(fd);
  return up;
}

// Process 1 of a host: collects orphans until it is killed.
[[noreturn]] void be_init(int ready) {
  const char* failed = nullptr;
  if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) failed = "private mounts";
  if (failed == nullptr && mount("proc", "/proc", "proc", 0, nullptr) != 0) failed = "mount of /proc";
  if (failed == nullptr && mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=512m") != 0)
    failed = "mount of /dev/shm";
  if (failed == nullptr && !bring_up_loopback()) failed = "loopback interface";
  const std::string told = failed == nullptr ? "ready" : fmt::format("{}: {}", failed, std::strerror(errno));
  if (write(ready, told.data(), told.size()) < 0 || failed != nullptr) _exit(1);
  close(ready);
  for (;;) {
    if (waitpid(-1, nullptr, 0) < 0 && errno == ECHILD)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

[[noreturn]] void become(const CommandLine& command) {
  setpgid(0, 0);
  const int in = open("/dev/null", O_RDONLY);
  const int out = open(command.log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (in < 0 || out < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0) _exit(126);
  if (chdir(command.folder.c_str()) != 0) _exit(126);
  if (command.most_descriptors > 0) {
    const auto most = static_cast<rlim_t>(command.most_descriptors);
    const rlimit limit{most, most};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(126);
  }
  std::vector<std::string> entries;
  for (const auto& [name, value] : command.environment) entries.push_back(name + "=" + value);
  const auto words = pointers(command.words), environment = pointers(entries);
  execve(words[0], words.data(), environment.data());
  std::fprintf(stderr, "chaos: %s cannot be executed: %s\n", words[0], std::strerror(errno));
  _exit(127);
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    names.push_back(entry->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

bool write_file(const char* path, const std::string& text) {
  const int fd = open(path, O_WRONLY | O_CLOEXEC);
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (fd >= 0) close(fd);
  return written;
}

}  // namespace

Helper::Helper(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t harness = getpid();
  pid_ = fork();
  if (pid_ < 0) fail("fork");
  if (pid_ > 0) return;
  die_with(harness);
  int code = 125;
  try {
    code = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::fflush(nullptr);
  _exit(code);
}

Helper::~Helper() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

int Helper::wait() { return wait_for(std::exchange(pid_, -1)); }

Running::~Running() {
  if (ended_) return;
  kill(pid_, SIGKILL);
  waitpid(waiter_, nullptr, 0);
}

std::optional<int> Running::exit_code() {
  if (ended_) return ended_;
  int status = 0;
  if (waitpid(waiter_, &status, WNOHANG) == waiter_) ended_ = exit_code_of(status);
  return ended_;
}

Host::Host(bool isolated) : isolated_(isolated) {
  if (isolated_) {
    Pipe ready, number;
    std::fflush(nullptr);
    const pid_t harness = getpid();
    maker_ = fork();
    if (maker_ < 0) fail("fork");
    if (maker_ == 0) {
      die_with(harness);
      if (unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC) != 0) {
        const std::string told = fmt::format("namespaces: {}", std::strerror(errno));
        _exit(write(ready.ends[1], told.data(), told.size()) > 0 ? 1 : 2);
      }
      const pid_t maker = getpid();
      const pid_t init = fork();
      if (init == 0) {
        die_with(maker);
        be_init(ready.ends[1]);
      }
      if (init < 0 || write(number.ends[1], &init, sizeof init) != sizeof init) _exit(2);
      close(ready.ends[1]);
      _exit(wait_for(init));
    }
    close(std::exchange(ready.ends[1], -1));
    close(std::exchange(number.ends[1], -1));
    char told[256];
    const ssize_t bytes = read(ready.ends[0], told, sizeof told);
    const std::string_view answer(told, static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
    if (answer != "ready" || read(number.ends[0], &init_, sizeof init_) != sizeof init_) {
      kill(maker_, SIGKILL);
      waitpid(maker_, nullptr, 0);
      throw StateError(fmt::format("chaos: a host cannot be made ({})", answer));
    }
    open_namespaces();
  }
  memory_before_ = names_in(memory_folder());
}

Host::~Host() {
  end();
  for (const int fd : {network_, mounts_, processes_, shared_})
    if (fd >= 0) close(fd);
}

void Host::open_namespaces() {
  const auto open_one = [&](const char* name) {
    const int fd = open(fmt::format("/proc/{}/ns/{}", init_, name).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail(fmt::format("namespace {} of a host", name));
    return fd;
  };
  network_ = open_one("net");
  mounts_ = open_one("mnt");
  processes_ = open_one("pid");
  shared_ = open_one("ipc");
}

void Host::enter(Enter where) const {
  if (!isolated_) return;
  if (init_ <= 0) throw StateError("chaos: a host that has ended cannot be entered");
  if (setns(network_, CLONE_NEWNET) != 0) fail("the network of a host");
  if (where == Enter::NetworkAndMounts && setns(mounts_, CLONE_NEWNS) != 0) fail("the mounts of a host");
}

std::unique_ptr<Running> Host::start(const CommandLine& command) {
  Pipe number;
  std::fflush(nullptr);
  const pid_t harness = getpid();
  const pid_t waiter = fork();
  if (waiter < 0) fail("fork");
  if (waiter == 0) {
    die_with(harness);
    if (isolated_) {
      // The namespace of processes is that of the children, not of the waiter itself.
      if (setns(shared_, CLONE_NEWIPC) != 0 || setns(processes_, CLONE_NEWPID) != 0) _exit(125);
      enter(Enter::NetworkAndMounts);
    }
    const pid_t itself = getpid();
    const pid_t pid = fork();
    if (pid == 0) {
      die_with(itself);
      become(command);
    }
    if (pid < 0 || write(number.ends[1], &pid, sizeof pid) != sizeof pid) _exit(125);
    _exit(wait_for(pid));
  }
  close(std::exchange(number.ends[1], -1));
  pid_t pid = -1;
  if (read(number.ends[0], &pid, sizeof pid) != sizeof pid) {
    kill(waiter, SIGKILL);
    waitpid(waiter, nullptr, 0);
    throw StateError("chaos: " + command.words.front() + " cannot be started on a host");
  }
  return std::make_unique<Running>(waiter, pid);
}

std::unique_ptr<Helper> Host::helper(Enter where, const std::function<int()>& body) {
  return std::make_unique<Helper>([&, where] {
    enter(where);
    return body();
  });
}

void Host::run(Enter where, const std::string& what, const std::function<int()>& body) {
  const int code = helper(where, body)->wait();
  if (code != 0) throw StateError(fmt::format("chaos: {} failed on a host ({})", what, code));
}

fs::path Host::memory_folder() const {
  return isolated_ ? fs::path(fmt::format("/proc/{}/root/dev/shm", init_)) : fs::path("/dev/shm");
}

std::vector<std::string> Host::shared_memory() const {
  std::vector<std::string> left;
  if (!isolated_ || init_ <= 0) return left;  // the folder of the machine itself: others write there, too
  for (const std::string& name : names_in(memory_folder()))
    if (!std::binary_search(memory_before_.begin(), memory_before_.end(), name)) left.push_back(name);
  return left;
}

void Host::end() {
  if (init_ <= 0) return;
  kill(init_, SIGKILL);  // the kernel ends all others of its namespace
  waitpid(maker_, nullptr, 0);
  init_ = -1;
}

std::string enter_own_mounts() {
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (user != 0) {
    if (unshare(CLONE_NEWUSER) != 0)
      return fmt::format("user namespaces are not allowed ({})", std::strerror(errno));
    if (!write_file("/proc/self/setgroups", "deny") ||
        !write_file("/proc/self/uid_map", fmt::format("0 {} 1", user)) ||
        !write_file("/proc/self/gid_map", fmt::format("0 {} 1", group)))
      return fmt::format("the user cannot be mapped ({})", std::strerror(errno));
  }
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
    return fmt::format("mount namespaces are not allowed ({})", std::strerror(errno));
  try {
    Host trial(true);
  } catch (const StateError& error) {
    return error.what();
  }
  return {};
}

bool program_exists(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(std::string(path == nullptr ? "" : path) + ":/usr/sbin:/sbin");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access((folder + "/" + name).c_str(), X_OK) == 0) return true;
  return false;
}

bool run_program(const std::vector<std::string>& words) {
  return Helper([&] {
           const char* path = std::getenv("PATH");
           setenv("PATH", (std::string(path == nullptr ? "" : path) + ":/usr/sbin:/sbin").c_str(), 1);
           const auto list = pointers(words);
           execvp(list[0], list.data());
           return 127;
         }).wait() == 0;
}

}  // namespace penstock::chaos
