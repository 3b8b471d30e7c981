#include "penstock/shard/state/shard_group.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/shard/pieces/piece_copy.h"
#include "penstock/shard/state/group_internal.h"
#include "penstock/shard/state/registry.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/compat/cpu_bfloat16.h"
#include "penstock/torch/compat/dtype.h"
#include "penstock/torch/dispatch/any_operator_hook.h"
#include "penstock/torch/dispatch/operator_hook.h"
#include "penstock/torch/dispatch/switch_data.h"

namespace penstock {

using detail::item_size;
using detail::local_of;
using detail::NoHooksOrGradScope;

namespace {

constexpr std::int64_t kAlignment = 64;  // of parameters in gathered memory, for vector units and caches

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

// A mesh of CPU ranks does not determine where they compute; one of GPUs does.
void check_device(const char* function, const std::string& name, at::Device device, const ShardMesh& mesh) {
  if (device.is_cpu() && mesh.mesh().mesh().device_type() == "cuda")
    throw ValueError(describe(fmt::format("{}: the device of parameter '{}'", function, name), device.str(),
                              "a CUDA device, like the mesh", "move the module to its device first"));
}

// Checks the gathered parameter that an extension made.
void check_kept(const ShardedParameter& p) {
  const at::Tensor& made = p.unsharded;
  const Payload* payload = made.defined() ? payload_of(made) : nullptr;
  const bool fits = payload && made.sizes() == c10::IntArrayRef(p.layout().shape()) &&
                    made.scalar_type() == p.compute_dtype && made.device() == p.whole.device();
  if (!fits)
    throw ValueError(
        describe(fmt::format("the extension of '{}': make_gathered", p.name),
                 !made.defined() ? "an undefined tensor"
                                 : fmt::format("{}{}[{}]", payload ? "" : "a plain tensor, ",
                                               dtype_name(made.scalar_type()), fmt::join(made.sizes(), ", ")),
                 fmt::format("a tensor subclass of {}[{}]", dtype_name(p.compute_dtype),
                             fmt::join(p.layout().shape(), ", "))));
  const auto parts = payload->inner_tensors();
  if (parts.empty() || !parts.front().second.is_alias_of(p.whole))
    throw ValueError(
        describe(fmt::format("the extension of '{}': inner_tensors() of the result of make_gathered", p.name),
                 "tensors with their own memory", "parts of GatheredBytes::rows, which gathers fill"));
}

}  // namespace

std::string_view to_text(ShardGroupState state) {
  switch (state) {
    case ShardGroupState::Sharded:
      return "Sharded";
    case ShardGroupState::ShardedPostForward:
      return "ShardedPostForward";
    case ShardGroupState::Unsharded:
      return "Unsharded";
  }
  return "?";
}

at::Tensor ShardedParameter::parameter() const {
  auto impl = handle.lock();
  return impl ? at::Tensor(std::move(impl)) : at::Tensor();
}

std::string ShardedParameter::to_string() const {
  return fmt::format("'{}' {}[{}] as {}", path, dtype_name(dtype),
                     fmt::join(placement.sharded->shape(), ", "),
                     penstock::to_string(placement.sharded->placements()));
}

// ---- construction ----

ShardGroup::ShardGroup(std::string name, ShardMesh mesh, ShardOptions options,
                       std::vector<ShardGroupParameter> parameters)
    : name_(std::move(name)), mesh_(std::move(mesh)), options_(std::move(options)) {
  const NoHooksOrGradScope quiet;
  if (options_.reshard_after_forward) set_reshard_after_forward(*options_.reshard_after_forward);
  PENSTOCK_INVARIANT(!parameters.empty(), "a group must have parameters");
  const MixedPrecision& precision = options_.mixed_precision;
  device_ = parameters.front().tensor.device();
  if (!is_fake(parameters.front().tensor))
    check_device("fully_shard", parameters.front().name, device_, mesh_);
  if (device_.is_cpu() && precision.param_dtype == at::kBFloat16) ensure_cpu_bfloat16();
  for (const ShardGroupParameter& named : parameters) {
    const at::Tensor& tensor = named.tensor;
    if (tensor.device() != device_)
      throw ValueError(describe(fmt::format("fully_shard: the device of parameter '{}'", named.name),
                                tensor.device().str(),
                                fmt::format("{}, like '{}'", device_.str(), parameters.front().name),
                                "move the module to one device first"));
    if (tensor.layout() != at::kStrided)
      throw TypeError(
          describe(fmt::format("fully_shard: parameter '{}'", named.name), "a sparse tensor", "a dense one"));
    const bool floating = at::isFloatingType(tensor.scalar_type());
    ShardedParameter parameter{
        .name = named.name,
        .path = named.name,
        .handle = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
        .placement = place_parameter(named.name, tensor, mesh_, named.shard),
        .dtype = tensor.scalar_type(),
        .compute_dtype = floating && precision.param_dtype ? *precision.param_dtype : tensor.scalar_type(),
        .extension = options_.extension ? options_.extension(named.name, tensor) : nullptr};
    parameter.keeps_encoded = parameter.extension && parameter.extension->keeps_encoded();
    if (parameter.keeps_encoded && parameter.placement.original)
      throw ValueError(
          describe(fmt::format("fully_shard: the extension of '{}', a distributed parameter", named.name),
                   "it keeps the gathered parameter encoded", "one that decodes it",
                   "return an extension without keeps_encoded() for distributed parameters"));
    materialized_ = materialized_ && !is_fake(tensor);
    parameters_.push_back(std::move(parameter));
  }
  // Larger items first, encoded ones last: everything is aligned to its own item size.
  std::stable_sort(
      parameters_.begin(), parameters_.end(), [](const ShardedParameter& a, const ShardedParameter& b) {
        const auto rank = [](const ShardedParameter& p) {
          return std::make_tuple(p.extension != nullptr, -item_size(p.dtype), -item_size(p.compute_dtype));
        };
        return rank(a) < rank(b);
      });
  plan_memory();
  if (!materialized_) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor parameter = parameters_[i].parameter();
      if (!is_fake(parameter))
        throw ValueError(
            describe(fmt::format("fully_shard: parameter '{}'", parameters_[i].name),
                     "a tensor with memory among fake ones", "all fake or none",
                     "call fully_shard before materializing anything, or materialize the module first"));
      mark_for_any_hook(parameter);
      detail::register_member(parameter.unsafeGetTensorImpl(), {this, static_cast<int>(i)});
    }
    return;
  }
  allocate_shards();
  const int rank = mesh_.shard_rank();
  for (ShardedParameter& p : parameters_) {
    p.padded = typed_part(flat_, p.shard_byte, p.dtype, {p.layout().padded_numel()});
    const at::Tensor local = local_of(p.parameter());
    p.padded.narrow(0, 0, p.layout().piece_numel(rank))
        .view(p.layout().piece_shape(rank))
        .copy_(piece_of(local, p.layout(), rank));
  }
  make_templates();
}

