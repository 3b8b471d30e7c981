#include "penstock/shard/state/group_reduction.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"
#include "penstock/shard/pieces/piece_copy.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/timed_part.h"
#include "penstock/torch/compat/streams.h"

namespace penstock {

GroupReduction::GroupReduction(ShardGroup& group)
    : group_(&group),
      op_(group.gradient_divide_factor ? comm::ReduceOp::Sum : comm::ReduceOp::Avg),
      all_reduce_(group.flags.all_reduce) {
  stream_ = group.context().reduce_stream(group.device());
  auto& parameters = group.mutable_parameters();
  const auto wanted = group.options().mixed_precision.reduce_dtype;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ShardedParameter& p = parameters[i];
    const at::Tensor parameter = p.parameter();
    if (!parameter.defined() || !parameter.requires_grad()) continue;
    // The same on every rank, with or without a gradient.
    const at::ScalarType dtype = wanted.value_or(p.compute_dtype);
    auto bucket =
        std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& b) { return b.dtype == dtype; });
    if (bucket == buckets_.end()) {
      buckets_.emplace_back();
      bucket = buckets_.end() - 1;
      bucket->dtype = dtype;
    }
    bucket->parameters.push_back(i);
    bucket->offsets.push_back(bucket->width);
    bucket->width += p.layout().padded_numel();
  }
  for (Bucket& bucket : buckets_) start(bucket);
}

void GroupReduction::start(Bucket& bucket) {
  auto& parameters = group_->mutable_parameters();
  const ShardMesh& mesh = group_->mesh();
  const auto marks = static_cast<std::int64_t>(bucket.parameters.size());
  std::optional<TimedPart> timed(std::in_place, group_->times(), &ShardTimes::copy);
  bucket.rows =
      group_->pool().empty({mesh.shard_ranks(), bucket.width + marks}, bucket.dtype, group_->device());
  for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
    ShardedParameter& p = parameters[bucket.parameters[k]];
    at::Tensor gradient = std::move(p.gradient);
    p.gradient.reset();
    // These were scaled so that their average is the gradient of the whole batch (local_gradient); here the
    // sum must be.
    if (gradient.defined() && group_->gradient_divide_factor && !p.placement.data_axes.empty())
      gradient = gradient / static_cast<double>(mesh.shard_ranks() * mesh.replicas());
    p.gradient_owned = false;
    bucket.present.push_back(gradient.defined());
    if (gradient.defined())
      split_pieces(gradient, p.layout(), bucket.rows, bucket.offsets[k]);
    else
      bucket.rows.narrow(1, bucket.offsets[k], p.layout().padded_numel()).zero_();
  }
  const at::Tensor places = bucket.rows.narrow(1, bucket.width, marks);
  places.fill_(1);
  for (std::size_t k = 0; k < bucket.present.size(); ++k)
    if (!bucket.present[k]) places.select(1, static_cast<std::int64_t>(k)).zero_();
  // From here on the rows are read on that stream.
  if (stream_) bucket.rows.record_stream(*stream_);
  const SideStreamScope beside(stream_);
  if (mesh.shard_ranks() == 1) {
    bucket.reduced = bucket.rows.select(0, 0);
    return;
  }
  timed.emplace(group_->times(), &ShardTimes::reduce);
  bucket.reduced = group_->pool().empty({bucket.width + marks}, bucket.dtype, group_->device());
  bucket.work = mesh.reduce_group().reduce_scatter(bucket.reduced, bucket.rows.view({-1}), op_,
                                                   {.label = fmt::format("reduce {}", group_->name())});
}

void GroupReduction::wait_for_shards() {
  if (shards_done_) return;
  shards_done_ = true;
  const TimedPart timed(group_->times(), &ShardTimes::reduce);
  const at::NoGradGuard no_grad;
  const SideStreamScope beside(stream_);
  const ShardMesh& mesh = group_->mesh();
  const bool replicas = mesh.replicas() > 1;
  auto& partial = group_->partial_reductions;
  for (Bucket& bucket : buckets_) {
    bucket.work.wait();
    bucket.work = {};
    if (mesh.shard_ranks() > 1) bucket.rows.reset();
  }
  if (!replicas) return;
  if (!partial.empty()) {
    PENSTOCK_INVARIANT(partial.size() == buckets_.size(), "accumulated reductions must have the same dtypes");
    for (std::size_t i = 0; i < buckets_.size(); ++i) buckets_[i].reduced.add_(partial[i]);
    partial.clear();
  }
  if (!all_reduce_) {
    kept_ = true;
    for (const Bucket& bucket : buckets_) partial.push_back(bucket.reduced);
    return;
  }
  for (Bucket& bucket : buckets_)
    bucket.work = mesh.replicate_group().all_reduce(
        bucket.reduced, op_, {.label = fmt::format("reduce {} over replicas", group_->name())});
}

