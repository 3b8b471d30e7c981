#include "penstock/cli/plain/partition_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/plan/draw/partition_drawing.h"

namespace penstock::cli {
namespace {

using PartitionJson = nlohmann::ordered_json;

constexpr std::size_t kBarLength = 20;
constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

// A stage with everything that is known about it.
struct StageLine {
  int stage = 0, rank = 0;
  models::StagePart part;
  models::PartReport report;
  double cost = 0, bytes = 0;
};

std::vector<StageLine> stage_lines(const PartitionPlan& plan) {
  const std::vector<models::PartReport> reports = models::report_parts(plan.chosen.parts, plan.model);
  std::vector<StageLine> lines;
  for (std::size_t stage = 0; stage < plan.stage_to_rank.size(); ++stage) {
    const std::size_t part = stage % plan.chosen.parts.size();
    lines.push_back({.stage = static_cast<int>(stage),
                     .rank = plan.stage_to_rank[stage],
                     .part = plan.chosen.parts[part],
                     .report = reports[part],
                     .cost = plan.chosen.loads.stage_costs[stage],
                     .bytes = plan.chosen.loads.stage_bytes[stage]});
  }
  return lines;
}

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::string bytes_text(double bytes) { return format_bytes(static_cast<std::uint64_t>(bytes)); }

std::string bar_text(double value, double most) {
  const auto length =
      most > 0 ? static_cast<std::size_t>(value / most * static_cast<double>(kBarLength) + 0.5) : 0;
  return std::string(std::min(length, kBarLength), '#');
}

std::string letters_of(const StageLine& line, const models::ModelPlan& model) {
  std::string letters;
  for (std::int64_t i = line.part.first_block; i < line.part.end_block; ++i)
    letters += model.blocks[static_cast<std::size_t>(i)].letter;
  return letters;
}

// "embed 0-12", "13-25", "head": inclusive.
std::string range_text(const StageLine& line) {
  std::vector<std::string> words;
  if (line.part.has_embed()) words.emplace_back("embed");
  if (line.report.blocks > 0)
    words.push_back(line.report.blocks == 1
                        ? fmt::format("{}", line.report.first_block)
                        : fmt::format("{}-{}", line.report.first_block, line.report.last_block));
  if (line.part.has_head()) words.emplace_back("head");
  return fmt::format("{}", fmt::join(words, " "));
}

std::string kinds_text(const models::PartReport& report) {
  std::vector<std::string> words;
  for (const auto& [kind, count] : report.block_kinds) words.push_back(fmt::format("{} {}", count, kind));
  return fmt::format("{}", fmt::join(words, ", "));
}

bool several_per_rank(const PartitionPlan& plan) {
  return plan.stage_to_rank.size() > static_cast<std::size_t>(plan.layers.ranks);
}

std::string what_is_minimized(const PartitionPlan& plan) {
  return plan.layers.minimize == plan::Slowest::Rank ? "rank" : "stage";
}

// "by cost (estimated)", "by weight (greedy)".
std::string by_text(const std::string& by, const PartitionPlan& plan) {
  if (by == "cost") return fmt::format("by cost ({})", plan.measured ? "measured" : "estimated");
  if (by == "weight") return "by weight (greedy)";
  return by == "cuts" ? "at given cuts" : by == "pattern" ? "as in the pattern" : "by " + by;
}

std::string shape_text(const PartitionPlan& plan) {
  return fmt::format("{}, {} on {} ({}), {}", count_of(plan.model.blocks.size(), "block"),
                     count_of(plan.stage_to_rank.size(), "stage"), count_of(plan.layers.ranks, "rank"),
                     to_text(plan.layers.placement), by_text(plan.chosen.by, plan));
}

// The slowest stage or rank as a multiple of an even share.
double excess(const DividedModel& divided, const PartitionPlan& plan) {
  const double mean = mean_of(plan.layers.minimize == plan::Slowest::Rank ? divided.loads.rank_costs
                                                                          : divided.loads.stage_costs);
  return mean > 0 ? divided.loads.slowest / mean : 1;
}

const DividedModel* find_by(const PartitionPlan& plan, const std::string& by) {
  for (const DividedModel& other : plan.others)
    if (other.by == by) return &other;
  return nullptr;
}

std::string comparison_text(const PartitionPlan& plan) {
  std::string text =
      fmt::format("slowest {} as a multiple of the mean, lower is better:\n", what_is_minimized(plan));
  const auto out = std::back_inserter(text);
  const auto line = [&](const DividedModel& divided) {
    fmt::format_to(out, "  {:<22} {:.3f}{}{}\n", by_text(divided.by, plan), excess(divided, plan),
                   divided.by == "cost" && divided.is_optimal ? "  no split is better" : "",
                   divided.fits ? "" : "  exceeds the memory limit");
    if (divided.by == "cost" && !divided.is_optimal)
      fmt::format_to(out, "  {:<22} {:.3f}  the search ended early: a better split has at least this\n", "",
                     excess(divided, plan) * divided.lower_bound / divided.loads.slowest);
  };
  if (!find_by(plan, plan.chosen.by)) line(plan.chosen);
  for (const DividedModel& other : plan.others) line(other);
  const DividedModel *greedy = find_by(plan, "weight"), *best = find_by(plan, "cost");
  if (greedy && best && greedy->loads.slowest > 0)
    fmt::format_to(out, "  by cost the slowest {} is {:.1f} % lighter than by weight\n",
                   what_is_minimized(plan), 100 * (1 - best->loads.slowest / greedy->loads.slowest));
  return text;
}

PartitionJson json_of_divided(const DividedModel& divided, const PartitionPlan& plan) {
  PartitionJson json = {{"slowest", divided.loads.slowest},
                        {"multiple_of_mean", excess(divided, plan)},
                        {"fits", divided.fits}};
  if (divided.by == "cost") {
    json["lower_bound"] = divided.lower_bound;
    json["optimal"] = divided.is_optimal;
  }
  return json;
}

}  // namespace

std::string pattern_of(const PartitionPlan& plan) {
  std::string pattern;
  for (const models::StagePart& part : plan.chosen.parts) {
    if (part.blocks() == 0) return {};
    if (part.index > 0) pattern += '|';
    for (std::int64_t i = part.first_block; i < part.end_block; ++i)
      pattern += plan.model.blocks[static_cast<std::size_t>(i)].letter;
  }
  return pattern;
}

std::string to_text(const PartitionPlan& plan) {
  std::string text = shape_text(plan) + "\n";
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "{:>5} {:>5}  {:<16} {:>6} {:>12} {:>9}  {:>6} {:<20}  {:>10}  {}\n", "stage", "rank",
                 "blocks", "count", "parameters", "GiB", "cost", "", "memory", "kinds");
  const plan::PlacedLoads& loads = plan.chosen.loads;
  const double mean = mean_of(loads.stage_costs);
  const double most = *std::max_element(loads.stage_costs.begin(), loads.stage_costs.end());
  for (const StageLine& line : stage_lines(plan))
    fmt::format_to(out, "{:>5} {:>5}  {:<16} {:>6} {:>12} {:>9.3f}  {:>6.3f} {:<20}  {:>10}  {}\n",
                   line.stage, line.rank, range_text(line), line.report.blocks, line.report.parameters,
                   line.report.gib, mean > 0 ? line.cost / mean : 1, bar_text(line.cost, most),
                   bytes_text(line.bytes), kinds_text(line.report));
  if (several_per_rank(plan)) {
    const double rank_mean = mean_of(loads.rank_costs);
    const double rank_most = *std::max_element(loads.rank_costs.begin(), loads.rank_costs.end());
    for (std::size_t rank = 0; rank < loads.rank_costs.size(); ++rank) {
      std::vector<int> stages;
      for (std::size_t stage = 0; stage < plan.stage_to_rank.size(); ++stage)
        if (plan.stage_to_rank[stage] == static_cast<int>(rank)) stages.push_back(static_cast<int>(stage));
      fmt::format_to(out, "{:>11}  {:<16} {:>28}   {:>6.3f} {:<20}  {:>10}\n", fmt::format("rank {}", rank),
                     "stages " + format_list(stages), "",
                     rank_mean > 0 ? loads.rank_costs[rank] / rank_mean : 1,
                     bar_text(loads.rank_costs[rank], rank_most), bytes_text(loads.rank_bytes[rank]));
    }
  }
  fmt::format_to(out,
                 "GiB: parameters at 2 bytes each. cost: forward and backward, as a multiple of the mean. "
                 "memory: float32 parameters, gradients\nand optimizer state{}.\n",
                 plan.has_activations ? ", and activations of the microbatches that are kept at once"
                                      : "; activations are not included");
  text += comparison_text(plan);
  const std::string pattern = pattern_of(plan);
  if (plan.chosen.parts.size() > 1)
    text += pattern.empty() ? "a stage without blocks cannot be written as model.pattern\n"
                            : fmt::format("model.pattern = \"{}\"\n", pattern);
  return text;
}

