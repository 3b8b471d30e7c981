// Predicts what a rank holds for the microbatches in flight, from its program: after every instruction, as
// measure_memory() reads it.
//
//   const Program program = compile_program(executable(schedule), rank);
//   const std::int64_t bytes = peak_of_activations(program, map, {.stages = kept, .border = border});
//
// Besides what stages keep for their backward there are tensors between stages: buffers of receives that were
// posted ahead, inputs and gradients that have arrived and are not used yet, outputs and gradients that are
// being sent. A transfer that was started before a computation is assumed to have ended after it.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/schedule.h"

namespace penstock::train {

struct KeptActivations {
  std::vector<plan::StageMemory> stages;  // by stage; what a forward keeps includes the input of the stage
  std::int64_t border = 0;                // bytes of an activation between two stages
  // Whether the transport tells when something has been sent. Otherwise an output is held until its gradient
  // arrives, and a gradient until the end of the step.
  bool knows_sent = true;
};

std::int64_t peak_of_activations(const Program& program, const schedule::StageMap& map,
                                 const KeptActivations& kept);

}  // namespace penstock::train