void GroupReduction::finish() {
  if (finished_) return;
  wait_for_shards();
  finished_ = true;
  const at::NoGradGuard no_grad;
  if (stream_) computing_ = current_stream(stream_->device());
  const SideStreamScope beside(stream_);
  const bool to_cpu = group_->options().offload.to_cpu && group_->device().is_cuda();
  for (Bucket& bucket : buckets_) {
    {
      const TimedPart timed(group_->times(), &ShardTimes::reduce);
      bucket.work.wait();
    }
    if (kept_) continue;
    const TimedPart timed(group_->times(), &ShardTimes::copy);
    divide(bucket);
    if (to_cpu)
      start_copy(bucket);
    else
      write(bucket);
  }
}

void GroupReduction::divide(Bucket& bucket) const {
  if (group_->gradient_divide_factor)
    bucket.reduced.narrow(0, 0, bucket.width).div_(*group_->gradient_divide_factor);
}

void GroupReduction::start_copy(Bucket& bucket) {
  const at::Tensor source = bucket.reduced;
  const c10::Stream main = current_stream(source.device());
  if (!copies_) copies_ = side_stream(source.device());
  order_after(*copies_, main);
  {
    const c10::StreamGuard guard(*copies_);
    bucket.reduced = at::empty(
        source.sizes(),
        at::TensorOptions(source.scalar_type()).pinned_memory(group_->options().offload.pin_memory));
    bucket.reduced.copy_(source, /*non_blocking=*/true);
  }
  source.record_stream(*copies_);
}

void GroupReduction::settle() {
  if (!copies_) return;
  const TimedPart timed(group_->times(), &ShardTimes::copy);
  copies_->synchronize();
  copies_.reset();
  const at::NoGradGuard no_grad;
  for (const Bucket& bucket : buckets_) write(bucket);
}

void GroupReduction::write(const Bucket& bucket) const {
  auto& parameters = group_->mutable_parameters();
  const int rank = group_->mesh().shard_rank();
  const at::Tensor values = bucket.reduced.narrow(0, 0, bucket.width);
  // Only a rank without a gradient has to read the presence numbers, since that may synchronize with the
  // device.
  at::Tensor marks;
  if (std::find(bucket.present.begin(), bucket.present.end(), false) != bucket.present.end())
    marks = bucket.reduced.narrow(0, bucket.width, static_cast<std::int64_t>(bucket.parameters.size()))
                .to(at::kCPU, at::kFloat)
                .contiguous();
  at::ScalarType cast_to = bucket.dtype;
  at::Tensor cast = values;
  for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
    ShardedParameter& p = parameters[bucket.parameters[k]];
    const at::Tensor parameter = p.parameter();
    if (!parameter.defined()) continue;
    if (!bucket.present[k] && marks.data_ptr<float>()[k] == 0) continue;
    if (cast_to != p.dtype || cast.device() != p.padded.device()) {
      cast_to = p.dtype;
      cast = group_->pool().empty({bucket.width}, p.dtype, p.padded.device());
      cast.copy_(values);
    }
    if (stream_ && !cast.device().is_cpu()) cast.record_stream(*computing_);  // which will read the gradient
    const at::Tensor local =
        cast.narrow(0, bucket.offsets[k], p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank));
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) {
      grad = detail::make_dtensor(local, p.placement.sharded, p.placement.mesh);
      continue;
    }
    const detail::DTensorPayload* before = detail::dtensor_payload(grad);
    if (!before || before->spec != p.placement.sharded)
      throw StateError(describe(fmt::format("the existing gradient of parameter '{}'", p.name),
                                before ? describe_dtensor(grad) : "a plain tensor",
                                "a gradient sharded like the parameter", "call zero_grad() before backward"));
    before->local().add_(local);
  }
}

}  // namespace penstock
