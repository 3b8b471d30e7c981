#include "penstock/train/job/replica_gradient_sync.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace penstock::train {

namespace {

// One part per stage, in the order of stages.stages(), and the shared parameters.
std::vector<ReplicaGradients::Part> parts_of(const ModelStages& stages, bool experts) {
  std::vector<ReplicaGradients::Part> parts;
  for (const PipelineStage& stage : stages.stages()) {
    ReplicaGradients::Part& part = parts.emplace_back();
    part.name = fmt::format("stage {}", stage.index());
    for (const optim::NamedParameter& parameter : stages.parameters_of(stage.index()))
      if (!stages.shared().is_shared(parameter.tensor) && is_divided_expert(parameter.tensor) == experts)
        part.parameters.push_back(parameter);
  }
  if (experts) return parts;
  // Complete only after all uses, which is after the last stage.
  ReplicaGradients::Part& shared = parts.emplace_back();
  shared.name = "shared parameters";
  for (const optim::NamedParameter& parameter : stages.parameters())
    if (stages.shared().is_shared(parameter.tensor)) shared.parameters.push_back(parameter);
  return parts;
}

}  // namespace

ReplicaGradientSync::ReplicaGradientSync(const RankLayout& layout, ModelStages& stages, bool overlap)
    : stages_(stages), overlap_(overlap) {
  if (!layout.is_sharded() && layout.dp_size() > 1) {
    copies_.emplace(layout.copies(), parts_of(stages, /*experts=*/false));
    // The gradient of a divided expert already has the terms of the ranks that send it rows.
    if (layout.ep_size() > 1)
      experts_.emplace(layout.expert_copies(), parts_of(stages, /*experts=*/true), layout.dp_size());
    for (const PipelineStage& stage : stages.stages()) {
      const std::size_t part = part_of_.size();
      part_of_[stage.index()] = part;
    }
  }
}

void ReplicaGradientSync::stage_done(int stage) {
  if (!overlap_) return;
  if (copies_) copies_->begin(part_of_.at(stage));
  if (experts_) experts_->begin(part_of_.at(stage));
}

std::int64_t ReplicaGradientSync::buffer_bytes() const {
  return (copies_ ? copies_->buffer_bytes() : 0) + (experts_ ? experts_->buffer_bytes() : 0);
}

void ReplicaGradientSync::finish() {
  const at::NoGradGuard no_grad;
  stages_.shared().sum_gradients();
  if (copies_) copies_->finish();
  if (experts_) experts_->finish();
}

}  // namespace penstock::train
