#include "penstock/comm/launch/compute_environment.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "penstock/comm/launch/launch_cores.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

namespace fs = std::filesystem;

// Long enough for the next small operator to find its threads awake, too short to take a core from others:
// about 10 us on Arm and 100 us on x86-64, whose pause instruction is slower. The default is 300,000.
constexpr const char* kSpinCount = "2000";

// Set before a program executes itself again, so that it does so only once.
constexpr const char* kRestarted = "PENSTOCK_RESTARTED_TO_COMPUTE";

// Folder of the packaged libraries, "/usr/lib/x86_64-linux-gnu"; empty if the distribution has no such
// folders.
constexpr const char* kSystemLibraries = PENSTOCK_SYSTEM_LIBRARIES;

std::string from_process(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::string() : std::string(value);
}

std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

// Returns whether the launcher that started this process gave it its own cores. A container also has a small
// mask, but its processes share it.
bool bound_to_cores() { return affinity_cores(0) < affinity_cores(::getppid()); }

}  // namespace

BlasThreads loaded_blas_threads() {
  const auto parallel = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "openblas_get_parallel"));
  if (parallel == nullptr) return BlasThreads::NoOpenBlas;
  switch (parallel()) {
    case 0:
      return BlasThreads::Sequential;
    case 1:
      return BlasThreads::OwnPool;
    default:
      return BlasThreads::OpenMp;
  }
}

std::string openmp_blas_folder(const std::string& libraries) {
  if (libraries.empty()) return {};
  std::error_code failed;  // a missing file is not an error
  const fs::path chosen = fs::canonical(fs::path(libraries) / "libopenblas.so.0", failed);
  if (failed || chosen.parent_path().filename() != "openblas-pthread") return {};
  const fs::path folder = chosen.parent_path().parent_path() / "openblas-openmp";
  for (const char* library : {"libopenblas.so.0", "libblas.so.3", "liblapack.so.3"})
    if (!fs::exists(folder / library, failed)) return {};
  return folder.string();
}

std::vector<std::pair<std::string, std::string>> compute_environment(int threads,
                                                                     const EnvironmentReader& environment) {
  std::vector<std::pair<std::string, std::string>> result;
  std::string count = environment("OMP_NUM_THREADS");
  if (count.empty()) count = environment("MKL_NUM_THREADS");
  if (count.empty()) count = fmt::format("{}", threads);
  for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
    if (environment(name).empty()) result.emplace_back(name, count);
  if (environment("OMP_WAIT_POLICY").empty() && environment("GOMP_SPINCOUNT").empty())
    result.emplace_back("GOMP_SPINCOUNT", kSpinCount);
  if (const std::string folder = openmp_blas_folder(kSystemLibraries); !folder.empty()) {
    const std::string others = environment("LD_LIBRARY_PATH");
    if (!(others + ":").starts_with(folder + ":"))
      result.emplace_back("LD_LIBRARY_PATH", others.empty() ? folder : folder + ":" + others);
  }
  for (const auto& [name, value] : {std::pair{"MALLOC_MMAP_THRESHOLD_", "33554432"},
                                    {"MALLOC_TRIM_THRESHOLD_", "17179869184"},
                                    {"MIMALLOC_PURGE_DELAY", "-1"}})
    if (environment(name).empty()) result.emplace_back(name, value);
  return result;
}

void restart_with_compute_environment(int ranks_on_host) {
  if (!from_process("PENSTOCK_LAUNCH_ID").empty() || !from_process(kRestarted).empty()) return;
  const int threads =
      bound_to_cores() ? available_cores() : threads_per_rank(available_cores(), ranks_on_host);
  const auto missing = compute_environment(threads, from_process);
  if (missing.empty()) return;
  for (const auto& [name, value] : missing) ::setenv(name.c_str(), value.c_str(), 1);
  ::setenv(kRestarted, "1", 1);
  std::vector<std::string> words = command_line();
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execv("/proc/self/exe", argv.data());
  throw StateError(
      fmt::format("train: the program could not be restarted with settings for threads and memory: {}; set "
                  "{}=1 to train without them",
                  std::generic_category().message(errno), kRestarted));
}

}  // namespace penstock::comm
