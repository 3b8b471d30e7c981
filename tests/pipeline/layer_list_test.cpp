// Stages cut from lists of modules, compared with the model in one process; replaced heads; a backward and a
// forward as one call.
#include "penstock/layer_list.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <set>

#include "penstock/errors.h"
#include "penstock/overlapped_chunks.h"
#include "penstock/pipeline.h"
#include "penstock/shared_parameters.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"
#include "tests/throws.h"

namespace penstock {
namespace layer_list_test {

using namespace std::chrono_literals;
using test::Block;
using test::BlockImpl;
using test::has_text;
using test::kWidth;
using test::message_of;

torch::nn::ModuleList blocks(int count) {
  torch::nn::ModuleList list;
  for (int i = 0; i < count; ++i) list->push_back(Block(i));
  return list;
}

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    layers = register_module("layers", blocks(5));
    other = register_module("other", torch::nn::Linear(2, 2));
    torch::nn::Sequential sequence(Block(0), torch::nn::Functional(torch::tanh), Block(1));
    inner = register_module("inner", sequence);
  }
  torch::nn::ModuleList layers;
  torch::nn::Linear other{nullptr};
  torch::nn::Sequential inner{nullptr};
};
TORCH_MODULE(Model);

TEST(LayerList, TakesAListOrAModelWithOne) {
  EXPECT_EQ(LayerList::of<BlockImpl>(blocks(3).ptr()).size(), 3U);
  const Model model;
  const LayerList layers = LayerList::of<BlockImpl>(model.ptr());
  EXPECT_EQ(layers.size(), 5U);
  EXPECT_EQ(layers.parameter_counts(), std::vector<double>(5, kWidth * kWidth + 2 * kWidth));
  EXPECT_EQ(LayerList::of(model.ptr(), "inner").parameter_counts(),
            (std::vector<double>{kWidth * kWidth + 2 * kWidth, 0, kWidth * kWidth + 2 * kWidth}));
}

TEST(LayerList, OtherStructuresAreErrors) {
  const Model model;
  const auto error = [&](const auto& call) { return message_of<ValueError>(call); };
  EXPECT_TRUE(
      has_text(error([&] { LayerList::of<BlockImpl>(model.ptr(), "blocks"); }), "no submodule blocks"));
  EXPECT_TRUE(has_text(error([&] { LayerList::of<BlockImpl>(model.ptr(), "other"); }),
                       "its submodule other, a torch::nn::LinearImpl"));
  EXPECT_TRUE(has_text(error([&] { LayerList::of<BlockImpl>(nullptr); }), "no module"));
  EXPECT_TRUE(has_text(error([&] { LayerList::of<BlockImpl>(torch::nn::ModuleList().ptr()); }), "none"));
  EXPECT_TRUE(has_text(error([&] { LayerList::of(model.ptr()); }), "layer 0 of a torch::nn::ModuleList"));
  torch::nn::ModuleList mixed(Block(0), torch::nn::Linear(2, 2));
  EXPECT_TRUE(has_text(error([&] { LayerList::of<BlockImpl>(mixed.ptr()); }), "layer 1"));
  EXPECT_EQ((LayerList::of<BlockImpl, torch::nn::LinearImpl>(mixed.ptr()).size()), 2U);
}

TEST(LayerStage, RefersToTheLayersOfTheModel) {
  const torch::nn::ModuleList list = blocks(5);
  const LayerList layers = LayerList::of<BlockImpl>(list.ptr());
  const auto parts = plan::partition_by_count(5, 2);
  const torch::nn::Linear in(kWidth, kWidth), out(kWidth, 2);
  const ModelEnds ends{.embed = StageModule(in), .head = StageModule(out)};
  const LayerStage first(layers, parts, 0, ends), last(layers, parts, 1, ends);
  std::vector<std::string> names;
  for (const auto& entry : last.slice()->named_parameters()) names.push_back(entry.key());
  EXPECT_EQ(names,
            (std::vector<std::string>{"layers.3.weight", "layers.3.bias", "layers.3.gain", "layers.4.weight",
                                      "layers.4.bias", "layers.4.gain", "head.weight", "head.bias"}));
  EXPECT_TRUE(last.slice()->named_parameters()["layers.4.weight"].is_same(list->ptr<BlockImpl>(4)->weight));
  EXPECT_TRUE(first.slice()->named_parameters().contains("embed.weight"));
  EXPECT_FALSE(first.slice()->named_parameters().contains("head.weight"));
  // Every layer once.
  std::set<const c10::TensorImpl*> seen;
  for (const LayerStage& stage : {first, last})
    for (const at::Tensor& parameter : stage.module().parameters())
      EXPECT_TRUE(seen.insert(parameter.unsafeGetTensorImpl()).second);
  EXPECT_EQ(seen.size(), 5U * 3 + 4);
  const at::Tensor x = test::values({2, kWidth}, 1);
  at::Tensor expected = in.ptr()->forward(x);
  for (int i = 0; i < 5; ++i) expected = list->ptr<BlockImpl>(static_cast<std::size_t>(i))->forward(expected);
  const Tree between = first.module().forward(Tree::tuple({x}), {});
  EXPECT_TRUE(last.module().forward(Tree::tuple({between}), {}).tensor().equal(out.ptr()->forward(expected)));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         first.module().forward(Tree::tuple({x}), Tree::dict({{"mask", x}}));
                       }),
                       "'mask'"));
}

