// Models cut into stages, with the features that make pipelines hard: tuples, keyword arguments, integers,
// changing shapes, skip connections. Each runs through a pipeline and in one process, and the results are
// compared.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "penstock/deferred_linear.h"
#include "penstock/pipeline.h"

namespace penstock::test {

inline constexpr std::int64_t kWidth = 6;

// One block with its own weights, the same wherever it is created.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int number) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 + number));
    weight = register_parameter("weight", at::randn({kWidth, kWidth}, generator) * 0.4);
    bias = register_parameter("bias", at::randn({kWidth}, generator) * 0.1);
    gain = register_parameter("gain", at::ones({kWidth}) + 0.1 * at::randn({kWidth}, generator));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(torch::linear(torch::layer_norm(x, {kWidth}, gain), weight, bias)) + x;
  }
  at::Tensor weight, bias, gain;
};
TORCH_MODULE(Block);

struct JoinedBlockImpl : BlockImpl {
  using BlockImpl::BlockImpl;
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(deferred_linear(torch::layer_norm(x, {kWidth}, gain), weight, bias)) + x;
  }
};
TORCH_MODULE(JoinedBlock);

struct Batch {
  Tree args, kwargs, target;
};

struct Scenario {
  std::string name;
  // The module of a stage; made on every rank that holds it, and in one process.
  std::function<StageModule(int stage, int stages)> module;
  std::function<Batch(int step, int microbatches)> batch;
  PipelineLoss loss;
  std::function<std::vector<SkipTensor>(int stages)> skips = [](int) { return std::vector<SkipTensor>{}; };
  std::function<StageOptions(int stage, int stages)> options = [](int, int) { return StageOptions{}; };
};

inline at::Tensor values(std::vector<std::int64_t> shape, int seed) {
  return at::randn(shape, at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed)));
}

inline PipelineLoss square_loss() {
  return PipelineLoss(
      [](const at::Tensor& output, const at::Tensor& target) { return (output - target).pow(2).mean(); });
}

inline Batch plain_batch(int step, std::int64_t rows) {
  return {Tree::tuple({values({rows, kWidth}, 7 + step)}), {}, values({rows, kWidth}, 70 + step)};
}

// Two blocks per stage, kept apart so that schedules with overlap can interleave them.
inline StageModule two_blocks(int stage) {
  return StageModule::chain({StageModule(Block(2 * stage)), StageModule(Block(2 * stage + 1))});
}

