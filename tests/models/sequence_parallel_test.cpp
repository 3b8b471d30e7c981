// Models whose hidden states are divided along the length over tensor-parallel ranks against one process, in
// float64: logits, auxiliary losses, and gradients of every parameter.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/hybrid.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/transformer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/models/parallel_hybrid.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace sequence_parallel_test {

using namespace std::chrono_literals;
using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

constexpr ParallelSetup kDivided{.sequence_parallel = true, .length = 8};

void expect_divided(const HybridOptions& options, int ranks, const std::string& what,
                    const HybridMetadata& metadata = {}) {
  expect_tensor_parallel(options, ranks, what, metadata, kDivided);
}

TEST(SequenceParallel, EveryKindOfBlock) {
  for (const char* pattern : {"A", "F", "E", "M"})
    for (const int ranks : {2, 4}) expect_divided(small_parallel(pattern), ranks, pattern);
}

TEST(SequenceParallel, BlocksTogether) {
  expect_divided(tied_parallel(), 2, "tied, dynamic tanh");
  expect_divided(limited_parallel(), 4, "sigmoid scores with a capacity, and padding",
                 {.row_valid_tokens = at::tensor({8, 5, 6, 8}, at::kLong)});
}

// The ranks have other tokens, with the masks of one process.
TEST(SequenceParallel, DropoutHasTheMasksOfOneProcess) {
  HybridOptions options = small_parallel("AEMF");
  options.dropout = 0.4;
  options.attention_feed = true;
  for (const int ranks : {2, 4}) expect_divided(options, ranks, "dropout");
}

TEST(SequenceParallel, KeysThatAllRanksOfAStateSpaceUse) {
  HybridOptions options = small_parallel("MM");
  options.state_groups = 2;
  for (const int ranks : {2, 4}) expect_divided(options, ranks, "2 groups");
}

TEST(SequenceParallel, MixturesOfDepthsTakeTokensFromAllRanks) {
  HybridOptions options = small_parallel("AEMF");
  options.depth_layers = {0, 1, 2, 3};
  options.depth_kind = "gamma";
  options.depth_weight = 0.1;
  for (const int ranks : {2, 4}) expect_divided(options, ranks, "all blocks");
  options.depth_layers = {1};
  options.dropout = 0.2;
  expect_divided(options, 2, "one of them");
}

// The last norm has gradients of divided rows and of whole ones.
TEST(SequenceParallel, MultiToken) {
  const ParallelInput input(kDivided.length);
  const HybridMetadata known{.tokens = input.tokens, .targets = input.tokens.roll(-1, 1)};
  for (const bool tied : {false, true})
    for (const char* block : {"A", "E"}) {
      HybridOptions options = small_parallel("AM");
      options.multi_token_depth = 2;
      options.multi_token_block = block;
      options.tie_head = tied;
      expect_divided(options, 2, block, known);
    }
}

TEST(SequenceParallel, EmbeddingsAndRelationsFromMetadata) {
  const std::int64_t length = kDivided.length;
  const auto ids = [&](int seed) {
    return at::randint(0, 4, {4, length}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed)),
                       at::kLong);
  };
  HybridMetadata metadata{
      .structure_kinds = ids(1),
      .dependency_levels = ids(2),
      .syntax_depths = ids(3),
      .sibling_indices = ids(4),
      .node_types = ids(5),
      .parents = at::arange(-1, length - 1).div(2, "floor").expand({4, length}).contiguous(),
      .platforms = ids(6).select(1, 0).contiguous()};
  metadata.relations = at::rand({4, 3, length, length}, at::detail::createCPUGenerator(7)).gt(0.5);
  HybridOptions options = small_parallel("AFEA");
  options.structure_embedding = true;
  options.platforms = 4;
  options.ngram_orders = {2, 3};
  options.ngram_buckets = 32;
  options.embed_norm = "dynamic_tanh";
  options.relations = 3;
  options.tree_feed = true;
  for (const int ranks : {2, 4}) expect_divided(options, ranks, "platforms of rows", metadata);
  metadata.platforms = ids(8);
  expect_divided(options, 2, "platforms of tokens", metadata);
}

