// Gradients of a group between autograd and the reduction: whole, on this rank, accumulated.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/shard/state/group_internal.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/shard_group.h"

namespace penstock {

using detail::local_of;
using detail::NoHooksOrGradScope;

namespace {

// Whether nobody else can write the memory of a gradient that autograd passes to `take`. Besides the
// argument, the engine holds it in the list of inputs of the accumulator, which it does not use again.
bool is_only_here(const at::Tensor& gradient) {
  return !is_dtensor(gradient) && gradient.layout() == at::kStrided && gradient.has_storage() &&
         gradient.is_non_overlapping_and_dense() && gradient.use_count() <= 2 &&
         gradient.storage().use_count() == 1;
}

}  // namespace

at::Tensor ShardGroup::local_gradient(const ShardedParameter& p, const at::Tensor& gradient) const {
  const at::Tensor detached = gradient.detach();
  if (!p.placement.original) {
    if (is_dtensor(detached))
      throw TypeError(describe(
          fmt::format("the gradient of parameter '{}'", p.name), describe_dtensor(detached),
          "a plain tensor, like the parameter",
          "distribute the parameter (distribute_parameter) before fully_shard, or pass plain inputs"));
    return detached;
  }
  if (!is_dtensor(detached))
    throw TypeError(describe(fmt::format("the gradient of the distributed parameter '{}'", p.name),
                             "a plain tensor", "a distributed one"));
  Placements wanted = p.placement.original->placements();
  const Placements& has = placements_of(detached);
  if (!(mesh_of(detached) == *p.placement.original_mesh))
    throw ValueError(describe(
        fmt::format("the gradient of the distributed parameter '{}'", p.name), describe_dtensor(detached),
        fmt::format("one on {}, like the parameter", p.placement.original_mesh->mesh().to_string()),
        "redistribute or rebuild it on the mesh of the parameter"));
  // Along each data-parallel axis a gradient is either one term of a sum over the ranks of that axis, which
  // the reduction adds up, or the whole gradient on every rank (at the latest after the redistribution). The
  // reduction averages over all these ranks regardless of the axis. That is correct for whole gradients;
  // terms are multiplied by the number of ranks that it divides by, counting only the axes that have terms.
  double terms = 1;
  for (const int axis : p.placement.data_axes) {
    const auto at = static_cast<std::size_t>(axis);
    if (!has[at].is_partial(PartialOp::Sum)) continue;
    wanted[at] = has[at];
    terms *= static_cast<double>(p.placement.original_mesh->shape()[at]);
  }
  at::Tensor local = local_of(has == wanted ? detached : redistribute(detached, wanted));
  return terms == 1 ? local : local * terms;
}

void ShardGroup::take(std::size_t slot, at::Tensor gradient) {
  const NoHooksOrGradScope quiet;
  context().note_backward();
  ShardedParameter& p = parameters_[slot];
  // A gradient that is not reduced now is kept beyond this backward, and its memory may belong to the caller.
  const bool only_here = is_only_here(gradient);
  at::Tensor local = local_gradient(p, gradient);
  gradient.reset();
  if (!p.gradient.defined()) {
    const bool copies = !flags.reduce && !only_here;
    p.gradient = copies ? local.clone() : std::move(local);
    p.gradient_owned = copies;
  } else if (p.gradient_owned) {
    p.gradient.add_(local);
  } else {
    p.gradient = p.gradient + local;
    p.gradient_owned = true;
  }
  p.arrived = true;
  // Waits only for parameters that a live graph can still reach: one that an earlier step used and this one
  // does not is in none.
  const bool complete = std::all_of(parameters_.begin(), parameters_.end(), [](const ShardedParameter& q) {
    if (q.arrived) return true;
    const at::Tensor parameter = q.parameter();
    return !parameter.defined() || !parameter.requires_grad() || !awaits_gradient(parameter);
  });
  if (complete) post_backward();
}

void ShardGroup::post_backward() {
  const NoHooksOrGradScope quiet;
  for (ShardedParameter& p : parameters_) {
    p.arrived = false;
    // A whole gradient that was set on the parameter itself.
    const at::Tensor parameter = p.parameter();
    if (!parameter.defined()) continue;
    at::Tensor& own = parameter.mutable_grad();
    if (!own.defined()) continue;
    if (p.placement.original) {
      const detail::DTensorPayload* payload = detail::dtensor_payload(own);
      const bool reduced = payload && payload->spec->mesh_id() == p.placement.sharded->mesh_id() &&
                           payload->spec->placements() == p.placement.sharded->placements();
      if (reduced || !payload || payload->spec->mesh_id() != p.placement.original->mesh_id()) continue;
      const at::Tensor local = local_gradient(p, own);
      p.gradient = p.gradient.defined() ? p.gradient + local : local;
      p.gradient_owned = false;
      own.reset();
    } else if (!is_dtensor(own)) {
      if (own.sizes() != c10::IntArrayRef(p.layout().shape()))
        throw ValueError(describe(fmt::format("grad() of parameter '{}'", p.name),
                                  fmt::format("[{}]", fmt::join(own.sizes(), ", ")),
                                  fmt::format("[{}]", fmt::join(p.layout().shape(), ", "))));
      p.gradient = p.gradient.defined() ? p.gradient + own : own;
      p.gradient_owned = false;
      own.reset();
    }
  }
  context().note_settled(*this);
  if (flags.reshard && !writable()) reshard();
  if (flags.reduce) {
    context().ready_to_reduce(*this);
    return;
  }
  // Kept whole, in the dtype used for sums.
  if (const auto dtype = options_.mixed_precision.reduce_dtype)
    for (ShardedParameter& p : parameters_)
      if (p.gradient.defined() && p.gradient.scalar_type() != *dtype &&
          at::isFloatingType(p.gradient.scalar_type())) {
        p.gradient = p.gradient.to(*dtype);
        p.gradient_owned = true;
      }
}

void ShardGroup::discard_gradients() {
  for (ShardedParameter& p : parameters_) {
    p.gradient.reset();
    p.gradient_owned = p.arrived = false;
  }
  recorded_ = false;
}

bool ShardGroup::has_unprocessed_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const ShardedParameter& p) { return p.arrived; });
}

bool ShardGroup::has_trainable() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const ShardedParameter& p) {
    const at::Tensor parameter = p.parameter();
    return parameter.defined() && parameter.requires_grad();
  });
}

}  // namespace penstock
