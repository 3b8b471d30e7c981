// Parameters whose data was replaced from outside, by set_data or Module::to: adopted at the next use.
//
// LibTorch replaces the data of a tensor without an operator that could be intercepted, but first checks
// whether the kinds of both are compatible, and that check is an operator (trigger.cpp). The parameter stays
// marked, so its next use is intercepted as usual.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/spec.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/shard/pieces/piece_copy.h"
#include "penstock/shard/state/group_internal.h"
#include "penstock/shard/state/registry.h"
#include "penstock/shard/state/shard_group.h"
#include "penstock/torch/compat/cpu_bfloat16.h"
#include "penstock/torch/compat/dtype.h"
#include "penstock/torch/dispatch/switch_data.h"

namespace penstock {

using detail::NoHooksOrGradScope;

void detail::copy_part(const at::Tensor& whole, const DTensorSpec& spec, const at::Tensor& local) {
  for (const ShardBox& box :
       local_boxes(spec.shape(), spec.mesh_shape(), spec.coordinate(), spec.placements())) {
    at::Tensor from = whole, to = local;
    for (std::size_t d = 0; d < box.shape.size(); ++d) {
      from = from.narrow(static_cast<std::int64_t>(d), box.offset[d], box.shape[d]);
      to = to.narrow(static_cast<std::int64_t>(d), box.local_offset[d], box.shape[d]);
    }
    to.copy_(from);
  }
}

namespace {

bool lies_as(const detail::DTensorPayload& payload, const DTensorSpec& spec) {
  return payload.spec->mesh_id() == spec.mesh_id() && payload.spec->placements() == spec.placements();
}

SpecPtr with_dtype(const SpecPtr& spec, at::ScalarType dtype) {
  GlobalGeometry geometry = spec->geometry();
  geometry.dtype = dtype;
  return DTensorSpec::get(*spec, spec->placements(), geometry);
}

}  // namespace

void ShardGroup::note_replaced(std::size_t slot, const at::Tensor& data) {
  ShardedParameter& p = parameters_[slot];
  const bool is_cast = p.cast && p.cast->result._unsafe_get_target() == data.unsafeGetTensorImpl() &&
                       !data.is_inference() && p.cast->version == data._version();
  p.recast = is_cast ? std::optional(p.cast->dtype) : std::nullopt;
  p.cast.reset();
  if (p.replaced) return;
  p.replaced = replaced_ = true;
  detail::count_replacements(1);
}

void ShardGroup::note_cast(std::size_t slot, const at::Tensor& result, std::optional<at::ScalarType> dtype) {
  ShardedParameter& p = parameters_[slot];
  // If exact, a gathered parameter has exactly the values of its shard.
  const bool exact = p.dtype == p.compute_dtype && !p.extension;
  if (exact || result.is_inference() || result.device() != device_) return;
  p.cast = ShardedParameter::Cast{c10::weak_intrusive_ptr<c10::TensorImpl>(result.getIntrusivePtr()),
                                  static_cast<std::uint32_t>(result._version()), dtype.value_or(p.dtype)};
}

at::Tensor ShardGroup::own_shard(const ShardedParameter& p) const {
  const int rank = mesh_.shard_rank();
  return p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank));
}

bool ShardGroup::holds_own_data(const ShardedParameter& p, const at::Tensor& tensor) const {
  // A gathered parameter that stays encoded, or a handle of it: uses the same rows.
  if (p.keeps_encoded && is_wrapper(tensor) && !is_dtensor(tensor) && !is_fake(tensor)) {
    const auto parts = payload_of(tensor)->inner_tensors();
    return !parts.empty() && parts.front().second.storage().unsafeGetStorageImpl() == whole_.get() &&
           parts.front().second.storage_offset() == p.whole.storage_offset();
  }
  const at::Tensor local = detail::local_of(tensor);
  if (is_wrapper(local)) return false;
  const c10::StorageImpl* memory = local.storage().unsafeGetStorageImpl();
  const detail::DTensorPayload* payload = detail::dtensor_payload(tensor);
  if (memory == flat_.storage().unsafeGetStorageImpl())
    return payload && payload->spec == p.placement.sharded && local.data_ptr() == p.padded.data_ptr();
  return memory == whole_.get() && local.storage_offset() == p.whole.storage_offset() &&
         local.sizes() == p.whole.sizes() && local.strides() == p.whole.strides();
}

