// One-way latency of the UCX transport between two processes of this host: half a round trip, median and
// best, compared with a plain memcpy of the same size in one process (what the memory allowed at that
// moment).
//
//   ucx_bench [--huge]     --huge: buffers on huge pages, if the kernel provides them
//
// Columns: fetching (the default), pieces (UCX_TLS=posix,self), sleeping (default, but every wait sleeps
// immediately).
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/comm/transport/ucx_transport.h"

namespace {

using namespace penstock::comm;
using namespace std::chrono_literals;

constexpr std::size_t kSizes[] = {4, 256, 4096, 16384, 65536, 262144, 1u << 20, 8u << 20};
constexpr std::size_t kLargest = 8u << 20;

struct Timing {
  double median_us = 0;
  double best_us = 0;
};

int rounds_of(std::size_t bytes) {
  return bytes <= 16384 ? 3000 : bytes <= 262144 ? 1000 : bytes <= (1u << 20) ? 300 : 60;
}

char* buffer(bool huge) {
  void* place = std::aligned_alloc(2u << 20, kLargest);
  if (place == nullptr) throw std::bad_alloc();
  if (huge && madvise(place, kLargest, MADV_HUGEPAGE) != 0)
    std::fprintf(stderr, "huge pages are not available\n");
  std::memset(place, 1, kLargest);
  return static_cast<char*>(place);
}

template <class Call>
Timing measure(int rounds, double share, Call call) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto start = Clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() * share);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front()};
}

void must(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

// Exchanges what both ends publish over a socket, in the same order on both sides.
class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}

  void publish(const std::string& bytes) {
    const std::uint64_t length = bytes.size();
    must(write(fd_, &length, sizeof length) == sizeof length, "write");
    must(write(fd_, bytes.data(), length) == static_cast<ssize_t>(length), "write");
  }

  std::string fetch() {
    std::uint64_t length = 0;
    must(read(fd_, &length, sizeof length) == sizeof length, "read");
    std::string bytes(length, '\0');
    must(recv(fd_, bytes.data(), length, MSG_WAITALL) == static_cast<ssize_t>(length), "read");
    return bytes;
  }

 private:
  int fd_;
};

std::map<std::size_t, Timing> end_of_pair(int rank, int fd, bool huge, UcxOptions options) {
  Socket socket(fd);
  UcxTransport transport(
      rank, 2, [&](const std::string&, const std::string& bytes) { socket.publish(bytes); },
      [&](const std::string&) { return socket.fetch(); }, options);
  char* out = buffer(huge);
  char* into = buffer(huge);
  const auto send = [&](std::size_t bytes) {
    must(transport.send(out, bytes, 1 - rank, 0, 0)->wait(Clock::now() + 30s) == WaitResult::Done, "send");
  };
  const auto receive = [&](std::size_t bytes) {
    must(transport.recv(into, bytes, 1 - rank, 0)->wait(Clock::now() + 30s) == WaitResult::Done, "receive");
  };
  std::map<std::size_t, Timing> timings;
  for (const std::size_t bytes : kSizes) {
    const auto turn = [&] {
      if (rank == 0) send(bytes);
      receive(bytes);
      if (rank == 1) send(bytes);
    };
    for (int i = 0; i < 10; ++i) turn();
    timings[bytes] = measure(rounds_of(bytes), 0.5, turn);
  }
  return timings;
}

std::map<std::size_t, Timing> pair(bool huge, const char* transports, UcxOptions options) {
  int ends[2];
  must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
  int results[2];
  must(pipe(results) == 0, "pipe");
  pid_t processes[2];
  // Both ends are children: UCX reads its environment once per process.
  for (int rank = 0; rank < 2; ++rank) {
    processes[rank] = fork();
    must(processes[rank] >= 0, "fork");
    if (processes[rank] != 0) continue;
    int code = 0;
    try {
      if (transports != nullptr) setenv("UCX_TLS", transports, 1);
      const auto timings = end_of_pair(rank, ends[rank], huge, options);
      if (rank == 0)
        for (const auto& [bytes, timing] : timings)
          must(write(results[1], &timing, sizeof timing) == sizeof timing, "write");
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      code = 1;
    }
    _exit(code);
  }
  bool well = true;
  for (const pid_t process : processes) {
    int status = 0;
    waitpid(process, &status, 0);
    well = well && status == 0;
  }
  must(well, "one of the two processes failed");
  std::map<std::size_t, Timing> timings;
  for (const std::size_t bytes : kSizes)
    must(read(results[0], &timings[bytes], sizeof(Timing)) == sizeof(Timing), "read");
  for (const int fd : {ends[0], ends[1], results[0], results[1]}) close(fd);
  return timings;
}

}  // namespace

int main(int argc, char** argv) {
  const bool huge = argc > 1 && std::string_view(argv[1]) == "--huge";
  if (!ucx_available()) {
    std::fprintf(stderr, "this build has no UCX\n");
    return 1;
  }
  std::printf("UCX %s, %s pages; microseconds one way: median / best (times memcpy's median)\n",
              ucx_version().c_str(), huge ? "huge" : "ordinary");
  std::map<std::size_t, Timing> copy;
  char* from = buffer(huge);
  char* to = buffer(huge);
  for (const std::size_t bytes : kSizes)
    copy[bytes] = measure(rounds_of(bytes), 1, [&] {
      std::memcpy(to, from, bytes);
      asm volatile("" : : "r"(to) : "memory");
    });
  const auto fetching = pair(huge, nullptr, {});
  const auto pieces = pair(huge, "posix,self", {});
  const auto sleeping = pair(huge, nullptr, {.spin = 0us});
  std::printf("%8s %22s %22s %22s %17s\n", "bytes", "fetching", "pieces", "sleeping", "memcpy");
  const auto cell = [](const Timing& timing, const Timing& base) {
    char text[64];
    std::snprintf(text, sizeof text, "%.2f / %.2f (%.1f)", timing.median_us, timing.best_us,
                  timing.median_us / base.median_us);
    return std::string(text);
  };
  for (const std::size_t bytes : kSizes)
    std::printf("%8zu %22s %22s %22s %8.2f / %.2f\n", bytes, cell(fetching.at(bytes), copy[bytes]).c_str(),
                cell(pieces.at(bytes), copy[bytes]).c_str(), cell(sleeping.at(bytes), copy[bytes]).c_str(),
                copy[bytes].median_us, copy[bytes].best_us);
  return 0;
}