std::string to_json(const PartitionPlan& plan) {
  PartitionJson stages = PartitionJson::array(), ranks = PartitionJson::array(),
                compared = PartitionJson::object();
  for (const StageLine& line : stage_lines(plan))
    stages.push_back({{"stage", line.stage},
                      {"rank", line.rank},
                      {"first_block", line.report.first_block},
                      {"last_block", line.report.last_block},
                      {"blocks", line.report.blocks},
                      {"block_parameters", line.report.block_parameters},
                      {"parameters", line.report.parameters},
                      {"gib", line.report.gib},
                      {"kinds", line.report.block_kinds},
                      {"letters", letters_of(line, plan.model)},
                      {"cost", line.cost},
                      {"bytes", line.bytes}});
  const plan::PlacedLoads& loads = plan.chosen.loads;
  for (std::size_t rank = 0; rank < loads.rank_costs.size(); ++rank) {
    PartitionJson entry = {
        {"rank", rank}, {"cost", loads.rank_costs[rank]}, {"bytes", loads.rank_bytes[rank]}};
    if (!plan.layers.limits.empty())
      entry["limit"] = plan.layers.limits[plan.layers.limits.size() == 1 ? 0 : rank];
    ranks.push_back(std::move(entry));
  }
  for (const DividedModel& other : plan.others) compared[other.by] = json_of_divided(other, plan);
  const PartitionJson all = {{"by", plan.chosen.by},
                             {"costs", plan.measured ? "measured" : "estimated"},
                             {"minimize", what_is_minimized(plan)},
                             {"placement", to_text(plan.layers.placement)},
                             {"activations", plan.has_activations},
                             {"stages", std::move(stages)},
                             {"ranks", std::move(ranks)},
                             {"chosen", json_of_divided(plan.chosen, plan)},
                             {"compared", std::move(compared)},
                             {"pattern", pattern_of(plan)}};
  return all.dump(1) + "\n";
}