void ShardGroup::check_replacement(const ShardedParameter& p, const at::Tensor& tensor) const {
  const std::string what =
      fmt::format("parameter '{}', whose data was replaced (set_data, Module::to) after fully_shard", p.name);
  const detail::DTensorPayload* payload = detail::dtensor_payload(tensor);
  const at::Tensor local = detail::local_of(tensor);
  if (is_wrapper(local) || local.layout() != at::kStrided)
    throw ValueError(describe(what, "a tensor without plain values in memory", "a dense one",
                              "load values with load_whole() or write them inside an UnshardedScope"));
  if (tensor.sizes() != p.sharded.sizes())
    throw ValueError(
        describe(what, fmt::format("shape [{}]", fmt::join(tensor.sizes(), ", ")),
                 fmt::format("[{}], that of the whole parameter", fmt::join(p.sharded.sizes(), ", ")),
                 "pass the whole value, or a distributed tensor placed like the shard"));
  if (local.device() != device_ && local.device() != flat_.device())
    throw ValueError(describe(what, fmt::format("data on {}", local.device().str()),
                              fmt::format("on {}", device_.str()), "move the module before fully_shard"));
  if (payload && !lies_as(*payload, *p.placement.sharded) &&
      !(p.placement.original && lies_as(*payload, *p.placement.original)))
    throw ValueError(
        describe(what, describe_dtensor(tensor), p.to_string() + ", like the shard",
                 "distribute the value with the same placements on the same mesh, or pass it whole"));
  if (local.storage().unsafeGetStorageImpl() == whole_.get() && state_ != ShardGroupState::Unsharded)
    throw ValueError(describe(what, "a view of gathered memory that was freed",
                              "a tensor with its own memory", "clone() it"));
  if (writable() && p.keeps_encoded)
    throw StateError(describe(what, "it is gathered in encoded form inside an UnshardedScope",
                              "a parameter that may be written there",
                              "call load_whole() outside the scope"));
  if (tensor.scalar_type() == p.dtype || (writable() && tensor.scalar_type() == p.compute_dtype)) return;
  if (writable() || !partial_reductions.empty())
    throw StateError(
        describe(what, dtype_name(tensor.scalar_type()), fmt::format("{} here", dtype_name(p.dtype)),
                 writable() ? "change the dtype outside an UnshardedScope"
                            : "first reduce the accumulated gradients (set_requires_all_reduce)"));
}

