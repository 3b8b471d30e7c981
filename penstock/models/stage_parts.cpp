#include "penstock/models/stage_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "penstock/base/errors.h"
#include "penstock/models/pattern.h"
#include "penstock/plan/partition.h"

namespace penstock::models {
namespace {

constexpr double kMovedElement = 10;  // operations that the time of one read and write is worth

std::vector<plan::LayerRange> ranges_of(const TransformerOptions& options, int stages, const PartitionOptions& how) {
  const int layers = static_cast<int>(options.layers);
  if (!how.pattern.empty()) {
    const BlockPattern pattern = parse_pattern(how.pattern);
    if (static_cast<int>(pattern.blocks.size()) != layers)
      throw ConfigError(describe(fmt::format("pattern \"{}\"", how.pattern), fmt::format("{} blocks", pattern.blocks.size()), fmt::format("{}, model.layers", layers),
                                 "change one of the two"));
    if (pattern.has_cuts()) {
      if (pattern.stages() != stages)
        throw ConfigError(describe(fmt::format("pattern \"{}\"", how.pattern), fmt::format("{} stages", pattern.stages()), fmt::format("{}, as the layout has", stages),
                                   "move the cuts, or leave them out to have the blocks balanced"));
      return plan::partition_at(layers, pattern.boundaries);
    }
  }
  if (how.balance == Balance::Count) return plan::partition_by_count(layers, stages);
  const PartCosts costs = how.costs ? *how.costs : estimated_costs(options, options.context);
  std::vector<double> blocks = costs.blocks;
  if (blocks.size() == 1) blocks.assign(static_cast<std::size_t>(layers), blocks[0]);
  if (blocks.size() != static_cast<std::size_t>(layers))
    throw ValueError(describe("partition: costs of blocks", fmt::format("{}", costs.blocks.size()), fmt::format("{}, or one for all", layers)));
  return plan::partition_by_cost(blocks, stages, {.first = costs.embed, .last = costs.head, .may_be_empty = true});
}

}  // namespace

StagePart whole_model(const TransformerOptions& options) { return {0, 1, 0, options.layers}; }

PartCosts estimated_costs(const TransformerOptions& options, std::int64_t length) {
  const TransformerOptions whole = options.resolved();
  const auto width = static_cast<double>(whole.width), vocabulary = static_cast<double>(whole.vocabulary);
  // About 20 elements of the width and 6 of the feed-forward are touched by what is no product; scores are touched 4 times a head.
  const double moved = 20 * width + 6 * static_cast<double>(whole.feed_width) + 4 * static_cast<double>(length * whole.heads);
  return {.blocks = {3 * (block_flops_per_token(whole, length) + kMovedElement * moved)},
          .embed = 3 * kMovedElement * width,
          .head = 3 * (head_flops_per_token(whole) + kMovedElement * (2 * vocabulary + 4 * width))};
}

std::vector<StagePart> partition_model(const TransformerOptions& options, int stages, const PartitionOptions& how) {
  const TransformerOptions whole = options.resolved();
  std::vector<StagePart> parts;
  for (const plan::LayerRange& range : ranges_of(whole, stages, how)) parts.push_back({static_cast<int>(parts.size()), stages, range.begin, range.end});
  return parts;
}

std::vector<int> stages_of_parameter(const std::vector<StagePart>& parts, const TransformerOptions& options, const std::string& name) {
  const auto shapes = parameter_shapes(options);
  if (std::none_of(shapes.begin(), shapes.end(), [&](const ParameterShape& shape) { return shape.name == name; }))
    throw ValueError(describe("parameter", fmt::format("'{}'", name), "a name of the model, like blocks.0.feed.up.weight"));
  std::vector<int> stages;
  for (const StagePart& part : parts) {
    bool here = name == "embed.weight" ? part.has_embed() || (part.has_head() && options.tie_head) : part.has_head();
    if (name.starts_with("blocks.")) {
      const std::int64_t block = std::stoll(name.substr(std::string("blocks.").size()));
      here = block >= part.first_block && block < part.end_block;
    }
    if (here) stages.push_back(part.index);
  }
  return stages;
}

std::string describe_parts(const std::vector<StagePart>& parts, const TransformerOptions& options) {
  std::string text;
  for (const StagePart& part : parts) {
    std::int64_t parameters = part.blocks() * block_parameter_count(options);
    std::string what = part.blocks() == 0 ? "no blocks" : part.blocks() == 1 ? fmt::format("block {}", part.first_block) : fmt::format("blocks {}-{}", part.first_block, part.end_block - 1);
    if (part.has_embed()) what = "embed, " + what;
    if (part.has_head()) what += options.tie_head ? ", norm, tied head" : ", norm, head";
    if (part.has_embed()) parameters += options.vocabulary * options.width;
    if (part.has_head()) parameters += options.width;
    if (part.has_head() && !(options.tie_head && part.has_embed())) parameters += options.vocabulary * options.width;
    text += fmt::format("stage {}: {}, {:.3f} M parameters\n", part.index, what, static_cast<double>(parameters) / 1e6);
  }
  return text;
}

}  // namespace penstock::models
