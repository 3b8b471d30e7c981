#include "penstock/train/job/stage_copies.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/train/job/model_stages.h"

namespace penstock::train {

int parts_of_model(const schedule::StageMap& map) { return map.chains().front().stages; }

int part_of_stage(const schedule::StageMap& map, int stage) {
  return stage - map.chain_of(stage).first_stage;
}

std::vector<int> stages_of_part(const schedule::StageMap& map, int part) {
  std::vector<int> stages;
  for (const schedule::Chain& chain : map.chains()) stages.push_back(chain.first_stage + part);
  return stages;
}

bool is_second_copy(const schedule::StageMap& map, int stage) { return stage >= parts_of_model(map); }

int copies_of_model(const LayoutConfig& config) {
  return static_cast<int>(configured_schedule(config).stages().chains().size());
}

void check_copies(const schedule::StageMap& map, const std::string& name) {
  if (map.chains().size() == 1) return;
  const auto refuse = [&](const std::string& what) {
    throw ConfigError(describe("layout.schedule", fmt::format("{}, {}", name, what),
                               "one copy of the model, or two with each part on two ranks",
                               "use the name of a schedule, such as DualPipe"));
  };
  if (map.chains().size() > 2) refuse(fmt::format("which has {} copies of the model", map.chains().size()));
  if (map.chains()[1].stages != map.chains()[0].stages)
    refuse(fmt::format("whose copies of the model have {} and {} stages", map.chains()[0].stages,
                       map.chains()[1].stages));
  for (int part = 0; part < parts_of_model(map); ++part) {
    const std::vector<int> stages = stages_of_part(map, part);
    if (map.rank_of(stages[0]) == map.rank_of(stages[1]))
      refuse(fmt::format("which has both copies of part {} on rank {}", part, map.rank_of(stages[0])));
  }
}

comm::Group trainers_of(const RankLayout& layout, const schedule::StageMap& map, int stage) {
  const std::vector<int> stages = stages_of_part(map, part_of_stage(map, stage));
  if (stages.size() == 1) return layout.copies();
  const std::vector<int> pipeline = layout.pipeline_ranks();
  std::vector<int> replicas{layout.world().rank()};
  if (layout.dp_size() > 1) replicas = layout.copies().ranks();
  std::vector<int> ranks;
  for (const int each : stages)
    for (const int replica : replicas)
      // Ranks of a pipeline have the same distances in all replicas.
      ranks.push_back(replica + pipeline[static_cast<std::size_t>(map.rank_of(each))] -
                      pipeline[static_cast<std::size_t>(layout.pp())]);
  std::sort(ranks.begin(), ranks.end());
  return layout.world().group_of(
      ranks, {.purpose = "copies of a stage", .p2p = comm::P2PTransport::Auto, .timeout = {}});
}

}  // namespace penstock::train