void ShardGroup::allocate_shards() {
  const bool to_cpu = options_.offload.to_cpu;
  flat_ = at::zeros({flat_bytes_},
                    at::TensorOptions(at::kByte)
                        .device(to_cpu ? at::Device(at::kCPU) : device_)
                        .pinned_memory(to_cpu && options_.offload.pin_memory && device_.is_cuda()));
}

ShardGroup::~ShardGroup() {
  for (const ShardedParameter& p : parameters_) detail::unregister_member(p.handle._unsafe_get_target());
  if (flat_.defined()) detail::unregister_member(flat_.storage().unsafeGetStorageImpl());
  if (whole_) detail::unregister_member(whole_.get());
  for (const auto& storage : retired_) detail::unregister_member(storage.get());
  for (const ShardedParameter& p : parameters_)
    if (p.replaced) detail::count_replacements(-1);
  detail::unregister_derived(*this);
}

void ShardGroup::plan_memory() {
  const int ranks = mesh_.shard_ranks();
  std::int64_t widest = 1;
  bool casts = false, extends = false;
  for (ShardedParameter& p : parameters_) {
    const std::int64_t padded = p.layout().padded_numel();
    p.shard_byte = round_up(flat_bytes_, item_size(p.dtype));
    flat_bytes_ = p.shard_byte + padded * item_size(p.dtype);
    // Encoded data may contain numbers of any size.
    const std::int64_t item = p.extension ? 8 : item_size(p.compute_dtype);
    p.row_byte = round_up(row_bytes_, item);
    p.row_bytes = p.extension ? p.extension->encoded_bytes(padded, p.dtype) : padded * item;
    if (p.row_bytes < 0)
      throw ValueError(describe(fmt::format("the extension of '{}': encoded_bytes", p.name),
                                std::to_string(p.row_bytes), "0 or more"));
    row_bytes_ = p.row_byte + p.row_bytes;
    p.whole_byte = round_up(whole_bytes_, kAlignment);
    whole_bytes_ = p.whole_byte + (p.keeps_encoded ? ranks * round_up(p.row_bytes, item)
                                                   : p.layout().numel() * item_size(p.compute_dtype));
    widest = std::max(widest, item);
    casts = casts || p.dtype != p.compute_dtype;
    extends = extends || p.extension;
  }
  row_bytes_ = round_up(row_bytes_, widest);  // the rows of the ranks are adjacent
  flat_bytes_ = std::max(flat_bytes_, row_bytes_);
  row_is_flat_ = !casts && !extends && !options_.offload.to_cpu;
  whole_is_flat_ = row_is_flat_ && ranks == 1;
  if (whole_is_flat_) {
    for (ShardedParameter& p : parameters_) p.whole_byte = p.shard_byte;
    whole_bytes_ = flat_bytes_;
  }
  if (const auto* to = std::get_if<ReshardTo>(&reshard_after_forward_))
    whole_bytes_ = round_up(whole_bytes_, to->ranks * kAlignment);
}

