// Modules whose parameters are distributed tensors, captured and trained next to the plain run: bitwise
// equal, on worlds of threads.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/comm/record/recorder.h"
#include "penstock/compile.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/tensor_parallel.h"
#include "tests/dtensor/small_transformer.h"
#include "tests/graph/dtensor_compare.h"

namespace penstock::graph {
namespace dtensor_module_test {

namespace nn = torch::nn;

struct MlpImpl : nn::Module {
  explicit MlpImpl(std::int64_t width = 8) {
    up = register_module("up", nn::Linear(width, 2 * width));
    down = register_module("down", nn::Linear(2 * width, width));
    steps = register_buffer("steps", at::zeros({width}));
  }
  at::Tensor forward(const at::Tensor& x) {
    steps.add_(1);
    return down(at::gelu(up(x)));
  }
  nn::Linear up{nullptr}, down{nullptr};
  at::Tensor steps;
};
TORCH_MODULE(Mlp);

struct MlpPair {
  Mlp eager, captured;
};

std::vector<MlpPair> make_pairs(int ranks) {
  std::vector<MlpPair> pairs;
  for (int rank = 0; rank < ranks; ++rank) {
    torch::manual_seed(11);
    Mlp eager;
    torch::manual_seed(11);
    pairs.push_back({eager, Mlp()});
  }
  return pairs;
}

// Distributed or plain inputs, a plain or a distributed loss; AdamW, whose state is placed like the
// parameters.
void train_mlp(int ranks, bool distributed_input, const ColwiseOptions& colwise,
               const RowwiseOptions& rowwise) {
  std::vector<MlpPair> pairs = make_pairs(ranks);
  on_ranks(ranks, [&](const comm::MeshGroups& mesh) {
    MlpPair& pair = pairs[static_cast<std::size_t>(mesh.coordinate()[0])];
    for (Mlp model : {pair.eager, pair.captured}) {
      parallelize_module(*model, mesh,
                         {{"up", colwise_parallel(colwise)}, {"down", rowwise_parallel(rowwise)}});
      if (distributed_input) distribute_module(*model, mesh);  // including the buffer
    }
    auto fast = compile(pair.captured);
    torch::optim::AdamW one(pair.eager->parameters(), torch::optim::AdamWOptions(1e-2)),
        other(fast->parameters(), torch::optim::AdamWOptions(1e-2));
    const std::string who = "rank " + std::to_string(mesh.coordinate()[0]);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor whole = numbers({4, 8}, step), target = numbers({4, 8}, step + 50);
      at::Tensor x = distributed_input ? placed(whole, mesh, Replicate{}, false) : whole,
                 t = distributed_input ? placed(target, mesh, Replicate{}, false) : target;
      one.zero_grad();
      other.zero_grad();
      const at::Tensor expected = nn::functional::mse_loss(pair.eager->forward(x), t),
                       actual = nn::functional::mse_loss(fast->forward(x), t);
      EXPECT_TRUE(same_tensor(actual.detach(), expected.detach())) << who;
      expected.backward();
      actual.backward();
      for (const auto& item : pair.eager->named_parameters()) {
        const at::Tensor gradient = pair.captured->named_parameters()[item.key()].grad();
        EXPECT_TRUE(same_tensor(gradient, item.value().grad())) << who << ", gradient of " << item.key();
        EXPECT_EQ(placements_of(gradient), placements_of(item.value())) << who << ", " << item.key();
      }
      one.step();
      other.step();
    }
    for (const auto& item : pair.eager->named_parameters())
      EXPECT_TRUE(same_tensor(pair.captured->named_parameters()[item.key()].detach(), item.value().detach()))
          << who << ", " << item.key();
    EXPECT_TRUE(same_tensor(pair.captured->steps, pair.eager->steps)) << who;
    EXPECT_EQ(is_dtensor(pair.captured->steps), distributed_input);
    EXPECT_EQ(plain_parts(pair.captured->steps)[0][0].item<float>(), 4) << who;
    EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u) << who;
    EXPECT_GE(collectives_in(compiled_entry(*fast, 0).joint(0).graph), 1u) << who;
    EXPECT_EQ(compiled_entry(*fast, 0).joint(0).graph.inputs[0].name, "up.weight.local");
  });
}

TEST(DTensorModule, MlpTwoRanks) { train_mlp(2, true, {}, {}); }
TEST(DTensorModule, MlpFourRanks) { train_mlp(4, true, {}, {}); }
TEST(DTensorModule, MlpWithPlainInputs) { train_mlp(2, false, {}, {}); }
TEST(DTensorModule, MlpUneven) { train_mlp(3, true, {}, {}); }
TEST(DTensorModule, MlpWithSplitRows) {
  train_mlp(4, true, {.input = Shard{0}, .desired_input = Replicate{}}, {.output = Shard{0}});
}

