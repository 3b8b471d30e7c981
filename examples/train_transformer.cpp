// Trains a transformer over a pipeline on the bytes of a file, in sixty lines. `penstock train` does the same
// with data shards, checkpoints, reports and all other layouts.
//
//   ./run launch -n 2 -- build/release/bin/train_transformer README.md
//   ./run launch -n 2 -- build/release/bin/train_transformer README.md examples/own_schedule.csv
//       a schedule of your own
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>

#include "examples/failure.h"
#include "penstock/gradients.h"
#include "penstock/optimizer.h"
#include "penstock/pipeline.h"
#include "penstock/transformer.h"
#include "penstock/world.h"

using namespace penstock;

int main(int argc, char** argv) try {
  if (argc < 2) return std::fprintf(stderr, "usage: train_transformer TEXT [SCHEDULE.csv]\n"), 2;
  const comm::World world = comm::World::from_env();  // penstock launch, torchrun --no-python, mpirun or srun
  constexpr std::int64_t kMicrobatches = 4, kRows = 2, kLength = 64;

  // Data: bytes are tokens; every rank reads them, the first stage uses the inputs and the last one the
  // targets.
  std::ifstream file(argv[1], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  if (bytes.size() <= kLength)
    return std::fprintf(stderr, "%s: fewer than %d bytes\n", argv[1], int(kLength) + 1), 2;
  const at::Tensor text =
      torch::from_blob(bytes.data(), {std::int64_t(bytes.size())}, at::kByte).to(at::kLong);

  // Model: this rank creates only its own blocks, with the same values as in one process.
  const models::TransformerOptions options{
      .vocabulary = 256, .width = 64, .layers = 4, .heads = 4, .context = kLength};
  models::TransformerStage part(options, models::partition_model(options, world.size())[world.rank()]);
  models::initialize(*part, {.seed = 42});
  const PipelineStage stage(
      StageModule([part](const at::Tensor& x) mutable { return part->forward(x); }, {part.ptr()}),
      world.rank(), world.size(), at::kCPU);

  // Schedule: a built-in one, or a file with one line per rank.
  const PipelineLoss loss([](const at::Tensor& logits, const at::Tensor& targets) {
    return models::token_loss(logits, targets, double(targets.numel()));
  });
  std::stringstream csv;
  if (argc > 2) csv << std::ifstream(argv[2]).rdbuf();
  PipelineRuntime pipeline = argc > 2 ? pipeline_from_csv(csv.str(), {stage}, loss, {world})
                                      : make_pipeline("1F1B", {stage}, kMicrobatches, loss, {world});

  std::vector<optim::NamedParameter> parameters;
  for (const auto& item : part->named_parameters()) parameters.push_back({item.key(), item.value()});
  optim::AdamW optimizer(optim::decay_groups(parameters), {.lr = 3e-3, .weight_decay = 0.1});

  torch::manual_seed(1);  // the same samples on every rank
  for (int step = 1; step <= 30; ++step) {
    const at::Tensor starts = torch::randint(text.size(0) - kLength, {kMicrobatches * kRows, 1}, at::kLong);
    const at::Tensor windows = text.index({starts + torch::arange(kLength + 1)});
    optimizer.zero_grad();
    const StepResult result =
        pipeline.step(Tree::tuple({windows.narrow(1, 0, kLength)}), {}, windows.narrow(1, 1, kLength));
    optim::clip_grad_norm(optimizer.parameters(), 1.0, {.groups = {world.group()}});
    optimizer.step();
    if (!result.losses.empty() && step % 5 == 0)
      std::printf("step %2d  loss %.4f\n", step, torch::stack(result.losses).mean().item<double>());
  }
} catch (...) {
  return failure("train_transformer");
}