TEST(LayerStage, PartitionsThatDropOrDoubleLayersAreErrors) {
  const LayerList layers = LayerList::of<BlockImpl>(blocks(4).ptr());
  const auto error = [&](std::vector<plan::LayerRange> parts, int index) {
    return message_of<ValueError>([&] { LayerStage(layers, parts, index); });
  };
  EXPECT_TRUE(has_text(error({{0, 2}, {3, 4}}, 0), "layers of stage 1"));
  EXPECT_TRUE(has_text(error({{0, 2}, {1, 4}}, 0), "layers of stage 1"));
  EXPECT_TRUE(has_text(error({{0, 2}, {2, 3}}, 0), "the 4 layers of the model"));
  EXPECT_TRUE(has_text(error({{0, 2}, {2, 5}}, 0), "the 4 layers of the model"));
  EXPECT_TRUE(has_text(error({{0, 2}, {2, 4}}, 2), "stage of a partition"));
  EXPECT_TRUE(has_text(error({{0, 4}, {4, 4}}, 1), "neither layers nor an end"));
}

// A bare Sequential over two ranks, two stages on each, with a shared weight at both ends.
TEST(LayerStage, PipelinesAreEqualToOneProcess) {
  const auto sequential = [] {
    return torch::nn::Sequential(Block(0), torch::nn::Functional(torch::tanh), Block(1), Block(2), Block(3));
  };
  const at::Tensor x = test::values({8, kWidth}, 1), y = test::values({8, kWidth}, 2);
  const at::Tensor table = test::values({kWidth, kWidth}, 3);
  const auto end = [&] {
    torch::nn::Linear layer(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
    layer->weight.set_data(table.clone());
    return layer;
  };
  torch::nn::Sequential whole = sequential();
  const torch::nn::Linear tied = end();
  test::square_loss()(Tree(tied.ptr()->forward(whole->forward(tied.ptr()->forward(x)))), Tree(y)).backward();
  std::map<std::string, at::Tensor> expected;
  for (const auto& entry : whole->named_parameters())
    expected["layers." + entry.key()] = entry.value().grad();
  expected["embed.weight"] = expected["head.weight"] = tied->weight.grad();
  std::mutex mutex;
  std::size_t compared = 0;
  comm::run_ranks(2, 30s, [&](comm::World& world) {
    const LayerList layers = LayerList::of(sequential().ptr());
    const auto parts = plan::partition_by_count(static_cast<int>(layers.size()), 4);
    const ModelEnds ends{.embed = StageModule(end()), .head = StageModule(end())};
    std::vector<PipelineStage> stages;
    for (const int index : {world.rank(), 3 - world.rank()})
      stages.push_back(LayerStage(layers, parts, index, ends).pipeline_stage(at::kCPU));
    SharedParameters shared({tie({"embed.weight", "head.weight"})}, parameter_uses(stages), {world});
    auto pipeline = make_pipeline("ZBVZeroBubble", stages, 4, test::square_loss(), {world});
    pipeline.step(Tree::tuple({x}), {}, y);
    shared.sum_gradients();
    const std::lock_guard lock(mutex);
    for (const ParameterUse& use : parameter_uses(stages)) {
      if (shared.is_further_use(use.parameter)) continue;
      ++compared;
      EXPECT_TRUE(at::allclose(use.parameter.grad(), expected.at(use.name), 1e-5, 1e-6)) << use.name;
    }
  });
  EXPECT_EQ(compared, expected.size() - 1);
}

TEST(LayerStage, AHeadCanBeReplaced) {
  const LayerList layers = LayerList::of<BlockImpl>(blocks(2).ptr());
  const auto parts = plan::partition_by_count(2, 2);
  const torch::nn::Linear before(kWidth, 3), after(kWidth, 2);
  const ModelEnds ends{.embed = {}, .head = StageModule(before)};
  LayerStage first(layers, parts, 0, ends), last(layers, parts, 1, ends);
  const PipelineStage stage = last.pipeline_stage(at::kCPU);
  EXPECT_FALSE(first.bind_head(StageModule(after)));
  EXPECT_TRUE(last.bind_head(StageModule(after)));
  const at::Tensor x = test::values({2, kWidth}, 1);
  EXPECT_EQ(stage.module().forward(Tree::tuple({x}), {}).tensor().size(1), 2);
  EXPECT_TRUE(last.slice()->named_parameters()["head.weight"].is_same(after->weight));
  const auto parameters = stage.parameters();
  const auto has = [&](const at::Tensor& tensor) {
    return std::any_of(parameters.begin(), parameters.end(),
                       [&](const at::Tensor& each) { return each.is_same(tensor); });
  };
  EXPECT_TRUE(has(after->weight));
  EXPECT_FALSE(has(before->weight));
  // A function that has no modules of its own.
  EXPECT_TRUE(last.bind_head(StageModule([](at::Tensor y) { return y; }, {})));
  EXPECT_FALSE(last.slice()->named_parameters().contains("head.weight"));
  EXPECT_EQ(stage.module().forward(Tree::tuple({x}), {}).tensor().size(1), kWidth);
}

TEST(OverlappedChunks, ABackwardThenAForward) {
  const Block block(1);
  const at::Tensor x = test::values({2, kWidth}, 1).set_requires_grad(true);
  std::vector<std::string> order;
  const StageModule pair(
      [&](at::Tensor a, at::Tensor b) {
        order.push_back("forward");
        EXPECT_TRUE(x.grad().defined());
        return std::make_tuple(a + b, a * b);
      },
      {});
  const at::Tensor a = test::values({2}, 2), b = test::values({2}, 3);
  const OverlappedForward next{.module = pair, .inputs = Tree::list({a, b})};
  // From a loss.
  OverlappedResult made = overlapped_chunks(next, {.loss = block.ptr()->forward(x).sum()});
  EXPECT_TRUE(made.outputs[0].tensor().equal(a + b));
  EXPECT_TRUE(made.outputs[1].tensor().equal(a * b));
  EXPECT_FALSE(made.loss.defined());
  EXPECT_EQ(order.size(), 1U);
  const at::Tensor from_loss = x.grad().clone();
  // From outputs: one without a gradient, one that needs none.
  x.mutable_grad() = at::Tensor();
  const at::Tensor y = block.ptr()->forward(x), unused = block.ptr()->forward(x);
  const OverlappedForward with_loss{.module = StageModule(block),
                                    .inputs = Tree(a.new_ones({2, kWidth})),
                                    .criterion = test::square_loss(),
                                    .target = Tree(at::zeros({2, kWidth}))};
  made = overlapped_chunks(with_loss, {.outputs = {y, unused, a}, .output_grads = {at::ones_like(y), {}, a}});
  EXPECT_TRUE(x.grad().equal(from_loss));
  EXPECT_TRUE(made.loss.equal(test::square_loss()(made.outputs, Tree(at::zeros({2, kWidth})))));
  EXPECT_TRUE(made.loss.requires_grad());
}

TEST(OverlappedChunks, RefusesAnUnclearBackwardBeforeItRuns) {
  const at::Tensor x = at::ones({2}).set_requires_grad(true);
  const OverlappedForward next{.module = StageModule([](at::Tensor y) { return y; }, {}), .inputs = Tree(x)};
  const auto error = [&](const OverlappedBackward& chunk) {
    return message_of<ValueError>([&] { overlapped_chunks(next, chunk); });
  };
  EXPECT_TRUE(has_text(error({}), "neither a loss nor outputs"));
  EXPECT_TRUE(
      has_text(error({.loss = x.sum(), .outputs = {x * 2}, .output_grads = {x}}), "a loss and outputs"));
  EXPECT_TRUE(has_text(error({.outputs = {x * 2}}), "1 outputs and 0 gradients"));
  EXPECT_FALSE(x.grad().defined());
}

}  // namespace layer_list_test
}  // namespace penstock
