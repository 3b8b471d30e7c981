// What a front end that cuts a model into stages knows about the result, for the runtime to compare with its schedule.
//
//   PipelineOptions options{world};
//   options.info = PipeInfo{.description = graph_text, .stages = 4, .has_loss_and_backward = true};
//   PipelineRuntime pipeline(stages, schedule, loss, options);          // throws where the two do not fit
#pragma once

#include <string>

#include "penstock/schedule.h"

namespace penstock {

struct PipeInfo {
  std::string description;             // the outer graph, or in words what was cut where; quoted in errors
  int stages = 0;                      // parts of the model; a bidirectional pipeline runs each part twice
  bool has_loss_and_backward = false;  // cut for training
};

// Throws ValueError, which says what to change, for a schedule of another number of stages, for one without backward or a pipeline
// without a loss where the model was cut for training, and for a loss where it was cut without.
void check_pipe_info(const PipeInfo& info, const schedule::Schedule& schedule, bool has_loss);

}  // namespace penstock
