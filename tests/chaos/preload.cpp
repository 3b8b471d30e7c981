// Preloaded into the processes of a job: makes their disk slow and their time of day jump, while the harness
// says so. A jump is that of the system's clock: time-outs against the time of day keep their length, as in
// the kernel, whose clock would have jumped, too.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include "tests/chaos/injected.h"

namespace {

constexpr std::int64_t kSecond_ns = 1'000'000'000;

struct Setup {
  const penstock::chaos::Injected* injected = nullptr;
  int rank = -1;

  Setup() {
    if (const char* text = getenv("RANK")) rank = atoi(text);
    const char* path = getenv(penstock::chaos::kInjectedVariable);
    if (path == nullptr) return;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void* memory = mmap(nullptr, sizeof(penstock::chaos::Injected), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (memory != MAP_FAILED) injected = static_cast<const penstock::chaos::Injected*>(memory);
  }
};

const Setup& setup() {
  static const Setup made;
  return made;
}

std::int64_t clock_jump_ns() {
  const Setup& known = setup();
  if (known.injected == nullptr) return 0;
  const std::int32_t rank = known.injected->rank;
  return rank < 0 || rank == known.rank ? known.injected->clock_jump_ns.load() : 0;
}

timespec shifted(const timespec& time, std::int64_t by_ns) {
  std::int64_t nanoseconds = time.tv_nsec + by_ns % kSecond_ns;
  std::int64_t seconds = time.tv_sec + by_ns / kSecond_ns;
  if (nanoseconds < 0) {
    nanoseconds += kSecond_ns;
    --seconds;
  } else if (nanoseconds >= kSecond_ns) {
    nanoseconds -= kSecond_ns;
    ++seconds;
  }
  timespec result{};
  result.tv_sec = static_cast<time_t>(seconds);
  result.tv_nsec = static_cast<long>(nanoseconds);
  return result;
}

// A deadline against the time of day is understood by the kernel, whose clock has not jumped. Deadlines of
// conditions that use the monotonic clock pass through the same function; they are small numbers.
const timespec* for_kernel(const timespec* deadline, timespec& place) {
  constexpr time_t kFirstTimeOfDay = 1'000'000'000;
  const std::int64_t jump = clock_jump_ns();
  if (jump == 0 || deadline == nullptr || deadline->tv_sec < kFirstTimeOfDay) return deadline;
  place = shifted(*deadline, -jump);
  return &place;
}

template <class Function>
Function* next(const char* name) {
  // The unversioned lookup finds the oldest version of the conditions, which has another layout.
  void* found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
  if (found == nullptr) found = dlsym(RTLD_NEXT, name);
  return reinterpret_cast<Function*>(found);
}

void slow_down(int fd) {
  const Setup& known = setup();
  const std::int64_t delay_us = known.injected == nullptr ? 0 : known.injected->write_delay_us.load();
  struct stat info {};
  if (delay_us <= 0 || fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return;
  const int error = errno;
  usleep(static_cast<useconds_t>(delay_us));
  errno = error;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    *time = shifted(*time, clock_jump_ns());
  return result;
}

int gettimeofday(timeval* time, void* zone) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  *time = {now.tv_sec, static_cast<suseconds_t>(now.tv_nsec / 1000)};
  if (zone != nullptr) *static_cast<struct timezone*>(zone) = {};
  return 0;
}

time_t time(time_t* place) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (place != nullptr) *place = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* deadline) {
  static auto* const real = next<decltype(pthread_cond_timedwait)>("pthread_cond_timedwait");
  timespec place{};
  return real(condition, mutex, for_kernel(deadline, place));
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  static auto* const real = next<decltype(pthread_cond_clockwait)>("pthread_cond_clockwait");
  timespec place{};
  return real(condition, mutex, clock, clock == CLOCK_REALTIME ? for_kernel(deadline, place) : deadline);
}

int sem_timedwait(sem_t* semaphore, const timespec* deadline) {
  static auto* const real = next<decltype(sem_timedwait)>("sem_timedwait");
  timespec place{};
  return real(semaphore, for_kernel(deadline, place));
}

ssize_t write(int fd, const void* bytes, size_t count) {
  slow_down(fd);
  return syscall(SYS_write, fd, bytes, count);
}

ssize_t writev(int fd, const iovec* parts, int count) {
  slow_down(fd);
  return syscall(SYS_writev, fd, parts, count);
}

ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  slow_down(fd);
  return syscall(SYS_pwrite64, fd, bytes, count, offset);
}

ssize_t pwrite64(int fd, const void* bytes, size_t count, off64_t offset) {
  slow_down(fd);
  return syscall(SYS_pwrite64, fd, bytes, count, offset);
}

int fsync(int fd) {
  slow_down(fd);
  return static_cast<int>(syscall(SYS_fsync, fd));
}

int fdatasync(int fd) {
  slow_down(fd);
  return static_cast<int>(syscall(SYS_fdatasync, fd));
}

}  // extern "C"
