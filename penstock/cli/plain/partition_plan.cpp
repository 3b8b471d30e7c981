#include "penstock/cli/plain/partition_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/cli/plain/cost_file.h"
#include "penstock/errors.h"
#include "penstock/generators.h"
#include "penstock/schedule.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/train/config/configured_schedule.h"

namespace penstock::cli {
namespace {

using schedule::StagePlacement;

// Bytes of a parameter on its ranks: itself, its gradient and the optimizer's state, in float32. Sharding
// divides all but the gradients, which accumulate unsharded.
double state_bytes(const models::ParameterShape& parameter, const train::TrainConfig& config) {
  double elements = 1;
  for (const std::int64_t size : parameter.shape) elements *= static_cast<double>(size);
  const train::LayoutConfig& layout = config.layout;
  double shards = static_cast<double>(layout.shard);
  if (parameter.per_expert && layout.ep > 1) {
    elements /= static_cast<double>(layout.ep);
    shards = std::max(1.0, shards / static_cast<double>(layout.ep));
  }
  if (parameter.shape.size() > 1) elements /= static_cast<double>(layout.tp);
  const double states = config.training.optimizer == "adamw" ? 2 : config.training.momentum > 0 ? 1 : 0;
  return sizeof(float) * elements * (1 + (1 + states) / shards);
}

double state_bytes(const std::vector<models::ParameterShape>& parameters, const train::TrainConfig& config) {
  double bytes = 0;
  for (const models::ParameterShape& parameter : parameters) bytes += state_bytes(parameter, config);
  return bytes;
}

// By stage: the most microbatches between forward and backward at once.
std::vector<double> kept_microbatches(const schedule::Schedule& schedule) {
  std::vector<double> now(static_cast<std::size_t>(schedule.stages().stages()), 0), most = now;
  for (const schedule::Row& row : schedule.rows())
    for (const schedule::Slot slot : row)
      for (const schedule::Action& action : slot) {
        if (!is_compute(action.kind())) continue;
        const auto stage = static_cast<std::size_t>(action.stage());
        if (action.kind() == schedule::ActionKind::Forward) {
          most[stage] = std::max(most[stage], ++now[stage]);
        } else if (action.kind() != schedule::ActionKind::BackwardInput) {
          --now[stage];  // B, or W after I: the weight gradient is the last use
        }
      }
  return most;
}

class PartitionPlanner {
 public:
  PartitionPlanner(const train::TrainConfig& config, const PartitionRequest& request)
      : config_(config), request_(request), schedule_(train::configured_schedule(config.layout)) {}

  PartitionPlan make() {
    plan_.model = train::configured_plan(config_.model);
    place_stages();
    fill_layers();
    for (const char* by : {"count", "weight", "cost"}) {
      try {
        plan_.others.push_back(divide(by));
      } catch (const ValueError&) {
        if (by == request_.by) throw;  // otherwise it is only not compared
      }
    }
    const auto same = std::find_if(plan_.others.begin(), plan_.others.end(),
                                   [&](const DividedModel& other) { return other.by == request_.by; });
    plan_.chosen = same != plan_.others.end() ? *same : divide(request_.by);
    require_fit(plan_.chosen);
    return std::move(plan_);
  }

 private:
  void place_stages() {
    plan::PlacedLayers& layers = plan_.layers;
    const schedule::StageMap& map = schedule_.stages();
    layers.ranks = map.ranks();
    if (request_.placement) {
      layers.placement = *request_.placement;
    } else if (map.chains().size() > 1) {
      layers.placement = StagePlacement::Bidirectional;
    } else {
      // With one stage per rank both are the same.
      layers.placement = is_placed(StagePlacement::Loop) ? StagePlacement::Loop : StagePlacement::V;
      if (!is_placed(layers.placement))
        throw ConfigError(describe("layout.schedule", config_.layout.schedule,
                                   "stages in a loop, a V or in both directions", "add --placement"));
    }
    const bool both = layers.placement == StagePlacement::Bidirectional;
    const int of_layout = map.chains().size() > 1 ? map.stages() / 2 : map.stages();
    const int parts = request_.stages > 0 ? request_.stages : both ? layers.ranks : of_layout;
    if (both && parts != layers.ranks)
      throw ConfigError(describe("--stages", fmt::format("{}", parts),
                                 fmt::format("{}, one for each rank and direction", layers.ranks),
                                 "leave it out, or change layout.pp"));
    layers.stages = both ? 2 * parts : parts;
    plan_.stage_to_rank =
        schedule::stage_to_rank(layers.placement, layers.ranks, layers.stages, schedule::PartialLeg::Allow);
  }

  bool is_placed(StagePlacement placement) const {
    const schedule::StageMap& map = schedule_.stages();
    return schedule::stage_to_rank(placement, map.ranks(), map.stages(), schedule::PartialLeg::Allow) ==
           map.stage_to_rank();
  }

  int part_count() const {
    const plan::PlacedLayers& layers = plan_.layers;
    return layers.placement == StagePlacement::Bidirectional ? layers.ranks : layers.stages;
  }