TEST(SequenceParallel, RecomputedBlocks) {
  HybridOptions options = small_parallel("AEMF");
  options.dropout = 0.3;
  options.depth_layers = {2};
  ParallelSetup setup = kDivided;
  setup.recompute = true;
  expect_tensor_parallel(options, 2, "recomputed", {}, setup);
}

// Hidden states between stages are the tokens of a rank, and so are their gradients.
TEST(SequenceParallel, StagesExchangeTheTokensOfTheirRank) {
  const HybridOptions options = small_parallel("AEMF");
  const ParallelInput input(8);
  const double tokens = static_cast<double>(input.tokens.numel());
  HybridStage alone = double_stage(options);
  fill_strongly(*alone);
  token_loss(alone->forward(input.tokens, input.documents), input.tokens, tokens).backward();
  const auto expected = whole_gradients(*alone);
  std::mutex mutex;
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const auto stage_of = [&](const StagePart& part) {
      HybridStage stage(options, part);
      stage->to(at::kDouble);
      stage->set_sequence_parallel();
      stage->parallelize(world.mesh("cpu", {{"tp", 2}}));
      fill_strongly(*stage);
      return stage;
    };
    HybridStage first = stage_of({.index = 0, .count = 2, .first_block = 0, .end_block = 2}),
                last = stage_of({.index = 1, .count = 2, .first_block = 2, .end_block = 4});
    const at::Tensor sent = first->forward(input.tokens, input.documents);
    EXPECT_FALSE(is_dtensor(sent));
    EXPECT_EQ(sent.sizes(), (std::vector<std::int64_t>{4, 4, 16}));
    const at::Tensor arrived = sent.detach().requires_grad_();
    token_loss(last->forward(arrived, input.documents), input.tokens, tokens).backward();
    sent.backward(arrived.grad());
    auto own = whole_gradients(*first);
    own.merge(whole_gradients(*last));
    const std::lock_guard lock(mutex);
    ASSERT_EQ(own.size(), expected.size());
    for (const auto& [name, gradient] : expected)
      EXPECT_LT(largest_difference(own.at(name), gradient), kParallelTolerance) << name;
  });
}

// One token cannot be divided: with a cache rows are whole.
TEST(SequenceParallel, Generates) {
  HybridOptions options = small_parallel("AEM");
  options.ngram_orders = {2};
  options.ngram_buckets = 32;
  const ParallelInput input(8);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    HybridStage stage = double_stage(options);
    stage->set_sequence_parallel();
    stage->parallelize(world.mesh("cpu", {{"tp", 2}}));
    fill_strongly(*stage);
    stage->eval();
    const at::NoGradGuard no_grad;
    const at::Tensor whole = full_tensor(stage->forward(input.tokens));
    const auto cache = stage->make_cache(8);
    for (std::int64_t i = 0; i < 8; ++i) {
      const at::Tensor next = full_tensor(stage->forward_cached(input.tokens.narrow(1, i, 1), *cache));
      EXPECT_LT(largest_difference(next.select(1, 0), whole.select(1, i)), 1e-10) << i;
    }
  });
}

TEST(SequenceParallel, LengthsThatDoNotDivideAreRefused) {
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    HybridStage stage = double_stage(small_parallel("A"));
    stage->set_sequence_parallel();
    stage->parallelize(world.mesh("cpu", {{"tp", 2}}));
    const ParallelInput odd(9);
    const std::string message = message_of<ValueError>([&] { stage->forward(odd.tokens); });
    EXPECT_TRUE(has_text(message, "rows of 9 tokens"));
    EXPECT_TRUE(has_text(message, "layout.sequence_parallel"));
  });
}