void ShardGroup::make_templates() {
  const int rank = mesh_.shard_rank();
  // Views need a storage of full size; memory is allocated by the first gather.
  whole_ = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                 static_cast<std::size_t>(whole_bytes_),
                                                 at::DataPtr(nullptr, device_), nullptr,
                                                 /*resizable=*/false);
  // User code may fail the checks, so it runs before any parameter changes.
  for (ShardedParameter& p : parameters_) {
    if (!p.keeps_encoded) continue;
    // Rows begin at multiples of 8, as in the receive buffer.
    p.whole = at::empty({0}, at::TensorOptions(at::kByte).device(device_))
                  .set_(c10::Storage(whole_), p.whole_byte, {mesh_.shard_ranks(), p.row_bytes},
                        {round_up(p.row_bytes, 8), 1});
    p.unsharded = p.extension->make_gathered(
        {p.whole, p.layout().shape(), p.layout().dim(), p.compute_dtype, p.extension});
    check_kept(p);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& p = parameters_[i];
    const at::Tensor parameter = p.parameter();
    const at::Tensor local =
        p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank));
    GlobalGeometry geometry = p.placement.sharded->geometry();
    geometry.device = flat_.device();
    p.placement.sharded = DTensorSpec::get(p.placement.mesh, p.placement.sharded->placements(), geometry);
    p.sharded = detail::make_dtensor(local, p.placement.sharded, p.placement.mesh);
    const std::vector<std::int64_t> stride = contiguous_stride(p.layout().shape());
    // When the templates are rebuilt for a new dtype, the boundary of the module is on the previous template.
    const at::Tensor bounded = p.unsharded.defined() ? p.unsharded : parameter;
    if (!p.keeps_encoded) {
      p.whole = at::empty({0}, at::TensorOptions(p.compute_dtype).device(device_))
                    .set_(c10::Storage(whole_), p.whole_byte / item_size(p.compute_dtype), p.layout().shape(),
                          stride);
      p.unsharded = p.whole;
    }
    if (p.placement.original) {
      GlobalGeometry whole = p.placement.original->geometry();
      whole.dtype = p.compute_dtype;
      p.unsharded = detail::make_dtensor(
          p.whole, DTensorSpec::get(*p.placement.original, p.placement.original->placements(), whole),
          *p.placement.original_mesh);
      if (const detail::DTensorPayload* before = detail::dtensor_payload(bounded);
          before && before->boundary) {
        detail::dtensor_payload(p.unsharded)->boundary = before->boundary;
        mark_hooked(p.unsharded);
      }
    }
    mark_for_any_hook(p.sharded);
    mark_for_any_hook(p.unsharded);
    // The local part of a distributed parameter: what to_local returns and autograd saves.
    if (!p.keeps_encoded) mark_for_any_hook(p.whole);
    detail::register_member(parameter.unsafeGetTensorImpl(), {this, static_cast<int>(i)});
    replace_data(parameter, p.sharded);
  }
  whole_->set_nbytes(0);
  detail::register_member(flat_.storage().unsafeGetStorageImpl(), {this, -1});
  detail::register_member(whole_.get(), {this, -1});
}

