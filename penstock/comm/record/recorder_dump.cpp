#include "penstock/comm/record/recorder_dump.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/comm/record/recorder.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

std::string file_name(int rank, int pid) { return fmt::format("recorder-rank{}-{}.json", rank, pid); }

// ---- used by the signal handler: plain memory and system calls, no locks, no allocation ----

struct NamedSignal {
  int number;
  const char* reason;
  bool crash;
  bool fault;  // raised by an instruction, which raises it again when the handler returns
};
constexpr NamedSignal kSignals[] = {
    {SIGSEGV, "fatal signal SIGSEGV", true, true},  {SIGBUS, "fatal signal SIGBUS", true, true},
    {SIGFPE, "fatal signal SIGFPE", true, true},    {SIGILL, "fatal signal SIGILL", true, true},
    {SIGABRT, "fatal signal SIGABRT", true, false}, {SIGTERM, "signal SIGTERM", false, false},
    {SIGQUIT, "signal SIGQUIT", false, false},
};
constexpr std::size_t kLongestDirectory = 900;

struct Target {
  char directory[kLongestDirectory + 1];
  int rank;
  Recorder* recorder;
};
// Replaced as a whole and never freed, so that a handler on another thread always reads a complete object.
std::atomic<const Target*> target = nullptr;

struct Installed {
  struct sigaction previous;
  std::atomic<bool> active = false;
};
Installed installed[std::size(kSignals)];

std::atomic<pid_t> dumping_thread = 0;

class FileSink final : public ByteSink {
 public:
  explicit FileSink(int file) : file_(file) {}

  void put(std::string_view bytes) override {
    while (!bytes.empty()) {
      const std::size_t part = std::min(bytes.size(), sizeof buffer_ - used_);
      std::memcpy(buffer_ + used_, bytes.data(), part);
      used_ += part;
      bytes.remove_prefix(part);
      if (used_ == sizeof buffer_) flush();
    }
  }

  bool flush() {
    for (std::size_t done = 0; ok_ && done < used_;) {
      const ssize_t written = ::write(file_, buffer_ + done, used_ - done);
      if (written > 0) done += static_cast<std::size_t>(written);
      ok_ = written > 0 || (written < 0 && errno == EINTR);
    }
    used_ = 0;
    return ok_;
  }

 private:
  int file_;
  bool ok_ = true;
  std::size_t used_ = 0;
  char buffer_[4096];
};

class PathBuffer {
 public:
  PathBuffer& add(std::string_view part) {
    const std::size_t fits = std::min(part.size(), sizeof text_ - 1 - used_);
    std::memcpy(text_ + used_, part.data(), fits);
    used_ += fits;
    text_[used_] = '\0';
    return *this;
  }
  const char* c_str() const { return text_; }

 private:
  char text_[kLongestDirectory + 100] = {};
  std::size_t used_ = 0;
};

void write_stderr(std::string_view text) {
  // Nothing can be done about a closed standard error here.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

void dump_now(const Target& where, const char* reason) {
  PathBuffer path;
  path.add(where.directory).add("/recorder-rank").add(Decimal::of(where.rank).view());
  path.add("-").add(Decimal::of(::getpid()).view()).add(".json");
  PathBuffer partial = path;
  partial.add(".partial");

  bool written = false;
  // The name is known to everybody and the folder may be shared: what is there already, such as somebody's
  // link to a file of this user, is not written to.
  ::unlink(partial.c_str());
  const int file =
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (file >= 0) {
    FileSink sink(file);
    where.recorder->write_from_signal_handler(sink, reason);
    written = sink.flush();
    ::close(file);
    written = written && ::rename(partial.c_str(), path.c_str()) == 0;
  }
  PathBuffer line;
  line.add("penstock: ")
      .add(reason)
      .add(written ? ": recorder dump in " : ": could not write the recorder dump ");
  write_stderr(line.c_str());
  write_stderr(path.c_str());
  write_stderr("\n");
}

// Allows one dump at a time. A second thread that crashes meanwhile waits briefly for it instead of ending
// the process during the dump; a crash inside the dump itself ends the process at once.
void dump_once(const char* reason) {
  const Target* where = target.load(std::memory_order_acquire);
  if (where == nullptr) return;
  const pid_t self = ::gettid();
  pid_t owner = 0;
  if (dumping_thread.compare_exchange_strong(owner, self)) {
    dump_now(*where, reason);
    dumping_thread.store(0);
    return;
  }
  if (owner == self) return;
  for (int i = 0; i < 200 && dumping_thread.load() != 0; ++i) {
    const timespec pause = {0, 10'000'000};
    ::nanosleep(&pause, nullptr);
  }
}

// Returns whether returning from the handler raises the same fault again, now for the previous handler and
// with its true address.
bool repeats(const NamedSignal& signal, const siginfo_t& info) {
  // si_code <= 0: sent by raise, abort or kill. BUS_MCEERR_AO: bad memory that no instruction has touched
  // yet.
  return signal.fault && info.si_code > 0 && !(signal.number == SIGBUS && info.si_code == BUS_MCEERR_AO);
}

extern "C" void penstock_on_fatal_signal(int number, siginfo_t* info, void*) {
  const int saved_errno = errno;
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    if (kSignals[i].number != number) continue;
    dump_once(kSignals[i].reason);
    ::sigaction(number, &installed[i].previous, nullptr);
    installed[i].active.store(false);
    // Otherwise it must be sent again; it is blocked here and arrives on return.
    if (!repeats(kSignals[i], *info)) ::raise(number);
  }
  errno = saved_errno;
}