  void fill_layers() {
    const models::ModelPlan& model = plan_.model;
    plan::PlacedLayers& layers = plan_.layers;
    std::optional<CostFile> file;
    if (!request_.costs.empty()) file = read_cost_file(request_.costs);
    plan_.measured = file.has_value();
    costs_ = file ? part_costs(*file, model, request_.costs) : models::estimated_costs(model);
    layers.costs = costs_.blocks;
    layers.ends = {.first = costs_.embed, .last = costs_.head, .may_be_empty = true};
    layers.minimize = request_.minimize;
    layers.limits = request_.limits;
    for (const models::BlockPlan& block : model.blocks)
      layers.bytes.push_back(state_bytes(block.parameters, config_));
    layers.first_bytes = state_bytes(model.embed, config_);
    layers.last_bytes = state_bytes(model.head, config_);
    if (part_count() > 1)
      for (const models::ParameterShape& parameter : model.embed)
        if (std::find(model.tied.begin(), model.tied.end(), parameter.name) != model.tied.end())
          layers.last_bytes += state_bytes(parameter, config_);
    double shared = 0;
    for (const models::SharedParameter& each : model.shared) shared += state_bytes(each.parameter, config_);
    layers.stage_bytes.assign(static_cast<std::size_t>(layers.stages), shared);
    add_activations(file);
  }

  void add_activations(const std::optional<CostFile>& file) {
    plan::PlacedLayers& layers = plan_.layers;
    const auto stages = static_cast<std::size_t>(layers.stages);
    if (!request_.activations.empty()) {
      if (request_.activations.size() != 1 && request_.activations.size() != stages)
        throw ConfigError(describe("--activations", count_of(request_.activations.size(), "value"),
                                   fmt::format("one value, or one for each of {} stages", stages)));
      for (std::size_t i = 0; i < stages; ++i)
        layers.stage_bytes[i] += request_.activations[request_.activations.size() == 1 ? 0 : i];
      plan_.has_activations = true;
      return;
    }
    // Without the schedule of just these stages it is not known how many microbatches they keep.
    if (!file || schedule_.stages().stage_to_rank() != plan_.stage_to_rank) return;
    layers.microbatches = kept_microbatches(schedule_);
    for (const models::BlockPlan& block : plan_.model.blocks)
      layers.kept.push_back(file->blocks.at(block.kind).kept);
    layers.first_kept = file->embed.kept;
    layers.last_kept = file->head.kept;
    for (std::size_t i = 0; i < stages; ++i) {
      const bool is_first = static_cast<int>(i) % part_count() == 0;
      layers.stage_bytes[i] += layers.microbatches[i] * (file->kept_by_stage + (is_first ? 0 : file->border));
    }
    plan_.has_activations = true;
  }

  DividedModel divide(const std::string& by) const {
    DividedModel divided{.by = by};
    if (by == "cost") {
      const plan::PlacedPartition best = best_split();
      for (const plan::LayerRange& range : best.parts)
        divided.parts.push_back(
            {static_cast<int>(divided.parts.size()), part_count(), range.begin, range.end});
      divided.loads = best.loads;
      divided.lower_bound = best.lower_bound;
      divided.is_optimal = best.is_optimal();
      return divided;
    }
    models::PartitionOptions how;
    if (by == "weight") how.balance = models::Balance::Weight;
    if (by == "pattern") how.pattern = config_.model.pattern;
    if (by == "cuts") how.cuts = request_.cuts;
    divided.parts = models::partition_model(plan_.model, part_count(), how);
    std::vector<plan::LayerRange> ranges;
    for (const models::StagePart& part : divided.parts)
      ranges.push_back({static_cast<int>(part.first_block), static_cast<int>(part.end_block)});
    divided.loads = plan::placed_loads(plan_.layers, ranges);
    for (std::size_t rank = 0; rank < divided.loads.rank_bytes.size() && !request_.limits.empty(); ++rank)
      divided.fits = divided.fits && divided.loads.rank_bytes[rank] <= limit_of(rank);
    return divided;
  }

  plan::PlacedPartition best_split() const {
    try {
      return plan::partition_placed(plan_.layers);
    } catch (const ConfigError&) {
      throw;
    } catch (const ValueError& error) {
      throw ConfigError(error.what());  // stages or limits that the user gave
    }
  }

  double limit_of(std::size_t rank) const {
    return request_.limits.size() == 1 ? request_.limits[0] : request_.limits[rank];
  }

  void require_fit(const DividedModel& divided) const {
    if (divided.fits) return;
    for (std::size_t rank = 0; rank < divided.loads.rank_bytes.size(); ++rank)
      if (divided.loads.rank_bytes[rank] > limit_of(rank))
        throw ConfigError(describe(
            fmt::format("partition by {}: memory of rank {}", divided.by, rank),
            format_bytes(static_cast<std::uint64_t>(divided.loads.rank_bytes[rank])),
            fmt::format("at most {}, its limit", format_bytes(static_cast<std::uint64_t>(limit_of(rank)))),
            "divide it with --by cost, which keeps limits, or raise the limit"));
  }

  const train::TrainConfig& config_;
  const PartitionRequest& request_;
  const schedule::Schedule schedule_;
  models::PartCosts costs_;
  PartitionPlan plan_;
};

}  // namespace

PartitionPlan plan_partition(const train::TrainConfig& config, const PartitionRequest& request) {
  return PartitionPlanner(config, request).make();
}

}  // namespace penstock::cli
