// Environment variables that make a process compute well with its threads and its memory. Libraries read them while they are
// loaded, so they must be set before the process starts: the launcher sets them for its ranks.
//
// Threads: LibTorch runs on OpenMP threads. Debian's OpenBLAS comes in a build with threads of its own and in one that uses
// OpenMP's. With two pools, the waiting threads of one keep the cores from the other: beside one busy neighbour for each core,
// two threads then train at a quarter of the speed of one. The variables therefore
//   - select the OpenMP build of OpenBLAS where the system has it but prefers the other one (LD_LIBRARY_PATH),
//   - let OpenMP threads that wait spin for microseconds instead of milliseconds (GOMP_SPINCOUNT), and
//   - give every library the same number of threads (OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS).
//
// Memory: training frees and takes the same memory all the time. Given back to the system in between, every page of it costs a
// fault again, which made steps up to a fifth longer; both allocators that LibTorch comes with are told to keep it
// (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, MIMALLOC_PURGE_DELAY).
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace penstock::comm {

// The value of an environment variable; empty if it is not set.
using EnvironmentReader = std::function<std::string(const std::string& name)>;

// How OpenBLAS runs its threads.
enum class BlasThreads { NoOpenBlas, Sequential, OwnPool, OpenMp };

// Of the OpenBLAS in this process, or NoOpenBlas.
BlasThreads loaded_blas_threads();

// Folder of the OpenMP build of OpenBLAS if the system's library folder `libraries` prefers the build with threads of its own but
// has both; otherwise empty. Another BLAS that somebody chose is left alone.
std::string openmp_blas_folder(const std::string& libraries);

// The variables to set for a process that should compute with `threads` threads, given what its environment already holds.
// What is set stays: OMP_NUM_THREADS (or else MKL_NUM_THREADS) then also decides for the libraries that have no value of their own,
// and OMP_WAIT_POLICY or GOMP_SPINCOUNT keep their way of waiting.
std::vector<std::pair<std::string, std::string>> compute_environment(int threads, const EnvironmentReader& environment);

// For a rank that another launcher started (mpirun, srun, torchrun), before it computes: if variables are missing, sets them and
// starts this program again in the same process with the same arguments. Returns if nothing is missing, and in the
// program that was started again. `ranks_on_host` ranks share the cores, unless each is bound to cores of its own.
void restart_with_compute_environment(int ranks_on_host);

}  // namespace penstock::comm
