// The thread measurements of `penstock doctor`: how much faster several threads compute.
#pragma once

#include <string>
#include <vector>

#include "penstock/comm/launch/compute_environment.h"

namespace penstock::cli {

struct ThreadSpeed {
  int threads = 1;
  double gflops = 0;  // 1e9 floating point operations per second
};

struct ThreadSpeeds {
  comm::BlasThreads blas = comm::BlasThreads::NoOpenBlas;
  std::vector<ThreadSpeed> speeds;  // 1, 2, 4, ... and the number of threads of a single rank
};

void write_thread_speeds(const ThreadSpeeds& speeds, const std::string& path);
// Throws StateError for an incomplete file, as on a full disk.
ThreadSpeeds read_thread_speeds(const std::string& path);

// Returns one line per thread count, and a warning with a remedy if more threads are slower or OpenBLAS has
// its own thread pool.
std::string describe_thread_speeds(const ThreadSpeeds& speeds);

}  // namespace penstock::cli
