// What `penstock doctor` says about threads: how much faster more of them compute.
#pragma once

#include <string>
#include <vector>

#include "penstock/comm/launch/compute_environment.h"

namespace penstock::cli {

struct ThreadSpeed {
  int threads = 1;
  double gflops = 0;  // 1e9 floating point operations a second
};

struct ThreadSpeeds {
  comm::BlasThreads blas = comm::BlasThreads::NoOpenBlas;
  std::vector<ThreadSpeed> speeds;  // 1, 2, 4, ... and as many threads as a single rank would have
};

void write_thread_speeds(const ThreadSpeeds& speeds, const std::string& path);
// Throws StateError for a file that was not written completely, as on a full disk.
ThreadSpeeds read_thread_speeds(const std::string& path);

// A line for each count of threads, and a warning with its remedy if more threads are slower or OpenBLAS has a pool of its own.
std::string describe_thread_speeds(const ThreadSpeeds& speeds);

}  // namespace penstock::cli
