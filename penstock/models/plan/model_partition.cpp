#include "penstock/transformer_options.h"

#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/models/plan/pattern.h"
#include "penstock/partition.h"

namespace penstock::models {
namespace {

constexpr double kMovedElement = 10;  // one read and write takes as long as this many operations

std::vector<plan::LayerRange> ranges_of(const TransformerOptions& options, int stages,
                                        const PartitionOptions& how) {
  const int layers = static_cast<int>(options.layers);
  if (!how.pattern.empty()) {
    const BlockPattern pattern = parse_pattern(how.pattern);
    if (static_cast<int>(pattern.blocks.size()) != layers)
      throw ConfigError(describe(fmt::format("pattern \"{}\"", how.pattern),
                                 fmt::format("{} blocks", pattern.blocks.size()),
                                 fmt::format("{}, model.layers", layers), "change one of the two"));
    if (pattern.has_cuts()) {
      if (pattern.stages() != stages)
        throw ConfigError(describe(fmt::format("pattern \"{}\"", how.pattern),
                                   fmt::format("{} stages", pattern.stages()),
                                   fmt::format("{}, as in the layout", stages),
                                   "move the cuts, or remove them to let the blocks be balanced"));
      return plan::partition_at(layers, pattern.boundaries);
    }
  }
  if (how.balance == Balance::Count) return plan::partition_by_count(layers, stages);
  const PartCosts costs = how.costs ? *how.costs : estimated_costs(options, options.context);
  std::vector<double> blocks = costs.blocks;
  if (blocks.size() == 1) blocks.assign(static_cast<std::size_t>(layers), blocks[0]);
  if (blocks.size() != static_cast<std::size_t>(layers))
    throw ValueError(describe("partition: costs of blocks", fmt::format("{}", costs.blocks.size()),
                              fmt::format("{}, or one for all", layers)));
  return plan::partition_by_cost(blocks, stages,
                                 {.first = costs.embed, .last = costs.head, .may_be_empty = true});
}

}  // namespace

StagePart whole_model(const TransformerOptions& options) { return {0, 1, 0, options.layers}; }

PartCosts estimated_costs(const TransformerOptions& options, std::int64_t length) {
  const TransformerOptions whole = options.resolved();
  const auto width = static_cast<double>(whole.width), vocabulary = static_cast<double>(whole.vocabulary);
  // Besides the products, about 20 elements of the width and 6 of the feed-forward are touched; scores are
  // touched 4 times per head.
  const double moved =
      20 * width + 6 * static_cast<double>(whole.feed_width) + 4 * static_cast<double>(length * whole.heads);
  return {.blocks = {3 * (block_flops_per_token(whole, length) + kMovedElement * moved)},
          .embed = 3 * kMovedElement * width,
          .head = 3 * (head_flops_per_token(whole) + kMovedElement * (2 * vocabulary + 4 * width))};
}

std::vector<StagePart> partition_model(const TransformerOptions& options, int stages,
                                       const PartitionOptions& how) {
  const TransformerOptions whole = options.resolved();
  std::vector<StagePart> parts;
  for (const plan::LayerRange& range : ranges_of(whole, stages, how))
    parts.push_back({static_cast<int>(parts.size()), stages, range.begin, range.end});
  return parts;
}

std::vector<PartReport> report_parts(const std::vector<StagePart>& parts, const TransformerOptions& options) {
  constexpr double kBytes = 2, kGib = 1024.0 * 1024.0 * 1024.0;
  const std::int64_t table = options.vocabulary * options.width, of_block = block_parameter_count(options);
  std::vector<PartReport> reports;
  for (const StagePart& part : parts) {
    PartReport report{.stage = part.index,
                      .first_block = part.first_block,
                      .last_block = part.end_block - 1,
                      .blocks = part.blocks()};
    if (part.blocks() > 0)
      report.block_kinds["attention"] = part.blocks();  // the only kind that a pattern can have (pattern.h)
    report.block_parameters = part.blocks() * of_block;
    report.parameters = report.block_parameters;
    if (part.has_embed() || (part.has_head() && options.tie_head)) report.parameters += table;
    if (part.has_head()) report.parameters += options.width + (options.tie_head ? 0 : table);
    report.gib = static_cast<double>(report.parameters) * kBytes / kGib;
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<PartReport> report_parts(const TransformerOptions& options, int stages,
                                     const PartitionOptions& how) {
  return report_parts(partition_model(options, stages, how), options.resolved());
}

namespace {

std::string blocks_text(const StagePart& part, const PartReport& report, const TransformerOptions& options) {
  std::string what = report.blocks == 0 ? "no blocks"
                     : report.blocks == 1
                         ? fmt::format("block {}", report.first_block)
                         : fmt::format("blocks {}-{}", report.first_block, report.last_block);
  if (part.has_embed()) what = "embed, " + what;
  if (part.has_head()) what += options.tie_head ? ", norm, tied head" : ", norm, head";
  return what;
}

std::string size_text(const PartReport& report) {
  std::string text =
      fmt::format("{:.3f} M parameters, {} at 2 bytes each", static_cast<double>(report.parameters) / 1e6,
                  format_bytes(2 * static_cast<std::uint64_t>(report.parameters)));
  for (const auto& [kind, count] : report.block_kinds) text += fmt::format(", {} {}", count, kind);
  return text;
}

}  // namespace

std::string describe_parts(const std::vector<StagePart>& parts, const TransformerOptions& options) {
  std::string text;
  const std::vector<PartReport> reports = report_parts(parts, options);
  for (std::size_t i = 0; i < parts.size(); ++i)
    text += fmt::format("stage {}: {}, {}\n", reports[i].stage, blocks_text(parts[i], reports[i], options),
                        size_text(reports[i]));
  return text;
}

std::vector<std::string> summarize_parts(const std::vector<StagePart>& parts,
                                         const TransformerOptions& options) {
  const std::vector<PartReport> reports = report_parts(parts, options);
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < parts.size();) {
    std::size_t end = begin + 1;
    const bool plain = !parts[begin].has_embed() && !parts[begin].has_head();
    while (plain && end < parts.size() && !parts[end].has_head() &&
           parts[end].blocks() == parts[begin].blocks())
      ++end;
    if (end == begin + 1) {
      lines.push_back(fmt::format("stage {}: {}, {}", reports[begin].stage,
                                  blocks_text(parts[begin], reports[begin], options),
                                  size_text(reports[begin])));
    } else {
      lines.push_back(fmt::format("stages {}-{}: {} block{} each, {}-{}; each {}", reports[begin].stage,
                                  reports[end - 1].stage, parts[begin].blocks(),
                                  parts[begin].blocks() == 1 ? "" : "s", reports[begin].first_block,
                                  reports[end - 1].last_block, size_text(reports[begin])));
    }
    begin = end;
  }
  return lines;
}

}  // namespace penstock::models
