// Hybrid stages split over tensor-parallel and expert-parallel ranks against one process, in float64: logits
// or hidden states, and gradients of every parameter.
#include "penstock/models/hybrid/hybrid_parallel.h"

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
#include "penstock/gradients.h"
#include "penstock/hybrid.h"
#include "penstock/models/transformer/trainable_transformer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/models/parallel_hybrid.h"
#include "tests/throws.h"

namespace penstock::models {
namespace hybrid_parallel_test {

using namespace std::chrono_literals;
using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

TEST(HybridParallel, EveryKindOfBlock) {
  for (const char* pattern : {"A", "F", "E", "M"})
    for (const int ranks : {2, 4}) expect_tensor_parallel(small_parallel(pattern), ranks, pattern);
}

TEST(HybridParallel, BlocksTogether) {
  expect_tensor_parallel(tied_parallel(), 2, "tied, dynamic tanh");
  expect_tensor_parallel(limited_parallel(), 4, "sigmoid scores with a capacity");
}

// Keys and queries are split, shared by all ranks, or shared by the ranks of a group.
TEST(HybridParallel, GroupsOfStateSpaces) {
  for (const std::int64_t groups : {1, 2, 4, 8})
    for (const int ranks : {2, 4}) {
      HybridOptions options = small_parallel("M");
      options.state_groups = groups;
      expect_tensor_parallel(options, ranks, std::to_string(groups) + " groups");
    }
}

TEST(HybridParallel, Depths) {
  HybridOptions options = small_parallel("AEMF");
  options.depth_layers = {0, 1, 2, 3};
  options.depth_kind = "gamma";
  options.depth_weight = 0.1;
  expect_tensor_parallel(options, 2, "depths");
}

TEST(HybridParallel, MultiToken) {
  const ParallelInput input;
  const HybridMetadata known{.tokens = input.tokens, .targets = input.tokens.roll(-1, 1)};
  for (const bool tied : {false, true})
    for (const char* block : {"A", "E"}) {
      HybridOptions options = small_parallel("AM");
      options.multi_token_depth = 2;
      options.multi_token_block = block;
      options.tie_head = tied;
      expect_tensor_parallel(options, 2, block, known);
    }
}

TEST(HybridParallel, EmbeddingsAndRelationsFromMetadata) {
  const auto ids = [](int seed) {
    return at::randint(0, 4, {4, 9}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed)),
                       at::kLong);
  };
  HybridMetadata metadata{.structure_kinds = ids(1),
                          .dependency_levels = ids(2),
                          .syntax_depths = ids(3),
                          .sibling_indices = ids(4),
                          .node_types = ids(5),
                          .parents = at::arange(-1, 8).expand({4, 9}).contiguous(),
                          .platforms = ids(6).select(1, 0).contiguous()};
  metadata.relations = at::rand({4, 3, 9, 9}, at::detail::createCPUGenerator(7)).gt(0.5);
  HybridOptions options = small_parallel("AFEA");
  options.structure_embedding = true;
  options.platforms = 4;
  options.ngram_orders = {2, 3};
  options.ngram_buckets = 32;
  options.embed_norm = "dynamic_tanh";
  options.relations = 3;
  options.tree_feed = true;
  for (const int ranks : {2, 4}) expect_tensor_parallel(options, ranks, "metadata", metadata);
}

// One token at a time equals the whole row on split blocks, too.
TEST(HybridParallel, Generates) {
  const HybridOptions options = small_parallel("AEM");
  const ParallelInput input;
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    HybridStage stage = double_stage(options);
    stage->parallelize(world.mesh("cpu", {{"tp", 2}}));
    fill_strongly(*stage);
    stage->eval();
    const at::NoGradGuard no_grad;
    const at::Tensor whole = full_tensor(stage->forward(input.tokens));
    const auto cache = stage->make_cache(9);
    for (std::int64_t i = 0; i < 9; ++i) {
      const at::Tensor next = full_tensor(stage->forward_cached(input.tokens.narrow(1, i, 1), *cache));
      EXPECT_LT(largest_difference(next.select(1, 0), whole.select(1, i)), 1e-10) << i;
    }
  });
}