// Embedding, attention, layer norm and a loss over sharded classes.
void train_transformer(int ranks, const test::Plan& plan) {
  std::vector<std::pair<test::Model, test::Model>> models;
  for (int rank = 0; rank < ranks; ++rank) models.emplace_back(test::make_model(), test::make_model());
  on_ranks(ranks, [&](const comm::MeshGroups& mesh) {
    auto& [eager, captured] = models[static_cast<std::size_t>(mesh.coordinate()[0])];
    for (test::Model model : {eager, captured}) {
      parallelize_module(*model, mesh, plan, {.axis = "tp"});
      distribute_module(*model, mesh);
    }
    auto fast = compile(captured);
    torch::optim::AdamW one(eager->parameters(), torch::optim::AdamWOptions(1e-2)),
        other(fast->parameters(), torch::optim::AdamWOptions(1e-2));
    const std::string who = "rank " + std::to_string(mesh.coordinate()[0]);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor tokens = test::tokens_of(step);
      const auto place = [&](const at::Tensor& tensor) {
        return distribute_tensor(tensor, mesh, {Replicate{}});
      };
      const at::Tensor inputs = place(tokens), targets = place(tokens.roll(1, 1).contiguous());
      const auto loss_of = [&](const at::Tensor& logits) {
        return nn::functional::cross_entropy(
            logits.reshape({test::kBatch * test::kTokens, test::kVocabulary}),
            targets.reshape({test::kBatch * test::kTokens}));
      };
      one.zero_grad();
      other.zero_grad();
      const at::Tensor expected = loss_of(eager->forward(inputs)), actual = loss_of(fast->forward(inputs));
      EXPECT_TRUE(same_tensor(actual.detach(), expected.detach())) << who << ", step " << step;
      expected.backward();
      actual.backward();
      one.step();
      other.step();
    }
    for (const auto& item : eager->named_parameters())
      EXPECT_TRUE(same_tensor(captured->named_parameters()[item.key()].detach(), item.value().detach()))
          << who << ", " << item.key();
    EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u) << who;
  });
}

TEST(DTensorModule, TransformerTwoRanks) { train_transformer(2, test::tensor_plan()); }
TEST(DTensorModule, TransformerFourRanks) { train_transformer(4, test::tensor_plan()); }
TEST(DTensorModule, TransformerWithSequenceParallel) { train_transformer(2, test::sequence_plan()); }

// On two axes of a mesh: rows of the batch over one, the model over the other.
TEST(DTensorModule, TransformerOnTwoAxes) {
  std::vector<std::pair<test::Model, test::Model>> models;
  for (int rank = 0; rank < 4; ++rank) models.emplace_back(test::make_model(), test::make_model());
  comm::run_ranks(4, 120s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world.rank(), 4));
    auto& [eager, captured] = models[static_cast<std::size_t>(world.rank())];
    for (test::Model model : {eager, captured}) {
      parallelize_module(*model, mesh, test::tensor_plan(), {.axis = "tp"});
      distribute_module(*model, mesh);
    }
    auto fast = compile(captured, {.partitioner = Partitioner::MinCut});
    const at::Tensor tokens = distribute_tensor(test::tokens_of(0), mesh, {Shard{0}, Replicate{}});
    const at::Tensor expected = eager->forward(tokens), actual = fast->forward(tokens);
    EXPECT_TRUE(same_tensor(actual.detach(), expected.detach()));
    expected.pow(2).mean().backward();
    actual.pow(2).mean().backward();
    for (const auto& item : eager->named_parameters())
      EXPECT_TRUE(same_tensor(captured->named_parameters()[item.key()].grad(), item.value().grad()))
          << "rank " << world.rank() << ", " << item.key();
  });
}

// Capturing sends nothing, and a replay sends what the plain run sends, by kind and bytes.
TEST(DTensorModule, ReplaysSendWhatThePlainRunSends) {
  std::vector<MlpPair> pairs = make_pairs(2);
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    MlpPair& pair = pairs[static_cast<std::size_t>(mesh.coordinate()[0])];
    for (Mlp model : {pair.eager, pair.captured})
      parallelize_module(
          *model, mesh,
          {{"up", colwise_parallel({.input = Shard{0}})}, {"down", rowwise_parallel({.output = Shard{0}})}});
    auto fast = compile(pair.captured);
    const at::Tensor x = placed(numbers({4, 8}, 1), mesh, Shard{0});
    comm::Recorder& recorder = comm::Recorder::global();
    const auto meet = [&] { mesh.group(0).barrier().wait(); };
    const auto totals_of = [&](const std::function<void()>& body) {
      meet();
      meet();
      if (mesh.coordinate()[0] == 0) recorder.reset_totals();
      meet();
      body();
      meet();
      auto totals = recorder.totals();
      meet();
      totals.erase("barrier");
      return totals;
    };
    // The gradient is placed like the result: backward is captured for that.
    const at::Tensor seed = placed(numbers({4, 8}, 2), mesh, Shard{0}, false);
    const auto expected = totals_of([&] { pair.eager->forward(x).backward(seed); });
    EXPECT_GE(expected.size(), 2u);
    for (int call = 0; call < 2; ++call) {
      const auto actual = totals_of([&] { fast->forward(x).backward(seed); });
      ASSERT_EQ(actual.size(), expected.size()) << "call " << call;
      for (const auto& [name, totals] : expected) {
        ASSERT_TRUE(actual.contains(name)) << name;
        EXPECT_EQ(actual.at(name).operations, totals.operations) << name << ", call " << call;
        EXPECT_EQ(actual.at(name).bytes, totals.bytes) << name << ", call " << call;
      }
    }
  });
}

}  // namespace dtensor_module_test
}  // namespace penstock::graph
