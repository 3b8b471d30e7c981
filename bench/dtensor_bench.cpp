// The overhead of an operator on distributed tensors over the same operator on plain ones, with its decision
// cached.
//
//   dtensor_bench                                                 the figures of this library, two ranks
//   dtensor_bench --peer "python3 bench/dtensor_peer.py"          also Python's DTensor, with the ratios
//   dtensor_bench --world 1 --grad                                one rank; recording a graph
//
// Local tensors are 8 x 16, so that dispatch dominates. Distributed and plain calls alternate in short blocks
// on one core per rank; the difference is taken within a block, and the median over the blocks is shown. No
// operator communicates.
#include <fmt/format.h>
#include <sched.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <thread>

#include "penstock/dtensor.h"
#include "penstock/torch/compat/version.h"

namespace {

using namespace penstock;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Figure {
  double distributed = 0, plain = 0;  // microseconds per call
  double over() const { return distributed - plain; }
};
const std::vector<std::string> kOrder{"add", "mul_scalar", "linear", "detach"};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

double time_calls(const std::function<void()>& call, int calls) {
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / calls;
}

Figure measure(const std::function<void()>& distributed, const std::function<void()>& plain) {
  constexpr int kBlocks = 41, kCalls = 300;
  time_calls(distributed, 200);
  time_calls(plain, 200);
  std::vector<double> ours, theirs;
  for (int block = 0; block < kBlocks; ++block) {
    theirs.push_back(time_calls(plain, kCalls));
    ours.push_back(time_calls(distributed, kCalls));
  }
  return {median(ours), median(theirs)};
}

std::map<std::string, Figure> run(int world_size, bool grad) {
  std::map<std::string, Figure> figures;
  comm::run_ranks(world_size, 300s, [&](comm::World& world) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<unsigned>(world.rank()) % std::max(1u, std::thread::hardware_concurrency()), &cores);
    sched_setaffinity(0, sizeof cores, &cores);
    const comm::MeshGroups mesh(world,
                                init_device_mesh("cpu", {world_size}, {"tp"}, world.rank(), world_size));
    const auto spread = [&](const at::Tensor& tensor, Placement placement) {
      return distribute_tensor(tensor, mesh, {placement}).requires_grad_(grad);
    };
    const auto local = [&](const at::Tensor& tensor) {
      return to_local(tensor.detach()).clone().requires_grad_(grad);
    };
    const at::Tensor x = spread(at::randn({16, 16}), Shard{0}), y = spread(at::randn({16, 16}), Shard{0});
    const at::Tensor input = spread(at::randn({16, 16}), Replicate{}),
                     weight = spread(at::randn({16, 16}), Shard{0}), bias = spread(at::randn({16}), Shard{0});
    const at::Tensor lx = local(x), ly = local(y), linput = local(input), lweight = local(weight),
                     lbias = local(bias);
    const auto add = [&](const std::string& name, const std::function<void()>& distributed,
                         const std::function<void()>& plain) {
      const Figure figure = measure(distributed, plain);
      if (world.rank() == 0) figures[name] = figure;
    };
    add(
        "add", [&] { x + y; }, [&] { lx + ly; });
    add(
        "mul_scalar", [&] { x * 1.5; }, [&] { lx * 1.5; });
    add(
        "linear", [&] { torch::linear(input, weight, bias); },
        [&] { torch::linear(linput, lweight, lbias); });
    add(
        "detach", [&] { x.detach(); }, [&] { lx.detach(); });
  });
  return figures;
}

// Lines "name distributed plain" from the peer.
std::map<std::string, Figure> run_peer(const std::string& command) {
  std::map<std::string, Figure> figures;
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) throw std::runtime_error("cannot start: " + command);
  char line[512], name[128];
  Figure figure;
  while (fgets(line, sizeof line, pipe))
    if (std::sscanf(line, "%127s %lf %lf", name, &figure.distributed, &figure.plain) == 3)
      figures[name] = figure;
  if (pclose(pipe) != 0 || figures.empty()) throw std::runtime_error("the peer failed: " + command);
  return figures;
}

}  // namespace

int main(int argc, char** argv) {
  int world = 2;
  bool grad = false;
  std::string peer;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--peer") == 0 && i + 1 < argc) {
      peer = argv[++i];
    } else if (std::strcmp(argv[i], "--world") == 0 && i + 1 < argc) {
      world = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--grad") == 0) {
      grad = true;
    } else {
      fmt::print("usage: dtensor_bench [--world N] [--grad] [--peer \"python3 bench/dtensor_peer.py\"]\n");
      return std::strcmp(argv[i], "--help") == 0 ? 0 : 2;
    }
  }
  at::set_num_threads(1);
  const auto ours = run(world, grad);
  std::map<std::string, Figure> theirs;
  if (!peer.empty()) theirs = run_peer(fmt::format("{} --world {}{}", peer, world, grad ? " --grad" : ""));
  fmt::print("LibTorch {}, {} rank(s){}; microseconds per call\n", torch_version(), world,
             grad ? ", recording a graph" : "");
  fmt::print("{:<12} {:>12} {:>8} {:>8}{}\n", "operator", "distributed", "plain", "over",
             theirs.empty() ? "" : "   peer over   ratio");
  for (const std::string& name : kOrder) {
    const Figure& figure = ours.at(name);
    fmt::print("{:<12} {:>12.2f} {:>8.2f} {:>8.2f}", name, figure.distributed, figure.plain, figure.over());
    if (const auto found = theirs.find(name); found != theirs.end())
      fmt::print("   {:>9.2f}   {:>5.2f}", found->second.over(), figure.over() / found->second.over());
    fmt::print("\n");
  }
  return 0;
}
