// The overhead of sharding on a single rank: a transformer on one device, without and with fully_shard,
// alternating.
//
//   shard_single_bench --device cuda  the sizes of gpt2-124m, 32 rows of 1024 tokens
//   shard_single_bench --width 64 --layers 4 --rows 2 --length 128       a small one, on the CPU
//
// Without fully_shard: parameters in float32, autocast to bfloat16. With fully_shard: the same parameters,
// gathered in bfloat16, gradients reduced in float32, every block its own group. Both use the same optimizer.
// Compare the ratio.
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "penstock/fully_shard.h"
#include "penstock/optimizer.h"
#include "penstock/torch/compat/device_memory.h"
#include "penstock/torch/compat/version.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/transformer.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
using Clock = std::chrono::steady_clock;

struct Sizes {
  int width = 768, layers = 12, vocabulary = 50304, rows = 32, length = 1024, steps = 10, repeats = 3;
};

class Trained {
 public:
  Trained(const Sizes& sizes, at::Device device, comm::World& world, bool sharded)
      : device_(device), sharded_(sharded), model_(options(sizes)) {
    model_->to(device);
    models::initialize(*model_, {.seed = 1});
    if (sharded) {
      const comm::MeshGroups mesh(world,
                                  init_device_mesh(device.is_cuda() ? "cuda" : "cpu", {1}, {"dp"}, 0, 1));
      ShardOptions how;
      how.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = {}};
      for (const auto& block : model_->blocks()) fully_shard(*block, mesh, how);
      fully_shard(*model_, mesh, how);
    }
    std::vector<optim::NamedParameter> parameters;
    for (const auto& item : model_->named_parameters()) parameters.push_back({item.key(), item.value()});
    optimizer_.emplace(parameters, optim::AdamWOptions{.lr = 1e-4, .weight_decay = 0.01});
    const at::Generator generator = at::detail::createCPUGenerator(1);
    tokens_ = at::randint(sizes.vocabulary, {sizes.rows, sizes.length + 1}, generator, at::kLong).to(device);
  }

  at::Tensor step() {
    const at::Tensor inputs = tokens_.slice(1, 0, -1).contiguous(),
                     targets = tokens_.slice(1, 1).contiguous();
    at::Tensor loss;
    {
      const AutocastScope scope(device_.type(), sharded_ ? std::nullopt : std::optional(at::kBFloat16));
      loss = models::token_loss(model_->forward(inputs), targets, static_cast<double>(targets.numel()));
    }
    loss.backward();
    optimizer_->step();
    optimizer_->zero_grad();
    return loss.detach();
  }

 private:
  static models::TransformerOptions options(const Sizes& sizes) {
    models::TransformerOptions made;
    made.vocabulary = sizes.vocabulary;
    made.width = sizes.width;
    made.layers = sizes.layers;
    made.heads = std::max(1, sizes.width / 64);
    made.key_value_heads = made.heads;
    made.context = sizes.length;
    made.tie_head = true;
    return made;
  }

  at::Device device_;
  bool sharded_;
  models::TransformerStage model_;
  std::optional<optim::AdamW> optimizer_;
  at::Tensor tokens_;
};

}  // namespace

int main(int argc, char** argv) {
  Sizes sizes;
  at::Device device = at::kCPU;
  const std::map<std::string, int*> numbers{{"--width", &sizes.width},           {"--layers", &sizes.layers},
                                            {"--vocabulary", &sizes.vocabulary}, {"--rows", &sizes.rows},
                                            {"--length", &sizes.length},         {"--steps", &sizes.steps},
                                            {"--repeats", &sizes.repeats}};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (i + 1 < argc && numbers.contains(flag)) {
      *numbers.at(flag) = std::atoi(argv[++i]);
    } else if (i + 1 < argc && flag == "--device") {
      device = at::Device(argv[++i]);
    } else {
      fmt::print(
          "usage: shard_single_bench [--device cpu|cuda] [--width N] [--layers N] [--vocabulary N] [--rows "
          "N] [--length N] [--steps N] [--repeats N]\n");
      return flag == "--help" ? 0 : 2;
    }
  }
  if (device.is_cuda()) device = at::Device(at::kCUDA, 0);
  comm::run_ranks(1, std::chrono::minutes(10), [&](comm::World& world) {
    std::map<bool, double> best;
    for (int repeat = 0; repeat < sizes.repeats; ++repeat)
      for (const bool sharded : {false, true}) {
        Trained trained(sizes, device, world, sharded);
        for (int i = 0; i < 3; ++i) trained.step();
        const auto finish = [&] {
          if (device.is_cuda()) torch::cuda::synchronize();
        };
        std::vector<double> times;
        double loss = 0;
        for (int i = 0; i < sizes.steps; ++i) {
          finish();
          const auto begin = Clock::now();
          const at::Tensor last = trained.step();
          finish();
          times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
          loss = last.item<double>();
        }
        std::sort(times.begin(), times.end());
        const double ms = times[times.size() / 2];
        best[sharded] = best.contains(sharded) ? std::min(best[sharded], ms) : ms;
        fmt::print("{:<12} {:8.2f} ms per step, {:8.1f} ktok/s, loss {:.4f}, peak so far {:.2f} GiB\n",
                   sharded ? "fully_shard" : "plain", ms, sizes.rows * sizes.length / ms, loss,
                   static_cast<double>(peak_device_bytes(device)) / (1 << 30));
      }
    fmt::print("LibTorch {}, {}: fully_shard takes {:.3f} of the time\n", torch_version(), device.str(),
               best[true] / best[false]);
  });
  return 0;
}
