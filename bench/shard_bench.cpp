// A training step of a twelve-block transformer whose parameters are sharded over two ranks, each a process
// on its own core: Penstock, and optionally Python over Gloo. Penstock uses shared memory if UCX is built in;
// set PENSTOCK_P2P=gloo to use Gloo for both.
//
//   shard_bench  d = 32 and 256, with and without accumulation
//   shard_bench --peer "python3 bench/shard_peer.py"
//       compared with the peer: medians, ratios, loss and gradient norm
//   shard_bench --d 256 --accumulate 4 --repeats 5
//
// A second line breaks down a step of rank 0: gather and reduce are the time to start collectives and to wait
// for them, copies the time to copy between parameters or gradients and the buffers of collectives, compute
// the rest. The peer is measured around the same calls.
//
// "ideal" is one process on half of the batch, with the whole optimizer and no communication, run on both
// cores at once. With accumulation parameters stay gathered until the last microbatch. forward, backward and
// update are medians of rank 0 and include waiting for gathers and reductions. Bytes are those of the
// collectives of rank 0 in a step, next to the minimum that the layout allows. Penstock and the peer run
// alternately. Export OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1. Compare ratios.
#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "bench/block.h"
#include "bench/figures.h"
#include "penstock/base/env.h"
#include "penstock/comm/record/recorder.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/dtensor.h"
#include "penstock/fully_shard.h"
#include "penstock/optimizer.h"
#include "penstock/torch/compat/version.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
using namespace penstock::bench;

constexpr int kWarmup = 3, kWorld = 2;

struct Config {
  int d = 256, layers = 12, batch = 8, accumulate = 1, reshard = 1, steps = 10;
};

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Config& config)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.d})))) {
    torch::manual_seed(0);
    for (int i = 0; i < config.layers; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(config.d)));
  }
  at::Tensor forward(at::Tensor x) {
    for (Block& block : blocks) x = block->forward(x);
    return norm(x);
  }
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Model);

std::uint64_t bytes_sent() {
  std::uint64_t bytes = 0;
  for (const auto& [kind, totals] : comm::Recorder::global().totals())
    if (kind != "barrier") bytes += totals.bytes;
  return bytes;
}

// One rank of one run; rank 0 prints the line that the parent reads. Without sharding: the ideal, a process
// without communication.
int run_rank(const Config& config, bool sharded) {
  at::set_num_threads(1);
  const comm::World world = comm::World::from_env();
  Model model(config);
  const comm::MeshGroups mesh(world, init_device_mesh("cpu", {kWorld}, {"dp"}, world.rank(), kWorld));
  std::shared_ptr<ShardState> state;
  if (sharded) {
    ShardOptions options;
    options.reshard_after_forward = config.reshard != 0;
    for (Block& block : model->blocks) fully_shard(*block, mesh, options);
    state = fully_shard(*model, mesh, options);
  }
  pin(world.rank());  // after the groups are created, so that their threads stay unpinned
  std::vector<optim::NamedParameter> parameters;
  for (const auto& item : model->named_parameters()) parameters.push_back({item.key(), item.value()});
  optim::AdamW optimizer(parameters, {.lr = 1e-4, .weight_decay = 0.01});

  const at::Generator generator = at::detail::createCPUGenerator(1);
  const auto share = [&] {
    return torch::randn({config.batch, kSequence, config.d}, generator)
        .chunk(kWorld)[static_cast<std::size_t>(world.rank())]
        .chunk(config.accumulate);
  };
  const auto xs = share(), targets = share();
  std::vector<double> times, forwards, backwards, updates;
  double loss = 0, norm = 0;
  std::uint64_t before = 0;
  for (int step = 0; step < kWarmup + config.steps; ++step) {
    world.group().barrier().wait();
    if (step == kWarmup) {
      before = bytes_sent();
      if (state) state->reset_times();
    }
    const auto begin = Clock::now();
    double forward = 0, backward = 0, sum = 0;
    for (int i = 0; i < config.accumulate; ++i) {
      const bool last = i == config.accumulate - 1;
      if (state && config.accumulate > 1) {
        state->set_requires_gradient_sync(last);
        state->set_reshard_after_backward(last);
      }
      auto now = Clock::now();
      const at::Tensor each = torch::mse_loss(model->forward(xs[static_cast<std::size_t>(i)]),
                                              targets[static_cast<std::size_t>(i)]) /
                              config.accumulate;
      forward += ms_since(now);
      now = Clock::now();
      each.backward();
      backward += ms_since(now);
      sum += each.item<double>();
    }
    if (step == 0) {
      at::Tensor first = at::zeros({2}, at::kDouble);
      first[0] = sum / kWorld;
      for (const auto& parameter : parameters)
        first[1] += (is_dtensor(parameter.tensor.grad()) ? to_local(parameter.tensor.grad())
                                                         : parameter.tensor.grad())
                        .to(at::kDouble)
                        .pow(2)
                        .sum();
      world.group().all_reduce(first).wait();
      loss = first[0].item<double>();
      norm = std::sqrt(first[1].item<double>());
    }
    const auto now = Clock::now();
    optimizer.step();
    optimizer.zero_grad();
    const double update = ms_since(now);
    world.group().barrier().wait();
    if (step < kWarmup) continue;
    times.push_back(ms_since(begin));
    forwards.push_back(forward);
    backwards.push_back(backward);
    updates.push_back(update);
  }
  const ShardTimes parts = state ? state->times() : ShardTimes{};
  const auto a_step = [&](std::chrono::nanoseconds part) {
    return std::chrono::duration<double, std::milli>(part).count() / config.steps;
  };
  if (world.rank() == 0)
    fmt::print(
        "step_ms {:.3f} loss {:.6f} norm {:.6f} forward {:.2f} backward {:.2f} update {:.2f} gather {:.2f} "
        "reduce {:.2f} copies {:.2f} bytes {}\n",
        median(times), loss, norm, median(forwards), median(backwards), median(updates), a_step(parts.gather),
        a_step(parts.reduce), a_step(parts.copy),
        (bytes_sent() - before) / static_cast<std::uint64_t>(config.steps));
  std::fflush(stdout);
  return 0;
}

