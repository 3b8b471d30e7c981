#include "penstock/train/job/replica_gradient_sync.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "penstock/comm/group/agreement.h"
#include "penstock/dtensor/tensor/layout_text.h"
#include "penstock/gradients.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock::train {

namespace {

at::Tensor local_gradient(const at::Tensor& parameter) {
  return local_if_distributed(parameter.grad(), kDetach);
}

// Adds the gradient of the rank that has the weight's other use. A gradient that both lack stays undefined.
void add_over(const comm::Group& pair, const at::Tensor& weight) {
  at::Tensor& gradient = weight.mutable_grad();
  const bool present = gradient.defined();
  if (!present) gradient = at::zeros_like(weight.detach(), at::MemoryFormat::Preserve);
  const at::Tensor local = local_gradient(weight);
  const at::Tensor mark = at::full({1}, present ? 1.0 : 0.0, local.options());
  pair.all_reduce(mark, comm::ReduceOp::Sum, {.label = "uses of the tied weight", .timeout = {}}).wait();
  at::Tensor sum = local.contiguous();
  pair.all_reduce(sum, comm::ReduceOp::Sum, {.label = "gradient of the tied weight", .timeout = {}}).wait();
  if (!sum.is_same(local)) local.copy_(sum);
  // A rank that has a gradient itself need not wait for the device to know that there is one.
  if (!present && mark.item<double>() == 0) gradient.reset();
}

// One part per stage, in the order of stages.stages(), and the tied weight.
std::vector<ReplicaGradients::Part> parts_of(const ModelStages& stages, bool experts) {
  std::vector<ReplicaGradients::Part> parts;
  for (const PipelineStage& stage : stages.stages()) {
    ReplicaGradients::Part& part = parts.emplace_back();
    part.name = fmt::format("stage {}", stage.index());
    for (const optim::NamedParameter& parameter : stages.parameters_of(stage.index()))
      if (!stages.is_tied(parameter.tensor) && is_divided_expert(parameter.tensor) == experts)
        part.parameters.push_back(parameter);
  }
  if (experts) return parts;
  // Complete only after both uses, which is after the last stage.
  ReplicaGradients::Part& tied = parts.emplace_back();
  tied.name = "tied weight";
  for (const optim::NamedParameter& parameter : stages.parameters())
    if (stages.is_tied(parameter.tensor)) tied.parameters.push_back(parameter);
  return parts;
}

}  // namespace

ReplicaGradientSync::ReplicaGradientSync(const RankLayout& layout, const ModelStages& stages, bool overlap)
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
  if (const int peer = stages.tied().peer; peer >= 0) {
    std::vector<int> pair = {layout.world().rank(), layout.pipeline_ranks()[static_cast<std::size_t>(peer)]};
    std::sort(pair.begin(), pair.end());
    tied_group_ = layout.world().group_of(
        pair, {.purpose = "tied weight", .p2p = comm::P2PTransport::Auto, .timeout = {}});
    comm::require_agreement(*tied_group_, "the two uses of a tied weight",
                            {layout_text("embed.weight", stages.tied().embed.defined() ? stages.tied().embed
                                                                                       : stages.tied().head)},
                            "build the first and the last stage from one configuration, with the weight "
                            "frozen on both or on neither");
  }
}

void ReplicaGradientSync::stage_done(int stage) {
  if (!overlap_) return;
  if (copies_) copies_->begin(part_of_.at(stage));
  if (experts_) experts_->begin(part_of_.at(stage));
}

void ReplicaGradientSync::add_tied() {
  const ModelStages::TiedWeight& tied = stages_.tied();
  if (tied.embed.defined() && tied.head.defined()) {
    optim::settle_gradients({{"embed.weight", tied.embed}, {"head.weight", tied.head}});
    at::Tensor &embed = tied.embed.mutable_grad(), &head = tied.head.mutable_grad();
    if (embed.defined() && head.defined())
      local_gradient(tied.embed).add_(local_gradient(tied.head));
    else if (head.defined())
      embed = head;
    head.reset();
  } else if (tied_group_) {
    const at::Tensor own = tied.embed.defined() ? tied.embed : tied.head;
    optim::settle_gradients({{"embed.weight", own}});
    add_over(*tied_group_, own);
  }
}

std::int64_t ReplicaGradientSync::buffer_bytes() const {
  return (copies_ ? copies_->buffer_bytes() : 0) + (experts_ ? experts_->buffer_bytes() : 0);
}

void ReplicaGradientSync::finish() {
  const at::NoGradGuard no_grad;
  add_tied();
  if (copies_) copies_->finish();
  if (experts_) experts_->finish();
}

}  // namespace penstock::train
