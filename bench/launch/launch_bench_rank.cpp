// A rank of launch_bench: joins the world, waits in one barrier, and writes the time to a file.
//
//   launch_bench_rank --arrive FILE
//   launch_bench_rank --death FILE    the last rank then kills itself; the others write when they noticed it
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <thread>

#include "penstock/base/leave_process.h"
#include "penstock/errors.h"
#include "penstock/world.h"

namespace {

bool write_time(const char* path) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const std::string line =
      fmt::format("{}\n", std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  const int file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
  return file >= 0 && write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size());
}

int join(const char* arrivals) {
  const penstock::comm::World world = penstock::comm::World::from_env();
  world.group().barrier().wait();
  return write_time(arrivals) ? 0 : 1;
}

int lose_the_last(const char* times) {
  const penstock::comm::World world = penstock::comm::World::from_env();
  world.group().barrier().wait();
  if (world.rank() == world.size() - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the others wait by then
    if (write_time(times)) kill(getpid(), SIGKILL);
    return 1;
  }
  try {
    world.group().barrier().wait();
  } catch (const penstock::PeerLostError&) {
    return write_time(times) ? 0 : 1;
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc == 3 ? argv[1] : "";
  if (what != "--arrive" && what != "--death") {
    fmt::print(stderr, "usage: launch_bench_rank --arrive FILE\n       launch_bench_rank --death FILE\n");
    return 2;
  }
  int code = 1;
  try {
    code = what == "--arrive" ? join(argv[2]) : lose_the_last(argv[2]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "launch_bench_rank: {}\n", error.what());
  }
  penstock::leave_process(code);
}
