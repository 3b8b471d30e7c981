#include "penstock/graph/cache/entry_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "penstock/base/number.h"

namespace penstock::graph {
namespace {

using namespace std::chrono_literals;

// The 22nd field of /proc/PID/stat; the second one may contain blanks and parentheses. 0 if it cannot be
// read.
std::uint64_t start_time_of(std::int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text)) return 0;
  const std::size_t end = text.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream rest(text.substr(end + 1));
  std::string word;
  for (int field = 3; field <= 22; ++field)
    if (!(rest >> word)) return 0;
  return parse_unsigned(word).value_or(0);
}

// Whether the path still names the file that is open.
bool is_same_file(int descriptor, const std::filesystem::path& path) {
  struct stat opened {
  }, named{};
  return ::fstat(descriptor, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

std::optional<LockOwner> owner_in(int descriptor) {
  char text[512];
  const ssize_t size = ::pread(descriptor, text, sizeof text, 0);
  if (size <= 0) return std::nullopt;
  return LockOwner::parse(std::string(text, static_cast<std::size_t>(size)));
}

void write_owner(int descriptor) {
  const std::string text = LockOwner::self().text();
  // For messages and for the detection of dead owners only: a full disk must not stop the work.
  if (::ftruncate(descriptor, 0) != 0) return;
  if (::pwrite(descriptor, text.data(), text.size(), 0) < 0) return;
}

}  // namespace

LockOwner LockOwner::self() {
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) != 0) std::strcpy(host, "unknown");
  const auto pid = static_cast<std::int64_t>(::getpid());
  return {pid, host, start_time_of(pid)};
}

std::string LockOwner::text() const { return fmt::format("pid {} host {} started {}", pid, host, started); }

std::optional<LockOwner> LockOwner::parse(const std::string& text) {
  std::istringstream in(text);
  std::string pid_word, host_word, started_word, pid, host, started, rest;
  if (!(in >> pid_word >> pid >> host_word >> host >> started_word >> started) || in >> rest)
    return std::nullopt;
  if (pid_word != "pid" || host_word != "host" || started_word != "started") return std::nullopt;
  const auto number = parse_integer(pid);
  const auto ticks = parse_unsigned(started);
  if (!number || *number <= 0 || !ticks) return std::nullopt;
  return LockOwner{*number, host, *ticks};
}

bool LockOwner::is_dead() const {
  if (host != self().host) return false;
  if (::kill(static_cast<pid_t>(pid), 0) != 0) return errno == ESRCH;
  // The number may belong to another process by now.
  const std::uint64_t now = start_time_of(pid);
  return started != 0 && now != 0 && now != started;
}

EntryLock::EntryLock(EntryLock&& other) noexcept { *this = std::move(other); }

EntryLock& EntryLock::operator=(EntryLock&& other) noexcept {
  if (this == &other) return *this;
  release();
  file_ = std::move(other.file_);
  descriptor_ = std::exchange(other.descriptor_, -1);
  outcome_ = other.outcome_;
  waited_ = other.waited_;
  why_ = std::move(other.why_);
  return *this;
}

EntryLock EntryLock::acquire(const std::filesystem::path& file, std::chrono::milliseconds limit,
                             const std::function<bool()>& done) {
  EntryLock lock;
  lock.file_ = file;
  const auto fail = [&](const char* what) {
    lock.outcome_ = Outcome::Failed;
    lock.why_ = fmt::format("{}: {}", what, std::strerror(errno));
    return std::move(lock);
  };
  const auto begin = std::chrono::steady_clock::now();
  auto pause = 2ms;
  for (;;) {
    const int descriptor = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0) return fail("the lock file cannot be opened");
    const int locked = ::flock(descriptor, LOCK_EX | LOCK_NB);
    if (locked == 0) {
      // Somebody may have removed it between open() and flock().
      if (!is_same_file(descriptor, file)) {
        ::close(descriptor);
        continue;
      }
      write_owner(descriptor);
      lock.descriptor_ = descriptor;
      lock.outcome_ = Outcome::Held;
      return lock;
    }
    const int error = errno;
    const std::optional<LockOwner> owner = owner_in(descriptor);
    const bool abandoned = owner && owner->is_dead() && is_same_file(descriptor, file);
    ::close(descriptor);
    if (error != EWOULDBLOCK && error != EINTR) {
      errno = error;
      return fail("the lock file cannot be locked");
    }
    lock.waited_ = true;
    if (done()) {
      lock.outcome_ = Outcome::Done;
      return lock;
    }
    if (abandoned && ::unlink(file.c_str()) == 0) continue;
    if (std::chrono::steady_clock::now() - begin >= limit) {
      lock.outcome_ = Outcome::TimedOut;
      lock.why_ = fmt::format("{} has held the lock for {:.1f} s",
                              owner ? fmt::format("process {} on host {}", owner->pid, owner->host)
                                    : std::string("an unknown process"),
                              std::chrono::duration<double>(limit).count());
      return lock;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::milliseconds>(2 * pause, 50ms);
  }
}

void EntryLock::release() noexcept {
  if (descriptor_ < 0) return;
  // While it is still locked: a process that opens the file now finds, once it has the lock, that the name is
  // gone.
  if (is_same_file(descriptor_, file_)) ::unlink(file_.c_str());
  ::close(descriptor_);
  descriptor_ = -1;
}

}  // namespace penstock::graph