// What the ranks keep between forward and backward. A norm keeps its input, the tokens of its rank, and
// nothing else; what enters a region is whole.
TEST(SequenceParallel, KeepsLess) {
  count_cpu_memory();
  const auto kept = [](bool sequence_parallel, bool recompute) {
    std::int64_t bytes = 0;
    comm::run_ranks(2, 60s, [&](comm::World& world) {
      HybridOptions options = small_parallel("AEMF");
      options.width = 64;
      options.context = 64;
      HybridStage stage(options, StagePart{.index = 1, .count = 3, .first_block = 0, .end_block = 4});
      if (sequence_parallel) stage->set_sequence_parallel();
      stage->parallelize(world.mesh("cpu", {{"tp", 2}}));
      if (recompute) stage->set_recompute(RecomputePlan::all());
      const at::Tensor x = at::randn({4, sequence_parallel ? 32 : 64, 64}).requires_grad_();
      const auto meet = [&] { world.group().barrier().wait(); };
      stage->forward(x).sum().backward();  // what is allocated once
      meet();
      const std::int64_t before = cpu_memory().live;
      meet();
      const at::Tensor sum = stage->forward(x).sum();
      meet();
      if (world.rank() == 0) bytes = cpu_memory().live - before;
      meet();
      sum.backward();
    });
    return bytes;
  };
  EXPECT_LT(kept(true, false), kept(false, false) * 97 / 100);
  EXPECT_LT(kept(true, true), kept(false, true) * 60 / 100);
}

// ---- the transformer ----

TEST(SequenceParallel, Transformer) {
  for (const bool tied : {false, true}) {
    TransformerOptions options = small(tied);
    options.dropout = 0.3;
    StepContext step;
    step.microbatch = 0;
    const at::Tensor tokens = tokens_for(options, 4, 8), targets = tokens_for(options, 4, 8, 2);
    Gradients expected;
    at::Tensor logits;
    {
      const StepGuard guard(step);
      TransformerStage alone = made(options);
      logits = alone->forward(tokens);
      token_loss(logits, targets, 32).backward();
      collect(*alone, expected);
    }
    std::mutex mutex;
    comm::run_ranks(2, 60s, [&](comm::World& world) {
      const StepGuard guard(step);
      const comm::MeshGroups mesh = world.mesh("cpu", {{"tp", 2}});
      const auto stage_of = [&](const StagePart& part) {
        TransformerStage stage = made(options, part);
        stage->set_sequence_parallel();
        stage->parallelize(mesh);
        return stage;
      };
      const std::int64_t half = options.layers / 2;
      TransformerStage first = stage_of({.index = 0, .count = 2, .first_block = 0, .end_block = half}),
                       last = stage_of(
                           {.index = 1, .count = 2, .first_block = half, .end_block = options.layers});
      const at::Tensor sent = first->forward(tokens), arrived = sent.detach().requires_grad_();
      EXPECT_EQ(sent.sizes(), (std::vector<std::int64_t>{4, 4, options.width}));
      const at::Tensor own = last->forward(arrived);
      token_loss(own, targets, 32).backward();
      sent.backward(arrived.grad());
      const at::Tensor all = full_tensor(own.detach());
      std::map<std::string, at::Tensor> gradients;
      for (const TransformerStage& stage : {first, last})
        for (const auto& item : stage->named_parameters()) {
          const at::Tensor gradient = full_tensor(item.value().grad());
          const auto [place, is_new] = gradients.try_emplace(item.key(), gradient);
          if (!is_new) place->second = place->second + gradient;  // both uses of a tied weight
        }
      const std::lock_guard lock(mutex);
      EXPECT_LT(largest_difference(all, logits.detach()), kParallelTolerance);
      ASSERT_EQ(gradients.size(), expected.size());
      for (const auto& [name, gradient] : expected)
        EXPECT_LT(largest_difference(gradients.at(name), gradient), kParallelTolerance) << name;
    });
  }
}

}  // namespace sequence_parallel_test
}  // namespace penstock::models