// Four ranks as 2 x 2: a rank has half of the columns of half of the experts. Ranks along ep have other rows.
TEST(HybridParallel, ExpertsAndColumns) {
  HybridOptions options = small_parallel("AEM");
  options.balance_weight = 0;  // of the rows of a rank
  const ParallelInput input;
  HybridStage alone = double_stage(options);
  fill_strongly(*alone);
  token_loss(alone->forward(input.tokens, input.documents), input.tokens, 10).backward();
  const auto gradients = whole_gradients(*alone);
  std::map<std::string, at::Tensor> sums;  // over ep, of what is not divided
  std::mutex mutex;
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = world.mesh("cpu", {{"ep", 2}, {"tp", 2}});
    HybridStage stage = double_stage(options);
    stage->parallelize(mesh);
    fill_strongly(*stage);
    stage->set_auxiliary_scale(0.5);  // two ranks with half of the rows each
    const std::int64_t first = 2 * mesh.coordinate()[0];
    const auto rows = [&](const at::Tensor& all) { return all.narrow(0, first, 2); };
    token_loss(stage->forward(rows(input.tokens), rows(input.documents)), rows(input.tokens), 10).backward();
    const auto own = whole_gradients(*stage);
    const std::lock_guard lock(mutex);
    EXPECT_EQ(to_local(stage->named_parameters()["blocks.1.experts.gate"]).sizes(),
              (std::vector<std::int64_t>{2, 16, 4}));
    if (mesh.coordinate()[1] != 0) return;
    for (const auto& [name, gradient] : own) {
      if (name.find("experts.gate") != std::string::npos || name.find("experts.up") != std::string::npos ||
          name.find("experts.down") != std::string::npos) {
        EXPECT_LT(largest_difference(gradient, gradients.at(name)), kParallelTolerance) << name;
        continue;
      }
      const auto [place, is_first] = sums.try_emplace(name, gradient);
      if (!is_first) place->second = place->second + gradient;
    }
  });
  for (const auto& [name, sum] : sums)
    EXPECT_LT(largest_difference(sum, gradients.at(name)), kParallelTolerance) << name;
}

TEST(HybridParallel, SizesThatDoNotDivideAreRefused) {
  const auto error = [](const HybridOptions& options, int ranks) {
    return message_of<ConfigError>([&] { check_tensor_parallel(options, ranks); });
  };
  EXPECT_NO_THROW(check_tensor_parallel(small_parallel("AEMF"), 4));
  EXPECT_TRUE(has_text(error(small_parallel("A"), 3), "model.heads"));
  HybridOptions options = small_parallel("E");
  options.expert_width = 6;
  EXPECT_TRUE(has_text(error(options, 4), "model.expert_width"));
  options = small_parallel("M");
  EXPECT_TRUE(has_text(error(options, 3), "heads of M blocks"));
  options.width = 24;  // 12 heads
  options.state_groups = 3;
  EXPECT_TRUE(has_text(error(options, 2), "model.state_groups, 3"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { check_expert_parallel(small_parallel("AM"), 2); }),
                       "has E blocks"));
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([] { check_expert_parallel(small_parallel("E"), 3); }), "layout.ep"));
  options = small_parallel("E");
  options.balance_scope = "world";
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { options.check(); }), "model.balance_scope: got \"world\""));
  const auto transformer = trainable_transformer({});
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { transformer->check_expert_parallel(2); }), "layout.ep"));
}

// The block of multi-token prediction may be of a kind that the pattern does not have.
TEST(HybridParallel, SizesOfMultiTokenBlocksThatDoNotDivideAreRefused) {
  const auto predicting = [](const std::string& pattern, const std::string& block) {
    HybridOptions options = small_parallel(pattern);
    options.multi_token_depth = 1;
    options.multi_token_block = block;
    return options;
  };
  const auto error = [](const HybridOptions& options, int ranks) {
    return message_of<ConfigError>([&] { check_tensor_parallel(options, ranks); });
  };
  EXPECT_TRUE(has_text(error(predicting("F", "A"), 3), "model.heads"));
  HybridOptions options = predicting("F", "E");
  options.expert_width = 6;
  EXPECT_TRUE(has_text(error(options, 4), "model.expert_width"));
  EXPECT_TRUE(has_text(error(predicting("F", "M"), 3), "heads of M blocks"));
  EXPECT_NO_THROW(check_tensor_parallel(predicting("F", "M"), 2));
  // Without prediction its letter means nothing.
  options = predicting("F", "A");
  options.multi_token_depth = 0;
  EXPECT_NO_THROW(check_tensor_parallel(options, 3));
  EXPECT_NO_THROW(check_expert_parallel(predicting("AM", "E"), 2));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { check_expert_parallel(predicting("AM", "E"), 3); }),
                       "layout.ep"));
}

}  // namespace hybrid_parallel_test
}  // namespace penstock::models