std::string flags(const Config& config) {
  return fmt::format("--d {} --layers {} --batch {} --accumulate {} --reshard {} --steps {}", config.d,
                     config.layers, config.batch, config.accumulate, config.reshard, config.steps);
}

Figure run_ours(const Config& config, int port, bool sharded) {
  return read_figure(
      launch_command(kWorld, port, fmt::format("{} {}", sharded ? "--rank" : "--ideal", flags(config))));
}

std::string parts_of(const Figure& figure) {
  const double gather = figure.at("gather"), reduce = figure.at("reduce"), copies = figure.at("copies");
  return fmt::format("compute {:.1f}, gather {:.1f}, reduce {:.1f}, copies {:.1f}",
                     figure.at("step_ms") - gather - reduce - copies, gather, reduce, copies);
}

// Minimum bytes that the collectives of a rank transfer: whole parameters for every gather, whole gradients
// for the reduction.
double least_bytes(const Config& config) {
  const double block = 12.0 * config.d * config.d + 13.0 * config.d, root = 2.0 * config.d;
  const double gathers = config.accumulate > 1 ? 1 : config.reshard != 0 ? 2 : 1;
  return 4 * (config.layers * block * gathers + root + config.layers * block + root);
}

}  // namespace

int main(int argc, char** argv) {
  Config config;
  bool is_rank = false, is_ideal = false, all = true;
  int repeats = 3;
  std::string peer;
  const std::map<std::string, int*> numbers{{"--d", &config.d},
                                            {"--layers", &config.layers},
                                            {"--batch", &config.batch},
                                            {"--accumulate", &config.accumulate},
                                            {"--reshard", &config.reshard},
                                            {"--steps", &config.steps},
                                            {"--repeats", &repeats}};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--rank") {
      is_rank = true;
    } else if (flag == "--ideal") {
      is_ideal = true;
    } else if (i + 1 < argc && numbers.contains(flag)) {
      *numbers.at(flag) = std::atoi(argv[++i]);
      if (flag == "--d") all = false;
    } else if (i + 1 < argc && flag == "--peer") {
      peer = argv[++i];
    } else {
      fmt::print(
          "usage: shard_bench [--d N] [--layers N] [--batch N] [--accumulate N] [--reshard 0|1] [--steps N] "
          "[--repeats N] [--peer \"python3 bench/shard_peer.py\"]\n");
      return flag == "--help" ? 0 : 2;
    }
  }
  if (is_rank || is_ideal) return run_rank(config, is_rank);
  fmt::print(
      "LibTorch {}, {} ranks, {}, batch {}, {} layers; median step in ms (forward, backward, update)\n",
      torch_version(), kWorld, comm::ucx_available() ? env_text("PENSTOCK_P2P").value_or("ucx") : "gloo",
      config.batch, config.layers);
  int port = 28700 + static_cast<int>(getpid() % 200);
  std::vector<Config> cases{config};
  if (all) {
    cases.clear();
    for (const int d : {32, 256})
      for (const int accumulate : {1, 4}) {
        cases.push_back(config);
        cases.back().d = d;
        cases.back().accumulate = accumulate;
        cases.back().reshard = accumulate == 1 ? 1 : 0;
      }
  }
  for (const Config& each : cases) {
    std::vector<double> ideals, ours, theirs;
    Figure mine, other;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      ideals.push_back(run_ours(each, ++port, false).at("step_ms"));
      mine = run_ours(each, ++port, true);
      ours.push_back(mine["step_ms"]);
      if (peer.empty()) continue;
      other = read_figure(fmt::format("{} {} --port {}", peer, flags(each), ++port));
      theirs.push_back(other["step_ms"]);
    }
    fmt::print(
        "d {:>3} accumulate {} reshard {}: ideal {:.1f}, ours {:.1f} ({:.1f}, {:.1f}, {:.1f}), {:.2f} of "
        "ideal, {:.2f} MB moved, least {:.2f}\n",
        each.d, each.accumulate, each.reshard, median(ideals), median(ours), mine["forward"],
        mine["backward"], mine["update"], median(ours) / median(ideals), mine["bytes"] / 1e6,
        least_bytes(each) / 1e6);
    fmt::print("      {}\n", parts_of(mine));
    if (!theirs.empty()) {
      fmt::print("      peer {:.1f} ({:.1f}, {:.1f}, {:.1f}), ours is {:.3f} of it, loss and norm {}\n",
                 median(theirs), other["forward"], other["backward"], other["update"],
                 median(ours) / median(theirs), same_training(mine, other));
      fmt::print("      {}\n", parts_of(other));
    }
    std::fflush(stdout);
  }
  return 0;
}