// ---- installing ----

// Gives the calling thread a stack for signal handlers. Mapped and never unmapped: it must outlive every
// destructor of the thread.
void set_signal_stack() {
  constexpr std::size_t kBytes = 64 * 1024;
  stack_t present{};
  if (::sigaltstack(nullptr, &present) == 0 && (present.ss_flags & SS_DISABLE) == 0) return;
  void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  stack_t stack{};
  stack.ss_sp = memory;
  stack.ss_size = kBytes;
  if (memory == MAP_FAILED || ::sigaltstack(&stack, nullptr) != 0)
    throw StateError(
        fmt::format("cannot allocate a signal handler stack for this thread: {}", std::strerror(errno)));
}

}  // namespace

std::optional<std::string> recorder_directory() {
  if (auto directory = env_text("PENSTOCK_RECORDER_DIR")) return directory;
  return env_text("PENSTOCK_LOG_DIR");
}

std::string dump_for_error(std::string_view reason) {
  try {
    const Recorder& recorder = Recorder::global();
    std::filesystem::path directory;
    if (const auto configured = recorder_directory()) {
      directory = *configured;
      std::filesystem::create_directories(directory);
    } else {
      directory = std::filesystem::temp_directory_path();
    }
    const std::string path = (directory / file_name(recorder.rank().value_or(0), ::getpid())).string();
    recorder.dump(path, reason);
    return fmt::format("the last operations of this rank are in {}", path);
  } catch (const std::exception& error) {
    return fmt::format("the last operations of this rank could not be written: {}", error.what());
  }
}

void install_fatal_signal_dump(const std::string& directory, int rank, FatalSignals signals) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const auto refuse = [&](std::string_view why) {
    return ConfigError(describe("folder for dumps of the recorder", fmt::format("{} ({})", directory, why),
                                "a folder that this user may write to", "set PENSTOCK_RECORDER_DIR to one"));
  };
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw refuse(error.message());
  if (::access(directory.c_str(), W_OK | X_OK) != 0) throw refuse(std::strerror(errno));
  // Absolute: the process may change its working directory before it dies.
  const std::string absolute = std::filesystem::absolute(directory).string();
  if (absolute.size() > kLongestDirectory) throw refuse(fmt::format("more than {} bytes", kLongestDirectory));

  Recorder& recorder = Recorder::global();
  recorder.set_rank(rank);
  static std::vector<std::unique_ptr<Target>>& targets = *new std::vector<std::unique_ptr<Target>>;
  auto next = std::make_unique<Target>();
  std::memcpy(next->directory, absolute.c_str(), absolute.size() + 1);
  next->rank = rank;
  next->recorder = &recorder;
  target.store(next.get(), std::memory_order_release);
  targets.push_back(std::move(next));

  set_signal_stack();
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    if (!kSignals[i].crash && signals == FatalSignals::Crashes) continue;
    if (installed[i].active.load()) continue;
    struct sigaction action {};
    action.sa_sigaction = penstock_on_fatal_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    installed[i].active.store(true);
    if (::sigaction(kSignals[i].number, nullptr, &installed[i].previous) != 0 ||
        ::sigaction(kSignals[i].number, &action, nullptr) != 0)
      throw StateError(fmt::format("cannot install the handler for signal {}: {}", kSignals[i].number,
                                   std::strerror(errno)));
  }
}

}  // namespace penstock::comm
