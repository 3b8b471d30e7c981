// A rank of launch_bench: joins the world, waits in one barrier, and writes the time to a file.
//
//   launch_bench_rank --arrive FILE
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>

#include "penstock/base/leave_process.h"
#include "penstock/world.h"

namespace {

int join(const char* arrivals) {
  const penstock::comm::World world = penstock::comm::World::from_env();
  world.group().barrier().wait();
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const std::string line =
      fmt::format("{}\n", std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  const int file = open(arrivals, O_WRONLY | O_APPEND | O_CLOEXEC);
  return file >= 0 && write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size()) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 || std::string_view(argv[1]) != "--arrive") {
    fmt::print(stderr, "usage: launch_bench_rank --arrive FILE\n");
    return 2;
  }
  int code = 1;
  try {
    code = join(argv[2]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "launch_bench_rank: {}\n", error.what());
  }
  penstock::leave_process(code);
}
