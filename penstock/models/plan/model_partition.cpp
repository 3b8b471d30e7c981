#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/model_plan.h"
#include "penstock/models/plan/element_count.h"
#include "penstock/models/plan/pattern.h"
#include "penstock/partition.h"

namespace penstock::models {
namespace {

constexpr double kMovedElement = 10;  // one read and write takes as long as this many operations

// Throws unless the letters of the pattern are the blocks of the model.
void check_blocks(const std::string& text, const BlockPattern& pattern, const ModelPlan& plan) {
  if (pattern.blocks.size() != plan.blocks.size())
    throw ConfigError(describe(fmt::format("pattern \"{}\"", text),
                               fmt::format("{} blocks", pattern.blocks.size()),
                               fmt::format("{}, model.layers", plan.blocks.size()), "change one of the two"));
  for (std::size_t i = 0; i < pattern.blocks.size(); ++i)
    if (letter_of(pattern.blocks[i]) != plan.blocks[i].letter)
      throw ConfigError(describe(fmt::format("pattern \"{}\", block {}", text, i),
                                 fmt::format("{}", letter_of(pattern.blocks[i])),
                                 fmt::format("{}, which the model has there", plan.blocks[i].letter)));
}

// Throws if cuts, from a pattern or given as numbers, make another number of stages.
void check_stages_of_cuts(const std::string& what, std::size_t cuts, int stages) {
  if (cuts + 1 != static_cast<std::size_t>(stages))
    throw ConfigError(describe(what, fmt::format("{} stages", cuts + 1),
                               fmt::format("{}, as in the layout", stages),
                               "move the cuts, or remove them to let the blocks be balanced"));
}

std::vector<plan::LayerRange> cut_ranges(int layers, int stages, const std::vector<int>& cuts) {
  const std::string what = fmt::format("cuts {}", fmt::join(cuts, ", "));
  for (std::size_t i = 0; i < cuts.size(); ++i)
    if (cuts[i] <= (i == 0 ? 0 : cuts[i - 1]) || cuts[i] >= layers)
      throw ConfigError(describe(
          what, fmt::format("{}", cuts[i]),
          fmt::format("increasing numbers from 1 to {}, the first blocks of stages 1, 2, ...", layers - 1)));
  check_stages_of_cuts(what, cuts.size(), stages);
  return plan::partition_at(layers, cuts);
}

// The cuts that a pattern has.
std::vector<int> pattern_cuts(const ModelPlan& plan, const std::string& text) {
  if (text.empty()) return {};
  const BlockPattern pattern = parse_pattern(text);
  check_blocks(text, pattern, plan);
  return pattern.boundaries;
}

std::vector<plan::LayerRange> ranges_of(const ModelPlan& plan, int stages, const PartitionOptions& how) {
  const int layers = static_cast<int>(plan.blocks.size());
  const std::vector<int> in_pattern = pattern_cuts(plan, how.pattern);
  if (!in_pattern.empty()) {
    if (!how.cuts.empty())
      throw ConfigError(describe("cuts", fmt::format("{}", fmt::join(how.cuts, ", ")),
                                 fmt::format("none, because the pattern \"{}\" has cuts", how.pattern),
                                 "leave out one of the two"));
    check_stages_of_cuts(fmt::format("pattern \"{}\"", how.pattern), in_pattern.size(), stages);
    return plan::partition_at(layers, in_pattern);
  }
  if (!how.cuts.empty()) return cut_ranges(layers, stages, how.cuts);
  if (how.balance == Balance::Count) return plan::partition_by_count(layers, stages);
  if (how.balance == Balance::Weight) return plan::partition_by_weight(block_weights(plan), stages);
  const PartCosts costs = how.costs ? *how.costs : estimated_costs(plan);
  std::vector<double> blocks = costs.blocks;
  if (blocks.size() == 1) blocks.assign(static_cast<std::size_t>(layers), blocks[0]);
  if (blocks.size() != static_cast<std::size_t>(layers))
    throw ValueError(describe("partition: costs of blocks", fmt::format("{}", costs.blocks.size()),
                              fmt::format("{}, or one for all", layers)));
  return plan::partition_by_cost(blocks, stages,
                                 {.first = costs.embed, .last = costs.head, .may_be_empty = true});
}

}  // namespace

StagePart whole_model(const ModelPlan& plan) {
  return {0, 1, 0, static_cast<std::int64_t>(plan.blocks.size())};
}

PartCosts estimated_costs(const ModelPlan& plan) {
  PartCosts costs;
  for (const BlockPlan& block : plan.blocks)
    costs.blocks.push_back(3 * (block.flops_per_token + kMovedElement * block.moved_per_token));
  costs.embed = 3 * kMovedElement * (static_cast<double>(plan.width) + plan.embed_moved_per_token);
  costs.head = 3 * (plan.head_flops_per_token + kMovedElement * plan.head_moved_per_token);
  return costs;
}

std::vector<double> block_weights(const ModelPlan& plan) {
  std::vector<double> weights;
  for (const BlockPlan& block : plan.blocks)
    weights.push_back(static_cast<double>(element_count(block.parameters)));
  return weights;
}

std::vector<StagePart> partition_model(const ModelPlan& plan, int stages, const PartitionOptions& how) {
  std::vector<StagePart> parts;
  for (const plan::LayerRange& range : ranges_of(plan, stages, how))
    parts.push_back({static_cast<int>(parts.size()), stages, range.begin, range.end});
  return parts;
}

}  // namespace penstock::models