void ShardGroup::materialize(const ShardInitializer& fill, at::Device device) {
  if (materialized_) return;
  check_device("materialize_shards", parameters_.front().name, device, mesh_);
  const NoHooksOrGradScope quiet;
  device_ = device;
  allocate_shards();
  const int rank = mesh_.shard_rank();
  for (ShardedParameter& p : parameters_)
    p.padded = typed_part(flat_, p.shard_byte, p.dtype, {p.layout().padded_numel()});
  make_templates();
  materialized_ = true;
  for (ShardedParameter& p : parameters_) {
    const at::Tensor local =
        p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank));
    const DTensorSpec& spec = *p.placement.sharded;
    for (const ShardBox& box :
         local_boxes(spec.shape(), spec.mesh_shape(), spec.coordinate(), spec.placements())) {
      at::Tensor part = local;
      for (std::size_t d = 0; d < box.shape.size(); ++d)
        part = part.narrow(static_cast<std::int64_t>(d), box.local_offset[d], box.shape[d]);
      if (part.is_contiguous()) {
        fill(p.name, part, {spec.shape(), box.offset});
      } else {
        at::Tensor dense = at::empty(part.sizes(), part.options());
        fill(p.name, dense, {spec.shape(), box.offset});
        part.copy_(dense);
      }
    }
  }
}

// ---- writes and loads ----

void ShardGroup::begin_writes() {
  wait_for_unshard();
  if (writable()) {  // the values from before the first write are known
    ++writers_;
    return;
  }
  const NoHooksOrGradScope quiet;
  std::vector<at::Tensor> before;
  for (const ShardedParameter& p : parameters_) {
    const bool rounded = !p.keeps_encoded && (p.extension || p.dtype != p.compute_dtype);
    before.push_back(rounded ? piece_of(p.whole, p.layout(), mesh_.shard_rank()).clone() : at::Tensor());
  }
  before_writes_ = std::move(before);
  writers_ = 1;
}

void ShardGroup::end_writes() {
  if (!writable()) throw StateError(fmt::format("end_writes of '{}': begin_writes was not called", name_));
  PENSTOCK_INVARIANT(state_ == ShardGroupState::Unsharded, "a group being written must be unsharded");
  if (--writers_ > 0) return;
  const NoHooksOrGradScope quiet;
  const std::vector<at::Tensor> pieces = std::exchange(before_writes_, {});
  if (whole_is_flat_) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& p = parameters_[i];
    if (p.keeps_encoded) continue;  // it cannot have been written
    const at::Tensor mine = own_shard(p), now = piece_of(p.whole, p.layout(), mesh_.shard_rank());
    if (!pieces[i].defined()) {
      mine.copy_(now);
      continue;
    }
    // The gathered values are rounded; the shard keeps its exact ones where nothing was written.
    const at::Tensor& before = pieces[i];
    const at::Tensor same = now.eq(before).logical_or_(now.isnan().logical_and_(before.isnan()));
    mine.copy_(at::where(same.to(mine.device()), mine, now.to(mine.options())));
  }
}

void ShardGroup::reset_sharded_parameter(std::size_t index) {
  ShardedParameter& p = parameters_.at(index);
  if (state_ != ShardGroupState::Sharded)
    throw StateError(describe(fmt::format("reset_sharded_parameter of '{}'", p.name),
                              std::string(to_text(state_)), "Sharded",
                              "call reshard() before loading values"));
  if (!materialized_) return;
  const at::Tensor parameter = p.parameter();
  if (!parameter.defined()) return;
  const NoHooksOrGradScope quiet;
  const detail::DTensorPayload* payload = detail::dtensor_payload(parameter);
  const int rank = mesh_.shard_rank();
  const at::Tensor mine =
      p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank));
  if (payload && payload->local().is_alias_of(p.padded)) return;
  if (!payload || payload->spec->mesh_id() != p.placement.sharded->mesh_id() ||
      payload->spec->placements() != p.placement.sharded->placements() ||
      parameter.sizes() != p.sharded.sizes())
    throw ValueError(
        describe(fmt::format("reset_sharded_parameter: '{}' after a load", p.name),
                 payload ? describe_dtensor(parameter) : "a plain tensor", p.to_string() + ", like the shard",
                 "load into the sharded parameter, or distribute the value with the same placements"));
  before_shards_change();
  mine.copy_(payload->local());
  switch_data(parameter, p.sharded);
}

