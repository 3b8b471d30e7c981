// The copies of a model in a pipeline. Most schedules run one; a bidirectional schedule (DualPipe) runs two
// in opposite directions, so that each part of the model is two stages on two ranks.
//
//   const schedule::StageMap& map = schedule.stages();
//   parts_of_model(map)             // 4 of 8 stages in DualPipe on 4 ranks
//   part_of_stage(map, 6)           // 2
//   stages_of_part(map, 2)          // 2 6
//
// Both stages of a part have the same parameters, train on other microbatches and are updated alike. The
// parameters of the first one count in norms.
#pragma once

#include <string>
#include <vector>

#include "penstock/stage_placement.h"
#include "penstock/train/job/layout.h"
#include "penstock/train_config.h"

namespace penstock::train {

// Number of parts that the model is cut into.
int parts_of_model(const schedule::StageMap& map);
// Index of the part that a stage runs.
int part_of_stage(const schedule::StageMap& map, int stage);
// The stages that run a part, one for each copy of the model.
std::vector<int> stages_of_part(const schedule::StageMap& map, int part);
// Whether a stage belongs to the second copy of the model.
bool is_second_copy(const schedule::StageMap& map, int stage);
// Number of copies of the model in the configured schedule.
int copies_of_model(const LayoutConfig& config);

// Throws ConfigError unless the schedule runs one copy of the model, or two whose parts are on two ranks
// each. `name`: of the schedule, for the message.
void check_copies(const schedule::StageMap& map, const std::string& name);

// [collective over the members on first use] The ranks that train a stage on other data, this one included:
// all data-parallel ranks, of both copies.
comm::Group trainers_of(const RankLayout& layout, const schedule::StageMap& map, int stage);

}  // namespace penstock::train