std::string draw(const PartitionPlan& plan, const std::string& title) {
  plan::PartitionDrawing drawing{
      .title = title, .summary = "", .ranks = plan.layers.ranks, .stages = {}, .limits = {}};
  drawing.summary = fmt::format("{}; slowest {} {:.3f} times the mean", shape_text(plan),
                                what_is_minimized(plan), excess(plan.chosen, plan));
  for (const StageLine& line : stage_lines(plan))
    drawing.stages.push_back(
        {.stage = line.stage,
         .rank = line.rank,
         .letters = letters_of(line, plan.model),
         .has_first = line.part.has_embed(),
         .has_last = line.part.has_head(),
         .cost = line.cost,
         .bytes = line.bytes,
         .hover = fmt::format(
             "stage {} on rank {}\nblocks {}: {}\n{} parameters, {:.3f} GiB at 2 bytes each\n{} "
             "with gradients, optimizer{}",
             line.stage, line.rank, range_text(line), kinds_text(line.report), line.report.parameters,
             line.report.gib, bytes_text(line.bytes), plan.has_activations ? " and activations" : "")});
  for (int rank = 0; rank < plan.layers.ranks && !plan.layers.limits.empty(); ++rank)
    drawing.limits.push_back(
        plan.layers.limits[plan.layers.limits.size() == 1 ? 0 : static_cast<std::size_t>(rank)]);
  return plan::draw_partition(drawing);
}

}  // namespace penstock::cli