void ShardGroup::adopt_object(std::size_t index, const at::Tensor& object) {
  ShardedParameter& p = parameters_.at(index);
  const auto refuse = [&](const std::string& actual, const std::string& expected) {
    throw ValueError(describe(
        fmt::format("reset_sharded_parameters: the tensor that replaced parameter {}", p.to_string()), actual,
        expected, "use a whole value of the parameter's shape, or its shard"));
  };
  if (state_ != ShardGroupState::Sharded)
    throw StateError(describe(fmt::format("reset_sharded_parameters: '{}'", p.path),
                              std::string(to_text(state_)), "Sharded",
                              "call reshard() before loading values"));
  check_materialized();
  if (object.sizes() != p.sharded.sizes())
    refuse(fmt::format("[{}]", fmt::join(object.sizes(), ", ")),
           fmt::format("[{}]", fmt::join(p.sharded.sizes(), ", ")));
  if (object.requires_grad() && !object.is_leaf())
    refuse("the result of a differentiable operation", "a leaf");
  const NoHooksOrGradScope quiet;
  const at::Tensor value = object.detach();  // shares the memory that the object gives up
  const detail::DTensorPayload* payload = detail::dtensor_payload(value);
  const auto lies_as = [&](const SpecPtr& spec) {
    return spec && payload && payload->spec->mesh_id() == spec->mesh_id() &&
           payload->spec->placements() == spec->placements();
  };
  const int rank = mesh_.shard_rank();
  at::Tensor piece;
  if (lies_as(p.placement.sharded))
    piece = payload->local();
  else if (lies_as(p.placement.original) || (!payload && !p.placement.original))
    piece = piece_of(local_of(value), p.layout(), rank);
  else
    refuse(payload ? describe_dtensor(value) : "a plain tensor",
           p.placement.original
               ? to_string(p.placement.original->placements()) + ", like the parameter before fully_shard"
               : "a plain tensor");
  before_shards_change();
  p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank)).copy_(piece);
  detail::unregister_member(p.handle._unsafe_get_target());
  p.handle = c10::weak_intrusive_ptr<c10::TensorImpl>(object.getIntrusivePtr());
  p.gradient.reset();
  p.gradient_owned = p.arrived = false;
  detail::register_member(object.unsafeGetTensorImpl(), {this, static_cast<int>(index)});
  replace_data(object, p.sharded);
  if (owner_ && at::isFloatingType(p.dtype)) tie_lifetime(object, owner_->shared_from_this());
}

// ---- queries ----

std::uint64_t ShardGroup::fingerprint() const {
  std::uint64_t hash = 1469598103934665603ull;
  const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  for (const ShardedParameter& p : parameters_) {
    for (const char letter : p.name) add(static_cast<unsigned char>(letter));
    add(static_cast<std::uint64_t>(p.dtype) << 8 | static_cast<std::uint64_t>(p.compute_dtype));
    for (const std::int64_t size : p.placement.sharded->shape()) add(static_cast<std::uint64_t>(size));
    for (const char letter : to_string(p.placement.sharded->placements()))
      add(static_cast<unsigned char>(letter));
    const at::Tensor parameter = p.parameter();
    add(parameter.defined() && parameter.requires_grad());
    add(static_cast<std::uint64_t>(p.row_bytes) << 1 | static_cast<std::uint64_t>(p.keeps_encoded));
  }
  add(static_cast<std::uint64_t>(options_.mixed_precision.reduce_dtype.value_or(at::ScalarType::Undefined)));
  return hash;
}

ShardContext& ShardGroup::context() {
  if (!context_) ShardContext::prepare(*this);
  return *context_;
}

std::int64_t ShardGroup::gathered_bytes() const {
  std::int64_t bytes = slice_.defined() ? static_cast<std::int64_t>(slice_.nbytes()) : 0;
  if (whole_is_flat_) return bytes;
  if (whole_) bytes += static_cast<std::int64_t>(whole_->nbytes());
  if (gather_ && gather_->received.defined()) bytes += static_cast<std::int64_t>(gather_->received.nbytes());
  return bytes;
}

ShardGroup::Memory ShardGroup::memory() const {
  Memory memory{.shards = flat_.defined() ? static_cast<std::int64_t>(flat_.nbytes()) : 0,
                .gathered = gathered_bytes()};
  for (const ShardedParameter& p : parameters_)
    if (p.gradient.defined()) memory.gradients += static_cast<std::int64_t>(p.gradient.nbytes());
  return memory;
}

}  // namespace penstock
