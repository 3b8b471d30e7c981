#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/model_plan.h"
#include "penstock/models/plan/element_count.h"

namespace penstock::models {

std::vector<PartReport> report_parts(const std::vector<StagePart>& parts, const ModelPlan& plan) {
  constexpr double kBytes = 2, kGib = 1024.0 * 1024.0 * 1024.0;
  std::vector<PartReport> reports;
  for (const StagePart& part : parts) {
    PartReport report{.stage = part.index,
                      .first_block = part.first_block,
                      .last_block = part.end_block - 1,
                      .blocks = part.blocks()};
    for (std::int64_t i = part.first_block; i < part.end_block; ++i) {
      const BlockPlan& block = plan.blocks.at(static_cast<std::size_t>(i));
      ++report.block_kinds[block.kind];
      report.block_parameters += element_count(block.parameters);
    }
    report.parameters = report.block_parameters;
    for (const ParameterShape& parameter : plan.embed)
      if (part.has_embed() || (part.has_head() && is_tied(plan, parameter.name)))
        report.parameters += element_count(parameter);
    for (const SharedParameter& shared : plan.shared)
      if (has_copy(part, shared)) report.parameters += element_count(shared.parameter);
    if (part.has_head()) report.parameters += element_count(plan.head);
    report.gib = static_cast<double>(report.parameters) * kBytes / kGib;
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<PartReport> report_parts(const ModelPlan& plan, int stages, const PartitionOptions& how) {
  return report_parts(partition_model(plan, stages, how), plan);
}

namespace {

std::string blocks_text(const StagePart& part, const PartReport& report, const ModelPlan& plan) {
  std::string what = report.blocks == 0 ? "no blocks"
                     : report.blocks == 1
                         ? fmt::format("block {}", report.first_block)
                         : fmt::format("blocks {}-{}", report.first_block, report.last_block);
  if (part.has_embed()) what = "embed, " + what;
  if (!part.has_head()) return what;
  if (plan.tied.empty()) return what + ", norm, head";
  // The last stage may use the embedding besides a head of its own.
  const bool own_head = std::any_of(plan.head.begin(), plan.head.end(),
                                    [](const ParameterShape& each) { return each.name == "head.weight"; });
  return what + (own_head ? ", norm, head, copy of embed" : ", norm, tied head");
}

std::string size_text(const PartReport& report) {
  std::string text =
      fmt::format("{:.3f} M parameters, {} at 2 bytes each", static_cast<double>(report.parameters) / 1e6,
                  format_bytes(2 * static_cast<std::uint64_t>(report.parameters)));
  for (const auto& [kind, count] : report.block_kinds) text += fmt::format(", {} {}", count, kind);
  return text;
}

bool equal_sizes(const PartReport& a, const PartReport& b) {
  return a.blocks == b.blocks && a.parameters == b.parameters && a.block_kinds == b.block_kinds;
}

}  // namespace

std::string describe_parts(const std::vector<StagePart>& parts, const ModelPlan& plan) {
  std::string text;
  const std::vector<PartReport> reports = report_parts(parts, plan);
  for (std::size_t i = 0; i < parts.size(); ++i)
    text += fmt::format("stage {}: {}, {}\n", reports[i].stage, blocks_text(parts[i], reports[i], plan),
                        size_text(reports[i]));
  return text;
}

std::vector<std::string> summarize_parts(const std::vector<StagePart>& parts, const ModelPlan& plan) {
  const std::vector<PartReport> reports = report_parts(parts, plan);
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < parts.size();) {
    std::size_t end = begin + 1;
    const bool plain = !parts[begin].has_embed() && !parts[begin].has_head();
    while (plain && end < parts.size() && !parts[end].has_head() && equal_sizes(reports[end], reports[begin]))
      ++end;
    if (end == begin + 1) {
      lines.push_back(fmt::format("stage {}: {}, {}", reports[begin].stage,
                                  blocks_text(parts[begin], reports[begin], plan),
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
