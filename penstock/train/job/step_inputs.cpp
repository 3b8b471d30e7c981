#include "penstock/train/job/step_inputs.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace penstock::train {
namespace {

at::Tensor tokens_as_tensor(const std::vector<std::int64_t>& values, std::int64_t rows, std::int64_t columns,
                            at::Device device) {
  const at::Tensor view = at::from_blob(const_cast<std::int64_t*>(values.data()), {rows, columns}, at::kLong);
  return device.is_cpu() ? view.clone() : view.pin_memory().to(device, /*non_blocking=*/true);
}

}  // namespace

models::StageInputs step_inputs(const TrainConfig& config, const models::TrainableModel& model,
                                const StructureNeeds& needs, const Batch& batch, at::Device device) {
  const auto tensor = [&](const std::vector<std::int64_t>& values) {
    return tokens_as_tensor(values, batch.samples, batch.context, device);
  };
  return model.inputs({.tokens = tensor(batch.tokens),
                       .targets = tensor(batch.targets),
                       .documents = config.data.document_mask ? tensor(batch.documents) : at::Tensor(),
                       .metadata = structure_metadata(needs,
                                                      {.tokens = batch.structure,
                                                       .documents = batch.documents,
                                                       .rows = batch.samples,
                                                       .length = batch.context},
                                                      device)});
}

models::StageInputs blank_step_inputs(const TrainConfig& config, const models::TrainableModel& model,
                                      const StructureNeeds& needs, at::Device device) {
  Batch batch;
  batch.samples = config.layout.microbatch_size;
  batch.context = config.model.context;
  for (auto* values : {&batch.tokens, &batch.targets, &batch.documents})
    values->resize(static_cast<std::size_t>(batch.samples * batch.context));
  if (needs.any()) batch.structure.resize(batch.tokens.size());
  return step_inputs(config, model, needs, batch, device);
}

std::optional<BatchRows> rows_of_microbatch(const RankLayout& layout, const TrainConfig& config) {
  if (config.layout.dp == 1) return std::nullopt;
  const std::int64_t rows = config.layout.microbatch_size;
  return BatchRows{.global = rows * config.layout.dp, .first = rows * layout.dp(), .count = rows};
}

}  // namespace penstock::train
