// The inputs of the stages for a batch, as tensors.
//
//   const models::StageInputs inputs = step_inputs(config, model, needs, batch, device);
//   pipeline.step(inputs.args, inputs.keywords, inputs.target);
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "penstock/step_context.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/job/layout.h"
#include "penstock/train/job/structure_metadata.h"
#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

// `needs`: of the stages of the rank, in whose metadata alone they are interested.
models::StageInputs step_inputs(const TrainConfig& config, const models::TrainableModel& model,
                                const StructureNeeds& needs, const Batch& batch, at::Device device);

// The same for a batch of zeros that is one microbatch of one replica.
models::StageInputs blank_step_inputs(const TrainConfig& config, const models::TrainableModel& model,
                                      const StructureNeeds& needs, at::Device device);

// The rows of a microbatch that a rank works on; nothing if it works on all of them.
std::optional<BatchRows> rows_of_microbatch(const RankLayout& layout, const TrainConfig& config);

}  // namespace penstock::train