void ShardGroup::adopt_replaced() {
  if (!replaced_) return;
  const NoHooksOrGradScope quiet;
  struct Value {
    ShardedParameter* p;
    at::Tensor parameter, value;
  };
  std::vector<Value> values;
  for (ShardedParameter& p : parameters_) {
    if (!p.replaced) continue;
    const at::Tensor parameter = p.parameter();
    if (!parameter.defined()) continue;
    if (p.recast) {
      if (writable())
        throw StateError(describe(fmt::format("parameter '{}' was cast (Module::to)", p.name),
                                  "inside an UnshardedScope", "outside an UnshardedScope"));
      values.push_back({&p, parameter, at::Tensor()});
      continue;
    }
    if (holds_own_data(p, parameter)) {
      switch_data(parameter, state_ == ShardGroupState::Unsharded ? p.unsharded : p.sharded);
      continue;
    }
    check_replacement(p, parameter);
    const c10::StorageImpl* memory = detail::local_of(parameter).storage().unsafeGetStorageImpl();
    const bool ours = memory == whole_.get() || memory == flat_.storage().unsafeGetStorageImpl();
    values.push_back({&p, parameter, ours ? parameter.detach().clone() : parameter.detach()});
  }
  // Nothing is rejected from here on.
  replaced_ = false;
  for (ShardedParameter& p : parameters_)
    if (std::exchange(p.replaced, false)) detail::count_replacements(-1);
  if (values.empty()) return;
  const int rank = mesh_.shard_rank();
  if (writable()) {
    for (const Value& v : values) {
      const SpecPtr& original = v.p->placement.original;
      const detail::DTensorPayload* payload = detail::dtensor_payload(v.value);
      if (payload && original && lies_as(*payload, *original)) {
        v.p->whole.copy_(payload->local());
      } else {
        const at::Tensor value = payload ? full_tensor(v.value) : v.value;
        if (original)
          detail::copy_part(value, *original, v.p->whole);
        else
          v.p->whole.copy_(value);
      }
      switch_data(v.parameter, v.p->unsharded);
    }
    return;
  }
  reshard();
  before_shards_change();
  std::vector<std::pair<ShardedParameter*, at::ScalarType>> dtypes;
  for (const Value& v : values)
    if (const at::ScalarType dtype = v.p->recast ? *v.p->recast : v.value.scalar_type(); dtype != v.p->dtype)
      dtypes.emplace_back(v.p, dtype);
  if (!dtypes.empty()) change_dtypes(dtypes);
  for (const Value& v : values) {
    const detail::DTensorPayload* payload = v.value.defined() ? detail::dtensor_payload(v.value) : nullptr;
    const at::Tensor mine = own_shard(*v.p);
    if (payload)
      mine.copy_(lies_as(*payload, *v.p->placement.sharded)
                     ? payload->local()
                     : piece_of(payload->local(), v.p->layout(), rank));
    else if (!v.p->recast)
      detail::copy_part(v.value, *v.p->placement.sharded, mine);
    v.p->recast.reset();
    switch_data(v.parameter, v.p->sharded);
  }
}

// Allocates everything anew. Tensors that autograd saved of the gathered parameters refer to the old memory,
// which is never filled again.
void ShardGroup::change_dtypes(const std::vector<std::pair<ShardedParameter*, at::ScalarType>>& dtypes) {
  std::vector<at::Tensor> before;
  for (const ShardedParameter& p : parameters_) before.push_back(p.padded);
  const auto& precision = options_.mixed_precision.param_dtype;
  for (const auto& [p, dtype] : dtypes) {
    p->dtype = dtype;
    p->compute_dtype = precision && at::isFloatingType(dtype) ? *precision : dtype;
    p->placement.sharded = with_dtype(p->placement.sharded, dtype);
    if (p->placement.original) p->placement.original = with_dtype(p->placement.original, dtype);
    if (device_.is_cpu() && p->compute_dtype == at::kBFloat16) ensure_cpu_bfloat16();
  }
  detail::unregister_member(flat_.storage().unsafeGetStorageImpl());
  detail::register_member(whole_.get(), {this, detail::kStale});
  retired_.push_back(std::move(whole_));
  flat_bytes_ = row_bytes_ = whole_bytes_ = 0;
  plan_memory();
  allocate_shards();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& p = parameters_[i];
    p.padded = typed_part(flat_, p.shard_byte, p.dtype, {p.layout().padded_numel()});
    p.padded.copy_(before[i]);
  }
  make_templates();
  // Gradients are cast as well, so that the next reduction can be added to them.
  for (const auto& [p, dtype] : dtypes) {
    const at::Tensor parameter = p->parameter();
    const detail::DTensorPayload* gradient =
        parameter.grad().defined() ? detail::dtensor_payload(parameter.grad()) : nullptr;
    if (gradient && lies_as(*gradient, *p->placement.sharded))
      parameter.mutable_grad() =
          detail::make_dtensor(gradient->local().to(dtype), p->placement.sharded, p->placement.mesh);
  }
}

}  // namespace penstock
