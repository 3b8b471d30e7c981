// The start of a compiled training step with and without the compile cache: cold, with the halves in the
// cache, and with the whole call in it, for transformers of 12 and 48 layers; and how many of 8 processes
// that start at once compile.
//
//   cache_bench
//   cache_bench --width 256 --layers 48 --repeats 20
//
// A start is everything from the inputs to a call that is ready to run. Figures are the minimum of several
// starts, in microseconds of processor time per node of the joint graph; "of cold" is the ratio. Export
// OMP_NUM_THREADS=1.
#include <fmt/format.h>
#include <sys/wait.h>
#include <time.h>
#include <torch/torch.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/graph/model_function.h"
#include "penstock/base/files.h"
#include "penstock/graph/run/capture_codec.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_call.h"

namespace {

using namespace penstock;
using namespace penstock::graph;
using namespace penstock::bench;

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

double least(
    int repeats, const std::function<void()>& work, const std::function<void()>& prepare = [] {}) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    prepare();
    const double begin = cpu_us();
    work();
    best = std::min(best, cpu_us() - begin);
  }
  return best;
}

ModelFunction step_of(int width, int layers) {
  return {Model(width, layers), torch::randn({4, kSequence, width}), torch::randn({4, kSequence, width})};
}

// A folder for entries, removed at the end.
class TemporaryCache {
 public:
  TemporaryCache() {
    std::string pattern = (std::filesystem::temp_directory_path() / "penstock_bench_XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryCache() { clear(); }
  TemporaryCache(const TemporaryCache&) = delete;
  TemporaryCache& operator=(const TemporaryCache&) = delete;

  void clear() const { remove_tree(folder_); }
  CompileOptions options(const std::string& identity) const {
    CompileOptions all;
    all.cache = {.use = CacheOptions::Use::On, .folder = folder_.string(), .identity = identity};
    return all;
  }

 private:
  std::filesystem::path folder_;
};

// 8 processes on a cold cache. To be called before this one has run a backward: with CUDA, children could run
// none afterwards.
void start_at_once(int width, int layers) {
  const ModelFunction step = step_of(width, layers);
  const TemporaryCache cache;
  std::vector<pid_t> processes;
  for (int i = 0; i < 8; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      Compiled compiled(step.function, cache.options("bench"), step.convention);
      compiled.prepare(step.inputs);
      ::_exit(compiled.loaded() == 1 ? 0 : 1);
    }
    processes.push_back(child);
  }
  int compiled = 0, failed = 0;
  for (const pid_t process : processes) {
    int status = 0;
    ::waitpid(process, &status, 0);
    compiled += WIFEXITED(status) && WEXITSTATUS(status) == 1 ? 1 : 0;
    failed += WIFEXITED(status) ? 0 : 1;
  }
  fmt::print("{:3} layers, 8 processes at once: {} compiled, {} loaded, {} failed\n", layers, compiled,
             8 - compiled - failed, failed);
}

void measure(int width, int layers, int repeats) {
  const ModelFunction step = step_of(width, layers);
  const TemporaryCache cache;
  // What the last start made is destroyed between the measurements.
  std::unique_ptr<Compiled> made_last;
  const auto start = [&](const CompileOptions& chosen) {
    made_last = std::make_unique<Compiled>(step.function, chosen, step.convention);
    made_last->prepare(step.inputs);
  };
  const auto least_start = [&](const CompileOptions& chosen, bool from_empty = false) {
    return least(
        repeats, [&] { start(chosen); },
        [&] {
          made_last.reset();
          if (from_empty) cache.clear();
        });
  };
  start({});
  const auto nodes = static_cast<double>(made_last->joint(0).graph.nodes.size());
  const double cold = least_start({});
  const double storing = least_start(cache.options("bench"), true);
  const double halves = least_start(cache.options(""));
  const double call = least_start(cache.options("bench"));
  made_last.reset();
  const PartitionedCapture made =
      partition(capture_function(step.function, step.inputs, step.convention), Partitioner::Default);
  Bytes bytes;
  const double encode = least(repeats, [&] { bytes = encode_capture(made); });
  const double decode = least(repeats, [&] { decode_capture(bytes); });
  const double plan = least(repeats, [&] {
    const auto compiler = graph_compiler(kExecutorCompiler);
    compiler->compile(made.halves.forward, {.role = GraphRole::Forward});
    compiler->compile(made.halves.backward, {.role = GraphRole::Backward});
  });
  fmt::print(
      "{:3} layers, {:5.0f} nodes, us/node: cold {:5.2f}, cold and stored {:5.2f}; halves from the cache "
      "{:5.2f} ({:.3f} of "
      "cold), call from the cache {:5.2f} ({:.3f} of cold); of it decoding {:5.2f}, executor {:5.2f}; "
      "encoding {:5.2f}, "
      "{:.1f} bytes/node\n",
      layers, nodes, cold / nodes, storing / nodes, halves / nodes, halves / cold, call / nodes, call / cold,
      decode / nodes, plan / nodes, encode / nodes, static_cast<double>(bytes.size()) / nodes);
}

}  // namespace

int main(int argc, char** argv) {
  int width = 32, repeats = 7;
  std::vector<int> layers{12, 48};
  CLI::App app("The start of a compiled step with and without the compile cache");
  app.add_option("--width", width);
  app.add_option("--layers", layers);
  app.add_option("--repeats", repeats);
  CLI11_PARSE(app, argc, argv);
  torch::set_num_threads(1);
  for (const int count : layers) start_at_once(width, count);
  for (const int count : layers) measure(width, count, repeats);
  return 0;
}
