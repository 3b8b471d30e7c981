#include "penstock/models/stage_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "penstock/base/errors.h"
#include "penstock/base/text.h"
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

// Of a name that the model has.
bool holds(const StagePart& part, const TransformerOptions& options, const std::string& name) {
  if (name.starts_with("blocks.")) {
    const std::int64_t block = std::stoll(name.substr(std::string("blocks.").size()));
    return block >= part.first_block && block < part.end_block;
  }
  return name == "embed.weight" ? part.has_embed() || (part.has_head() && options.tie_head) : part.has_head();
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
  for (const StagePart& part : parts)
    if (holds(part, options, name)) stages.push_back(part.index);
  return stages;
}

std::vector<PartReport> report_parts(const std::vector<StagePart>& parts, const TransformerOptions& options) {
  constexpr double kBytes = 2, kGib = 1024.0 * 1024.0 * 1024.0;
  const std::vector<ParameterShape> shapes = parameter_shapes(options);
  std::vector<PartReport> reports;
  for (const StagePart& part : parts) {
    PartReport report{.stage = part.index, .first_block = part.first_block, .last_block = part.end_block - 1, .blocks = part.blocks()};
    if (part.blocks() > 0) report.block_kinds["attention"] = part.blocks();  // the only kind that a pattern can have (pattern.h)
    for (const ParameterShape& parameter : shapes) {
      if (!holds(part, options, parameter.name)) continue;
      std::int64_t elements = 1;
      for (const std::int64_t size : parameter.shape) elements *= size;
      report.parameters += elements;
      if (parameter.name.starts_with("blocks.")) report.block_parameters += elements;
    }
    report.gib = static_cast<double>(report.parameters) * kBytes / kGib;
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<PartReport> report_parts(const TransformerOptions& options, int stages, const PartitionOptions& how) {
  return report_parts(partition_model(options, stages, how), options.resolved());
}

std::string describe_parts(const std::vector<StagePart>& parts, const TransformerOptions& options) {
  std::string text;
  const std::vector<PartReport> reports = report_parts(parts, options);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const StagePart& part = parts[i];
    const PartReport& report = reports[i];
    std::string what = report.blocks == 0 ? "no blocks" : report.blocks == 1 ? fmt::format("block {}", report.first_block) : fmt::format("blocks {}-{}", report.first_block, report.last_block);
    if (part.has_embed()) what = "embed, " + what;
    if (part.has_head()) what += options.tie_head ? ", norm, tied head" : ", norm, head";
    std::string kinds;
    for (const auto& [kind, count] : report.block_kinds) kinds += fmt::format(", {} {}", count, kind);
    text += fmt::format("stage {}: {}, {:.3f} M parameters, {} at 2 bytes each{}\n", report.stage, what, static_cast<double>(report.parameters) / 1e6, format_bytes(2 * static_cast<std::uint64_t>(report.parameters)), kinds);
  }
  return text;
}

}  // namespace penstock::models
