// Describes how a front end cut a model into stages, so that the runtime can check it against its schedule.
//
//   PipelineOptions options{world};
//   options.info = PipeInfo{.description = graph_text, .stages = 4, .has_loss_and_backward = true};
//   PipelineRuntime pipeline(stages, schedule, loss, options);          // throws if they do not match
#pragma once

#include <string>

#include "penstock/schedule.h"

namespace penstock {

struct PipeInfo {
  std::string description;             // the outer graph, or a description of the cuts; quoted in errors
  int stages = 0;                      // parts of the model; a bidirectional pipeline runs each part twice
  bool has_loss_and_backward = false;  // cut for training
};

// Throws ValueError, with a remedy, if the schedule has another number of stages, if the model was cut for
// training and the schedule has no backward or the pipeline no loss, or if the model was cut without a loss
// and the pipeline has one.
void check_pipe_info(const PipeInfo& info, const schedule::Schedule& schedule, bool has_loss);

}  // namespace penstock
