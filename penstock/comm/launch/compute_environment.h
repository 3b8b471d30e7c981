// Environment variables that configure the threads and memory allocators of a process for training. Libraries
// read them while they are loaded, so they must be set before the process starts: the launcher sets them for
// its ranks.
//
// Threads: LibTorch runs on OpenMP threads. Debian's OpenBLAS exists in a build with its own threads and in
// one that uses OpenMP's. With two pools, waiting threads of one pool keep the cores from the other: with one
// busy neighbour per core, two threads then train at a quarter of the speed of one. The variables therefore
//   - select the OpenMP build of OpenBLAS if the system has it but prefers the other one (LD_LIBRARY_PATH),
//   - let OpenMP threads that wait spin for microseconds instead of milliseconds (GOMP_SPINCOUNT), and
//   - give every library the same number of threads (OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS).
//
// Memory: training frees and allocates the same memory all the time. If it is returned to the system in
// between, every page costs a fault again, which made steps up to a fifth longer; both allocators that
// LibTorch uses are told to keep it (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, MIMALLOC_PURGE_DELAY).
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

// Returns the kind of the OpenBLAS loaded in this process, or NoOpenBlas.
BlasThreads loaded_blas_threads();

// Returns the folder of the OpenMP build of OpenBLAS if the system's library folder `libraries` has both
// builds but prefers the one with its own threads; otherwise "". Another BLAS that the user chose is not
// replaced.
std::string openmp_blas_folder(const std::string& libraries);

// Returns the variables to set for a process that should compute with `threads` threads, given its
// environment. Variables that are already set are kept: OMP_NUM_THREADS (or else MKL_NUM_THREADS) then also
// applies to the libraries that have no value of their own, and OMP_WAIT_POLICY or GOMP_SPINCOUNT keep their
// wait policy.
std::vector<std::pair<std::string, std::string>> compute_environment(int threads,
                                                                     const EnvironmentReader& environment);

// For a rank that another launcher started (mpirun, srun, torchrun), before it computes: if variables are
// missing, sets them and executes this program again in the same process with the same arguments. Returns if
// nothing is missing, and in the program that was executed again. `ranks_on_host` ranks share the cores,
// unless each is bound to its own cores.
void restart_with_compute_environment(int ranks_on_host);

}  // namespace penstock::comm
