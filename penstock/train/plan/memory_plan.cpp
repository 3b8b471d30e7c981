#include "penstock/train/plan/memory_plan.h"

#include <algorithm>
#include <map>
#include <string>

#include "penstock/models/plan/element_count.h"
#include "penstock/models/plan/parameter_stages.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/train/job/stage_copies.h"

namespace penstock::train {

namespace {

constexpr std::int64_t kAlignment = 64;  // of parameters in gathered memory

struct Sizes {
  std::int64_t whole = 0;  // of this rank's experts and tensor-parallel part
  std::int64_t shard = 0;  // with padding: all ranks have as much as the first rank
};

// Experts are divided over layout.ep ranks, and only the others of layout.shard share what is left, along the
// next dim.
Sizes sizes_of(const models::ParameterShape& parameter, const LayoutConfig& layout) {
  std::vector<std::int64_t> shape = parameter.shape;
  std::int64_t ranks = layout.shard;
  std::size_t cut = 0;
  if (parameter.per_expert && layout.ep > 1) {
    shape.at(0) /= layout.ep;
    ranks = std::max<std::int64_t>(1, layout.shard / layout.ep);
    cut = 1;
  }
  const auto bytes = [&] {
    std::int64_t elements = 1;
    for (const std::int64_t size : shape) elements *= size;
    if (shape.size() > 1)
      elements = (elements + layout.tp - 1) / layout.tp;  // all parameters except norms are split
    return elements * static_cast<std::int64_t>(sizeof(float));
  };
  const std::int64_t whole = bytes();
  shape.at(cut) = (shape.at(cut) + ranks - 1) / ranks;
  return {whole, bytes()};
}

// A group that is gathered at once: a block, or everything outside the blocks.
std::string group_of(const std::string& name) {
  constexpr std::size_t kPrefix = 7;  // "blocks."
  return name.starts_with("blocks.") ? name.substr(0, name.find('.', kPrefix)) : std::string();
}

// Gathered parameters of the stages, following the actions of the schedule.
class GatheredPeaks {
 public:
  void add(int stage, const std::string& group, std::int64_t bytes) {
    stages_[stage][group] += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // While a group is being assembled it exists twice: as received and as used.
  std::int64_t of(const schedule::Row& row, const std::vector<int>& stages) const {
    std::int64_t now = 0, peak = 0;
    bool driven = false;
    for (const schedule::Slot slot : row)
      for (const schedule::Action& action : slot) {
        if (action.kind() == schedule::ActionKind::Unshard) {
          driven = true;
          now += whole(action.stage());
          peak = std::max(peak, now + largest(action.stage()));
        } else if (action.kind() == schedule::ActionKind::Reshard) {
          now -= whole(action.stage());
        }
      }
    if (driven) return peak;
    // In a schedule without gather actions, what is gathered on first use stays until the end of the step.
    std::int64_t twice = 0;
    for (const int stage : stages) {
      peak += whole(stage);
      twice = std::max(twice, largest(stage));
    }
    return peak + twice;
  }

 private:
  std::int64_t whole(int stage) const {
    std::int64_t bytes = 0;
    for (const auto& [name, each] : groups(stage)) bytes += each;
    return bytes;
  }
  std::int64_t largest(int stage) const {
    std::int64_t bytes = 0;
    for (const auto& [name, each] : groups(stage)) bytes = std::max(bytes, each);
    return bytes;
  }
  const std::map<std::string, std::int64_t>& groups(int stage) const {
    static const std::map<std::string, std::int64_t> none;
    const auto found = stages_.find(stage);
    return found == stages_.end() ? none : found->second;
  }

  std::map<int, std::map<std::string, std::int64_t>> stages_;
};

}  // namespace

std::vector<RankMemory> plan_memory(const TrainConfig& config, const models::ModelPlan& plan,
                                    const schedule::Schedule& schedule,
                                    const std::vector<models::StagePart>& parts,
                                    const plan::Simulation& simulation, const KeptActivations& kept) {
  const schedule::StageMap& map = schedule.stages();
  const bool sharded = config.layout.shard > 1;
  const auto has_copies = [&](const models::ParameterShape& parameter) {
    return config.layout.dp > (parameter.per_expert ? config.layout.ep : 1);
  };
  const std::int64_t states = config.training.optimizer == "adamw" ? 2 : config.training.momentum > 0 ? 1 : 0;
  const bool sets_aside = config.training.accumulation > 1 && map.chains().size() > 1;
  std::vector<RankMemory> memory(static_cast<std::size_t>(map.ranks()));
  GatheredPeaks gathered;
  const models::ParameterStages stages_of(parts, plan);
  for (const models::ParameterShape& parameter : models::parameter_shapes(plan)) {
    const Sizes size = sizes_of(parameter, config.layout);
    std::vector<int> ranks;
    for (const int part : stages_of.of(parameter.name))
      for (const int stage : stages_of_part(map, part)) {
        ranks.push_back(map.rank_of(stage));
        gathered.add(stage, group_of(parameter.name), size.whole);
      }
    // Both uses of a tied weight accumulate their own gradient, even if they share memory and are on one
    // stage; a sharded weight of one stage has one.
    if (!sharded && models::is_tied(plan, parameter.name) && ranks.size() == 1)
      ranks.push_back(ranks.front());
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      RankMemory& rank = memory[static_cast<std::size_t>(ranks[i])];
      const auto before = std::count(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(i), ranks[i]);
      // Unsharded gradients accumulate over the microbatches. Those of several uses are one before
      // replicas exchange copies, of which there are two then; shards are made from unsharded gradients group
      // by group, and coexist with those of a further run of the schedule.
      rank.gradients += size.whole;
      if (sharded && config.training.accumulation > 1) rank.gradients += size.shard;
      // The copies of a bidirectional schedule sum the gradients of a run apart from those of earlier runs.
      if (!sharded && sets_aside)
        rank.gradients += size.whole;
      else if (!sharded && has_copies(parameter))
        rank.gradients += before == 0 ? size.whole : before == 1 ? -size.whole : 0;
      if (before == 0 || sharded)
        rank.parameters += size.shard;  // two stages can share memory, but not shards
      if (before > 0) continue;
      rank.optimizer += size.shard * states;
    }
  }
  const schedule::Schedule lowered = executable(schedule, sharded);
  for (int rank = 0; rank < map.ranks(); ++rank) {
    RankMemory& of = memory[static_cast<std::size_t>(rank)];
    if (sharded) of.gathered = gathered.of(lowered.row(rank), map.stages_of(rank));
    of.activations = peak_of_activations(compile_program(lowered, rank), map, kept);
    of.live = simulation.ranks[static_cast<std::size_t>(rank)].peak_activations;
  }
  return memory;
}

}  // namespace penstock::train
