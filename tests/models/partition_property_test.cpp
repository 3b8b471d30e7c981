// Whatever divides a model into stages: every block is on one stage, none on two, and in order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "penstock/hybrid_options.h"
#include "penstock/model_plan.h"
#include "penstock/placed_partition.h"

namespace penstock::models {
namespace partition_property_test {

class RandomPatterns {
 public:
  std::string letters() {
    std::string pattern;
    const int count = 1 + below(24);
    for (int i = 0; i < count; ++i) pattern += "AMEF"[below(4)];
    return pattern;
  }
  // Increasing cuts, `stages` - 1 of them.
  std::vector<int> cuts(int layers, int stages) {
    std::set<int> chosen;
    while (static_cast<int>(chosen.size()) < stages - 1) chosen.insert(1 + below(layers - 1));
    return {chosen.begin(), chosen.end()};
  }
  int below(int end) { return static_cast<int>(random_() % static_cast<unsigned>(end)); }

 private:
  std::mt19937 random_{23};
};

ModelPlan plan_of(const std::string& pattern, RandomPatterns& random) {
  HybridOptions options{.pattern = pattern, .vocabulary = 32 << random.below(6), .width = 32, .context = 32};
  options.experts = 4 << random.below(3);
  options.expert_width = 32;
  options.state_head_width = 16;
  options.state_size = 16;
  options.tie_head = random.below(2) == 0;
  options.relations = pattern.find('A') != std::string::npos && random.below(3) == 0 ? 3 : 0;
  return options.plan();
}

std::string with_cuts(const std::string& letters, const std::vector<int>& cuts) {
  std::string text;
  for (std::size_t i = 0; i < letters.size(); ++i) {
    if (std::find(cuts.begin(), cuts.end(), static_cast<int>(i)) != cuts.end()) text += '|';
    text += letters[i];
  }
  return text;
}

// Counts blocks and parameters, stage by stage.
void expect_each_block_once(const ModelPlan& plan, const std::vector<StagePart>& parts, int stages,
                            const std::string& which) {
  ASSERT_EQ(static_cast<int>(parts.size()), stages) << which;
  std::vector<int> uses(plan.blocks.size(), 0);
  std::int64_t next = 0;
  for (const StagePart& part : parts) {
    EXPECT_EQ(part.first_block, next) << which;
    for (std::int64_t i = part.first_block; i < part.end_block; ++i) ++uses.at(static_cast<std::size_t>(i));
    next = part.end_block;
  }
  EXPECT_EQ(uses, std::vector<int>(plan.blocks.size(), 1)) << which;
  std::int64_t of_blocks = 0, kinds = 0;
  for (const PartReport& report : report_parts(parts, plan)) {
    of_blocks += report.block_parameters;
    for (const auto& [kind, count] : report.block_kinds) kinds += count;
  }
  std::int64_t all = 0;
  for (const double weight : block_weights(plan)) all += static_cast<std::int64_t>(weight);
  EXPECT_EQ(of_blocks, all) << which;
  EXPECT_EQ(kinds, static_cast<std::int64_t>(plan.blocks.size())) << which;
  for (const BlockPlan& block : plan.blocks)
    for (const ParameterShape& parameter : block.parameters)
      EXPECT_EQ(stages_of_parameter(parts, plan, parameter.name).size(), 1u)
          << which << " " << parameter.name;
}

TEST(PartitionProperty, NoBlockIsDroppedOrDoubled) {
  RandomPatterns random;
  for (int trial = 0; trial < 150; ++trial) {
    const std::string letters = random.letters();
    const int layers = static_cast<int>(letters.size()), stages = 1 + random.below(layers);
    const ModelPlan plan = plan_of(letters, random);
    const std::vector<int> cuts = random.cuts(layers, stages);
    const std::string pattern = with_cuts(letters, cuts);
    const std::string which = pattern + ", trial " + std::to_string(trial);
    for (const Balance balance : {Balance::Count, Balance::Weight, Balance::Cost})
      expect_each_block_once(plan, partition_model(plan, stages, {.balance = balance}), stages, which);
    expect_each_block_once(plan, partition_model(plan, stages, {.cuts = cuts}), stages, which);
    expect_each_block_once(plan, partition_model(plan, stages, {.pattern = pattern}), stages, which);
    EXPECT_EQ(partition_model(plan, stages, {.cuts = cuts}),
              partition_model(plan, stages, {.pattern = pattern}));
  }
}

TEST(PartitionProperty, NorByPlacementAndMemory) {
  using schedule::StagePlacement;
  RandomPatterns random;
  int placed = 0;
  for (int trial = 0; trial < 150; ++trial) {
    const std::string letters = random.letters();
    const ModelPlan plan = plan_of(letters, random);
    const PartCosts costs = estimated_costs(plan);
    plan::PlacedLayers layers;
    layers.placement = trial % 3 == 0   ? StagePlacement::Loop
                       : trial % 3 == 1 ? StagePlacement::V
                                        : StagePlacement::Bidirectional;
    const bool both = layers.placement == StagePlacement::Bidirectional;
    const int parts = 1 + random.below(std::min<int>(8, static_cast<int>(letters.size())));
    layers.ranks = both ? parts : 1 + random.below(4);
    layers.stages = both ? 2 * parts : parts;
    layers.minimize = random.below(2) == 0 ? plan::Slowest::Rank : plan::Slowest::Stage;
    layers.costs = costs.blocks;
    layers.bytes = block_weights(plan);
    layers.ends = {.first = costs.embed, .last = costs.head, .may_be_empty = random.below(2) == 0};
    const plan::PlacedPartition free = plan::partition_placed(layers);
    // A limit between what the free split needs and the least that is possible.
    const double fullest = *std::max_element(free.loads.rank_bytes.begin(), free.loads.rank_bytes.end());
    layers.limits = {0.8 * fullest};
    std::vector<plan::LayerRange> ranges;
    try {
      ranges = plan::partition_placed(layers).parts;
      ++placed;
    } catch (const std::exception&) {
      ranges = free.parts;
    }
    std::vector<StagePart> all;
    for (const plan::LayerRange& range : ranges)
      all.push_back({static_cast<int>(all.size()), parts, range.begin, range.end});
    expect_each_block_once(plan, all, parts, letters + ", trial " + std::to_string(trial));
  }
  EXPECT_GT(placed, 10);
}

}  // namespace partition_property_test
}  // namespace penstock::models