inline std::vector<Scenario> parity_scenarios() {
  std::vector<Scenario> all;
  all.push_back({"plain", [](int stage, int) { return two_blocks(stage); },
                 [](int step, int m) { return plain_batch(step, 2 * m); }, square_loss()});

  all.push_back({"tuple",
                 [](int stage, int stages) {
                   Block block(stage);
                   return StageModule(
                       [block, stage, stages](const Tree& args, const Tree&) mutable {
                         at::Tensor h = args[0].tensor();
                         at::Tensor sum = stage == 0 ? h : args[1].tensor();
                         h = block->forward(h + 0.5 * sum);
                         sum = sum + h;
                         return stage == stages - 1 ? Tree(h + sum) : Tree::tuple({h, sum});
                       },
                       {block.ptr()});
                 },
                 [](int step, int m) { return plain_batch(step, 2 * m); }, square_loss()});

  all.push_back({"keyword arguments",
                 [](int stage, int) {
                   Block block(stage);
                   return StageModule(
                       [block](at::Tensor x, const Tree& kwargs) mutable {
                         return block->forward(x) * kwargs["scale"].tensor() + kwargs["shift"].number();
                       },
                       {block.ptr()});
                 },
                 [](int step, int m) {
                   Batch batch = plain_batch(step, 2 * m);
                   batch.kwargs = Tree::dict({{"scale", values({2 * m, 1}, 5 + step)}, {"shift", 0.25}});
                   return batch;
                 },
                 square_loss()});

  // Integers and a float tensor without gradient go through all stages.
  all.push_back({"tensors without gradient",
                 [](int stage, int stages) {
                   Block block(stage);
                   return StageModule(
                       [block, stage, stages](const Tree& args, const Tree&) mutable {
                         const at::Tensor index = args[1].tensor();
                         const at::Tensor constant = args[2].tensor().detach();
                         const at::Tensor h = block->forward(args[0].tensor()) *
                                                  (1 + 0.125 * index.to(at::kFloat)).unsqueeze(1) +
                                              constant;
                         return stage == stages - 1 ? Tree(h) : Tree::tuple({h, index, constant});
                       },
                       {block.ptr()});
                 },
                 [](int step, int m) {
                   Batch batch = plain_batch(step, 2 * m);
                   batch.args = Tree::tuple(
                       {batch.args[0], at::arange(2 * m).remainder(3), values({2 * m, kWidth}, 9)});
                   return batch;
                 },
                 square_loss()});

  all.push_back({"uneven batch", [](int stage, int) { return two_blocks(stage); },
                 [](int step, int m) { return plain_batch(step, 2 * m + 1); }, square_loss()});

  all.push_back({"shapes that change from step to step",
                 [](int stage, int) { return StageModule(Block(stage)); },
                 [](int step, int m) {
                   const std::int64_t length = 3 + 2 * step;
                   return Batch{Tree::tuple({values({2 * m, length, kWidth}, 11 + step)}),
                                {},
                                values({2 * m, length, kWidth}, 12 + step)};
                 },
                 square_loss()});

  // The first stage selects rows by their values, so every microbatch has another shape, which is not known
  // in advance.
  all.push_back({"shapes that depend on values",
                 [](int stage, int) {
                   Block block(stage);
                   return StageModule(
                       [block, stage](at::Tensor x) mutable {
                         if (stage == 0) x = x.index({x.select(1, 0).gt(-0.5)});
                         return block->forward(x);
                       },
                       {block.ptr()});
                 },
                 [](int step, int m) { return plain_batch(step, 5 * m); },
                 PipelineLoss([](const Tree& output, const Tree&) { return output.tensor().pow(2).sum(); })});

  all.push_back({"skip connections",
                 [](int stage, int stages) {
                   Block block(stage);
                   return StageModule(
                       [block, stage, stages](const Tree& args, const Tree&) mutable {
                         at::Tensor h = block->forward(args[0].tensor());
                         if (stage == stages - 1) return Tree(h * args[1].tensor());
                         if (stage == 0) return Tree::tuple({h, h.sin()});
                         return Tree(h);
                       },
                       {block.ptr()});
                 },
                 [](int step, int m) { return plain_batch(step, 2 * m); }, square_loss(),
                 [](int stages) {
                   return std::vector<SkipTensor>{{"early", 0, stages - 1}};
                 }});

  // An output that the next stage does not use.
  all.push_back({"unused output",
                 [](int stage, int stages) {
                   Block block(stage);
                   return StageModule(
                       [block, stage, stages](const Tree& args, const Tree&) mutable {
                         const at::Tensor h = block->forward(args[0].tensor());
                         return stage == stages - 1 ? Tree(h) : Tree::tuple({h, h.cos()});
                       },
                       {block.ptr()});
                 },
                 [](int step, int m) { return plain_batch(step, 2 * m); }, square_loss()});

  // One layer for all microbatches of a step at once: sums over rows are in another order.
  all.push_back({"joined weight gradients",
                 [](int stage, int) {
                   return StageModule::chain(
                       {StageModule(JoinedBlock(2 * stage)), StageModule(JoinedBlock(2 * stage + 1))});
                 },
                 [](int step, int m) { return plain_batch(step, 2 * m); }, square_loss(),
                 [](int) { return std::vector<SkipTensor>{}; },
                 [](int, int) {
                   StageOptions options;
                   options.join_weight_gradients = true;
                   return options;
                 }});

  all.push_back({"examples given", [](int stage, int) { return two_blocks(stage); },
                 [](int step, int m) { return plain_batch(step, 2 * m); }, square_loss(),
                 [](int) { return std::vector<SkipTensor>{}; },
                 [](int, int) {
                   StageOptions options;
                   options.input_args = {at::empty({2, kWidth})};
                   options.output_args = {at::empty({2, kWidth})};
                   return options;
                 }});
  return all;
}

}  // namespace penstock::test
