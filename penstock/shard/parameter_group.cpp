#include "penstock/shard/parameter_group.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "penstock/base/errors.h"
#include "penstock/dtensor/dtensor.h"
#include "penstock/dtensor/dtensor_payload.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/shard/piece_copy.h"
#include "penstock/shard/registry.h"
#include "penstock/shard/shard_context.h"
#include "penstock/torch/any_operator_hook.h"
#include "penstock/torch/dtype.h"
#include "penstock/torch/fake.h"
#include "penstock/torch/operator_hook.h"
#include "penstock/torch/switch_data.h"
#include "penstock/torch/wrapper.h"

namespace penstock {
namespace {

constexpr std::int64_t kAlignment = 64;  // of parameters in gathered memory: vector units and caches

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }
std::int64_t item_size(at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

// Operators here work on parts and must neither be recorded nor be seen by hooks.
struct Quiet {
  NoAnyHookGuard no_any_hook;
  NoHooksGuard no_hooks;
  at::NoGradGuard no_grad;
};

at::Tensor local_of(const at::Tensor& tensor) {
  const detail::DTensorPayload* payload = detail::dtensor_payload(tensor);
  return payload ? payload->local() : tensor;
}

}  // namespace

std::string_view to_text(GroupState state) {
  switch (state) {
    case GroupState::Sharded: return "Sharded";
    case GroupState::ShardedPostForward: return "ShardedPostForward";
    case GroupState::Unsharded: return "Unsharded";
  }
  return "?";
}

at::Tensor ShardedParameter::parameter() const {
  auto impl = handle.lock();
  return impl ? at::Tensor(std::move(impl)) : at::Tensor();
}

std::string ShardedParameter::to_string() const {
  return fmt::format("'{}' {}[{}] as {}", name, dtype_name(dtype), fmt::join(placement.sharded->shape(), ", "), penstock::to_string(placement.sharded->placements()));
}

// ---- construction ----

ParameterGroup::ParameterGroup(std::string name, ShardMesh mesh, ShardOptions options, std::vector<NamedParameter> parameters)
    : name_(std::move(name)), mesh_(std::move(mesh)), options_(std::move(options)) {
  const Quiet quiet;
  if (options_.reshard_after_forward) set_reshard_after_forward(*options_.reshard_after_forward);
  PENSTOCK_INVARIANT(!parameters.empty(), "a group has parameters");
  const MixedPrecision& precision = options_.mixed_precision;
  device_ = parameters.front().tensor.device();
  for (const NamedParameter& named : parameters) {
    const at::Tensor& tensor = named.tensor;
    if (tensor.device() != device_)
      throw ValueError(describe(fmt::format("fully_shard: the device of parameter '{}'", named.name), tensor.device().str(),
                                fmt::format("{}, as '{}' is", device_.str(), parameters.front().name), "move the module to one device first"));
    if (tensor.layout() != at::kStrided) throw TypeError(describe(fmt::format("fully_shard: parameter '{}'", named.name), "a sparse tensor", "a dense one"));
    Shard shard{0};
    if (options_.shard_placement)
      if (const auto chosen = options_.shard_placement(named.name, tensor)) shard = *chosen;
    const bool floating = at::isFloatingType(tensor.scalar_type());
    ShardedParameter parameter{.name = named.name,
                               .handle = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                               .placement = place_parameter(named.name, tensor, mesh_, shard),
                               .dtype = tensor.scalar_type(),
                               .compute_dtype = floating && precision.param_dtype ? *precision.param_dtype : tensor.scalar_type(),
                               .extension = options_.extension ? options_.extension(named.name, tensor) : nullptr};
    materialized_ = materialized_ && !is_fake(tensor);
    parameters_.push_back(std::move(parameter));
  }
  // Larger items first, what is encoded last: everything lies at a multiple of its own size.
  std::stable_sort(parameters_.begin(), parameters_.end(), [](const ShardedParameter& a, const ShardedParameter& b) {
    const auto rank = [](const ShardedParameter& p) { return std::make_tuple(p.extension != nullptr, -item_size(p.dtype), -item_size(p.compute_dtype)); };
    return rank(a) < rank(b);
  });
  plan_memory();
  if (!materialized_) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor parameter = parameters_[i].parameter();
      if (!is_fake(parameter))
        throw ValueError(describe(fmt::format("fully_shard: parameter '{}'", parameters_[i].name), "a tensor with memory among fake ones", "all fake or none",
                                  "call fully_shard before anything is materialized, or materialize the module first"));
      mark_for_any_hook(parameter);
      detail::register_member(parameter.unsafeGetTensorImpl(), {this, static_cast<int>(i)});
    }
    return;
  }
  flat_ = at::zeros({flat_bytes_}, at::TensorOptions(at::kByte).device(options_.offload.to_cpu ? at::Device(at::kCPU) : device_).pinned_memory(options_.offload.to_cpu && options_.offload.pin_memory && device_.is_cuda()));
  const int rank = mesh_.shard_rank();
  for (ShardedParameter& p : parameters_) {
    p.padded = typed_part(flat_, p.shard_byte, p.dtype, {p.layout().padded_numel()});
    const at::Tensor local = local_of(p.parameter());
    p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank)).copy_(piece_of(local, p.layout(), rank));
  }
  make_templates();
}

ParameterGroup::~ParameterGroup() {
  for (const ShardedParameter& p : parameters_) detail::unregister_member(p.handle._unsafe_get_target());
  if (flat_.defined()) detail::unregister_member(flat_.storage().unsafeGetStorageImpl());
  if (whole_) detail::unregister_member(whole_.get());
}

void ParameterGroup::plan_memory() {
  const int ranks = mesh_.shard_ranks();
  std::int64_t widest = 1;
  bool casts = false, extends = false;
  for (ShardedParameter& p : parameters_) {
    const std::int64_t padded = p.layout().padded_numel();
    p.shard_byte = round_up(flat_bytes_, item_size(p.dtype));
    flat_bytes_ = p.shard_byte + padded * item_size(p.dtype);
    // What is encoded may hold numbers of any size.
    const std::int64_t item = p.extension ? 8 : item_size(p.compute_dtype);
    p.row_byte = round_up(row_bytes_, item);
    p.row_bytes = p.extension ? p.extension->encoded_bytes(padded, p.dtype) : padded * item;
    if (p.row_bytes < 0)
      throw ValueError(describe(fmt::format("the extension of '{}': encoded_bytes", p.name), std::to_string(p.row_bytes), "0 or more"));
    row_bytes_ = p.row_byte + p.row_bytes;
    p.whole_byte = round_up(whole_bytes_, kAlignment);
    whole_bytes_ = p.whole_byte + p.layout().numel() * item_size(p.compute_dtype);
    widest = std::max(widest, item);
    casts = casts || p.dtype != p.compute_dtype;
    extends = extends || p.extension;
  }
  row_bytes_ = round_up(row_bytes_, widest);  // rows of several ranks follow each other
  flat_bytes_ = std::max(flat_bytes_, row_bytes_);
  row_is_flat_ = !casts && !extends && !options_.offload.to_cpu;
  whole_is_flat_ = row_is_flat_ && ranks == 1;
  if (whole_is_flat_) {
    for (ShardedParameter& p : parameters_) p.whole_byte = p.shard_byte;
    whole_bytes_ = flat_bytes_;
  }
  if (const auto* to = std::get_if<ReshardTo>(&reshard_after_forward_)) whole_bytes_ = round_up(whole_bytes_, to->ranks * kAlignment);
}

void ParameterGroup::make_templates() {
  const int rank = mesh_.shard_rank();
  // Views need a storage of full size; memory comes with the first gather.
  whole_ = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<std::size_t>(whole_bytes_), at::DataPtr(nullptr, device_), nullptr,
                                                 /*resizable=*/false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& p = parameters_[i];
    const at::Tensor parameter = p.parameter();
    const at::Tensor local = p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank));
    GlobalGeometry geometry = p.placement.sharded->geometry();
    geometry.device = flat_.device();
    p.placement.sharded = DTensorSpec::get(p.placement.mesh, p.placement.sharded->placements(), geometry);
    p.sharded = detail::make_dtensor(local, p.placement.sharded, p.placement.mesh);
    const std::vector<std::int64_t> stride = contiguous_stride(p.layout().shape());
    p.whole = at::empty({0}, at::TensorOptions(p.compute_dtype).device(device_)).set_(c10::Storage(whole_), p.whole_byte / item_size(p.compute_dtype), p.layout().shape(), stride);
    p.unsharded = p.whole;
    if (p.placement.original) {
      GlobalGeometry whole = p.placement.original->geometry();
      whole.dtype = p.compute_dtype;
      p.unsharded = detail::make_dtensor(p.whole, DTensorSpec::get(*p.placement.original, p.placement.original->placements(), whole), *p.placement.original_mesh);
      if (const detail::DTensorPayload* before = detail::dtensor_payload(parameter); before && before->boundary) {
        detail::dtensor_payload(p.unsharded)->boundary = before->boundary;
        mark_hooked(p.unsharded);
      }
    }
    mark_for_any_hook(p.sharded);
    mark_for_any_hook(p.unsharded);
    mark_for_any_hook(p.whole);  // the local part of a distributed one: what to_local gives and autograd saves of it
    detail::register_member(parameter.unsafeGetTensorImpl(), {this, static_cast<int>(i)});
    replace_data(parameter, p.sharded);
  }
  whole_->set_nbytes(0);
  detail::register_member(flat_.storage().unsafeGetStorageImpl(), {this, -1});
  detail::register_member(whole_.get(), {this, -1});
}

void ParameterGroup::materialize(const ShardInitializer& fill, at::Device device) {
  if (materialized_) return;
  const Quiet quiet;
  device_ = device;
  flat_ = at::zeros({flat_bytes_}, at::TensorOptions(at::kByte).device(options_.offload.to_cpu ? at::Device(at::kCPU) : device_));
  const int rank = mesh_.shard_rank();
  for (ShardedParameter& p : parameters_) p.padded = typed_part(flat_, p.shard_byte, p.dtype, {p.layout().padded_numel()});
  make_templates();
  materialized_ = true;
  for (ShardedParameter& p : parameters_) {
    const at::Tensor local = p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank));
    const DTensorSpec& spec = *p.placement.sharded;
    for (const ShardBox& box : local_boxes(spec.shape(), spec.mesh_shape(), spec.coordinate(), spec.placements())) {
      at::Tensor part = local;
      for (std::size_t d = 0; d < box.shape.size(); ++d) part = part.narrow(static_cast<std::int64_t>(d), box.local_offset[d], box.shape[d]);
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

// ---- gather ----

void ParameterGroup::check_materialized() const {
  if (!materialized_)
    throw StateError(fmt::format("the parameters of '{}' are fake: they have no memory; call materialize_shards() before the first forward", name_));
}

void ParameterGroup::fill_row(const at::Tensor& row) {
  const at::Tensor source = flat_.device() == row.device() ? flat_ : flat_.to(row.device(), /*non_blocking=*/true);
  const ShardedParameter& first = parameters_.front();
  const bool uniform = std::all_of(parameters_.begin(), parameters_.end(), [&](const ShardedParameter& p) {
    return !p.extension && p.dtype == first.dtype && p.compute_dtype == first.compute_dtype;
  });
  if (uniform) {
    const std::int64_t numel = row_bytes_ / item_size(first.compute_dtype);
    typed_part(row, 0, first.compute_dtype, {numel}).copy_(typed_part(source, 0, first.dtype, {numel}));
    return;
  }
  for (const ShardedParameter& p : parameters_) {
    const at::Tensor shard = typed_part(source, p.shard_byte, p.dtype, {p.layout().padded_numel()});
    if (p.extension)
      p.extension->encode(shard, row.narrow(0, p.row_byte, p.row_bytes));
    else
      typed_part(row, p.row_byte, p.compute_dtype, {p.layout().padded_numel()}).copy_(shard);
  }
}

void ParameterGroup::unshard() {
  if (state_ == GroupState::Unsharded || gather_) return;
  check_materialized();
  const Quiet quiet;
  Gather gather;
  if (state_ == GroupState::ShardedPostForward) {
    const int ranks = std::get<ReshardTo>(reshard_after_forward_).ranks;
    gather.from_slice = true;
    gather.sent = slice_;
    gather.received = pool_.bytes(whole_bytes_, device_);
    gather.work = mesh_.block_group(ranks).all_gather(gather.received, gather.sent, {.label = fmt::format("gather {} again", name_)});
  } else if (!whole_is_flat_) {
    if (row_is_flat_) {
      gather.sent = flat_.narrow(0, 0, row_bytes_);
    } else {
      gather.sent = pool_.bytes(row_bytes_, device_);
      fill_row(gather.sent);
    }
    if (mesh_.shard_ranks() == 1) {
      gather.received = gather.sent.view({1, row_bytes_});
    } else {
      gather.received = pool_.bytes(row_bytes_ * mesh_.shard_ranks(), device_).view({mesh_.shard_ranks(), row_bytes_});
      gather.work = mesh_.gather_group().all_gather(gather.received.view({-1}), gather.sent, {.label = fmt::format("gather {}", name_)});
    }
  }
  gather_ = std::move(gather);
}

void ParameterGroup::allocate_whole() {
  if (whole_is_flat_) {
    // Not owned: the flat buffer lives as long as what looks at it.
    auto* keep = new at::Tensor(flat_);
    whole_->set_data_ptr(at::DataPtr(flat_.data_ptr(), keep, [](void* tensor) { delete static_cast<at::Tensor*>(tensor); }, device_));
  } else {
    whole_->set_data_ptr(pool_.memory(whole_bytes_, device_));
  }
  whole_->set_nbytes(static_cast<std::size_t>(whole_bytes_));
}

void ParameterGroup::free_whole() {
  whole_->set_data_ptr(at::DataPtr(nullptr, device_));
  whole_->set_nbytes(0);
}

void ParameterGroup::copy_out(const at::Tensor& received) {
  at::Tensor typed;  // mostly all parameters are of one dtype
  for (const ShardedParameter& p : parameters_) {
    if (!p.extension) {
      const std::int64_t item = item_size(p.compute_dtype);
      if (!typed.defined() || typed.scalar_type() != p.compute_dtype) typed = typed_part(received, 0, p.compute_dtype, {received.size(0), row_bytes_ / item});
      join_pieces(typed, p.row_byte / item, p.layout(), p.whole);
      continue;
    }
    const at::Tensor rows = pool_.empty({received.size(0), p.layout().padded_numel()}, p.compute_dtype, device_);
    for (std::int64_t rank = 0; rank < received.size(0); ++rank)
      p.extension->decode(received.select(0, rank).narrow(0, p.row_byte, p.row_bytes), rows.select(0, rank));
    join_pieces(rows, 0, p.layout(), p.whole);
  }
}

void ParameterGroup::wait_for_unshard() {
  if (state_ == GroupState::Unsharded) return;
  unshard();
  const Quiet quiet;
  Gather gather = std::move(*gather_);
  gather_.reset();
  gather.work.wait();
  if (gather.from_slice) {
    // The bytes are those of the gathered storage.
    whole_->set_nbytes(static_cast<std::size_t>(whole_bytes_));
    at::DataPtr memory = pool_.memory(whole_bytes_, device_);
    whole_->set_data_ptr(std::move(memory));
    at::empty({0}, at::TensorOptions(at::kByte).device(device_)).set_(c10::Storage(whole_), 0, {whole_bytes_}, {1}).copy_(gather.received.view({-1}));
    slice_.reset();
  } else {
    allocate_whole();
    if (!whole_is_flat_) copy_out(gather.received);
  }
  switch_all(true);
  state_ = GroupState::Unsharded;
}

void ParameterGroup::switch_all(bool to_unsharded) {
  for (const ShardedParameter& p : parameters_)
    if (const at::Tensor parameter = p.parameter(); parameter.defined()) switch_data(parameter, to_unsharded ? p.unsharded : p.sharded);
}

void ParameterGroup::reshard() {
  if (gather_) {
    // Nobody has used it; what was received goes.
    gather_->work.wait();
    gather_.reset();
  }
  if (state_ == GroupState::ShardedPostForward) slice_.reset();
  if (state_ == GroupState::Unsharded) {
    if (writable_)
      throw StateError(fmt::format("reshard of '{}': its gathered parameters are being written; end the UnshardedScope first", name_));
    const Quiet quiet;
    switch_all(false);
    free_whole();
  }
  state_ = GroupState::Sharded;
}

void ParameterGroup::reshard_after_forward() {
  if (state_ != GroupState::Unsharded || writable_) return;
  if (const bool* free = std::get_if<bool>(&reshard_after_forward_)) {
    if (*free) reshard();
    return;
  }
  const Quiet quiet;
  const int ranks = std::get<ReshardTo>(reshard_after_forward_).ranks;
  const std::int64_t bytes = whole_bytes_ / ranks;
  slice_ = pool_.bytes(bytes, device_);
  const at::Tensor all = at::empty({0}, at::TensorOptions(at::kByte).device(device_)).set_(c10::Storage(whole_), 0, {whole_bytes_}, {1});
  slice_.copy_(all.narrow(0, bytes * (mesh_.shard_rank() % ranks), bytes));
  switch_all(false);
  free_whole();
  state_ = GroupState::ShardedPostForward;
}

bool ParameterGroup::reshards_after_forward() const {
  if (held_) return false;
  const bool* free = std::get_if<bool>(&reshard_after_forward_);
  return free == nullptr || *free;
}

void ParameterGroup::set_reshard_after_forward(ReshardAfterForward value) {
  if (const auto* to = std::get_if<ReshardTo>(&value)) {
    if (to->ranks < 1 || mesh_.shard_ranks() % to->ranks != 0)
      throw ValueError(describe(fmt::format("reshard_after_forward of '{}'", name_), fmt::format("{} ranks", to->ranks),
                                fmt::format("a divisor of the {} ranks of the shard axis", mesh_.shard_ranks())));
    if (to->ranks == 1) value = false;                     // every rank keeps everything
    else if (to->ranks == mesh_.shard_ranks()) value = true;  // the shards themselves
  }
  if (whole_ && std::holds_alternative<ReshardTo>(value))
    throw StateError(fmt::format("reshard_after_forward of '{}': a smaller mesh can only be chosen in ShardOptions", name_));
  reshard_after_forward_ = value;
  reshard_is_default_ = false;
}

// ---- writes and loads ----

void ParameterGroup::begin_writes() {
  wait_for_unshard();
  writable_ = true;
}

void ParameterGroup::end_writes() {
  if (!writable_) throw StateError(fmt::format("end_writes of '{}': begin_writes was not called", name_));
  PENSTOCK_INVARIANT(state_ == GroupState::Unsharded, "a group that is written is unsharded");
  const Quiet quiet;
  writable_ = false;
  if (whole_is_flat_) return;
  const int rank = mesh_.shard_rank();
  for (const ShardedParameter& p : parameters_)
    p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank)).copy_(piece_of(p.whole, p.layout(), rank));
}

void ParameterGroup::reset_sharded_parameter(std::size_t index) {
  ShardedParameter& p = parameters_.at(index);
  if (state_ != GroupState::Sharded)
    throw StateError(describe(fmt::format("reset_sharded_parameter of '{}'", p.name), std::string(to_text(state_)), "Sharded", "call reshard() before values are loaded"));
  if (!materialized_) return;
  const at::Tensor parameter = p.parameter();
  if (!parameter.defined()) return;
  const Quiet quiet;
  const detail::DTensorPayload* payload = detail::dtensor_payload(parameter);
  const int rank = mesh_.shard_rank();
  const at::Tensor mine = p.padded.narrow(0, 0, p.layout().piece_numel(rank)).view(p.layout().piece_shape(rank));
  if (payload && payload->local().is_alias_of(p.padded)) return;
  if (!payload || payload->spec->placements() != p.placement.sharded->placements() || parameter.sizes() != p.sharded.sizes())
    throw ValueError(describe(fmt::format("reset_sharded_parameter: '{}' after a load", p.name), payload ? describe_dtensor(parameter) : "a plain tensor",
                              p.to_string() + ", as it was sharded", "load into the sharded parameter, or distribute the value with the same placements"));
  mine.copy_(payload->local());
  switch_data(parameter, p.sharded);
}

// ---- backward ----

at::Tensor ParameterGroup::local_gradient(const ShardedParameter& p, const at::Tensor& gradient) const {
  const at::Tensor detached = gradient.detach();
  if (!p.placement.original) {
    if (is_dtensor(detached))
      throw TypeError(describe(fmt::format("the gradient of parameter '{}'", p.name), describe_dtensor(detached), "a plain tensor, as the parameter was",
                               "distribute the parameter (distribute_parameter) before fully_shard, or give it plain inputs"));
    return detached;
  }
  if (!is_dtensor(detached))
    throw TypeError(describe(fmt::format("the gradient of the distributed parameter '{}'", p.name), "a plain tensor", "a distributed one"));
  Placements wanted = p.placement.original->placements();
  const Placements& has = placements_of(detached);
  if (has.size() != wanted.size())
    throw ValueError(describe(fmt::format("the gradient of the distributed parameter '{}'", p.name), to_string(has), fmt::format("{} placements", wanted.size())));
  // Terms along data-parallel axes are what the reduction is for.
  bool terms = false;
  for (const int axis : p.placement.data_axes) {
    const auto at = static_cast<std::size_t>(axis);
    if (has[at].is_partial(PartialOp::Sum)) {
      wanted[at] = has[at];
      terms = true;
    }
  }
  at::Tensor local = local_of(has == wanted ? detached : redistribute(detached, wanted));
  // A reduction that averages would divide terms of a sum.
  if (terms && !gradient_divide_factor) local = local * static_cast<double>(mesh_.shard_ranks() * mesh_.replicas());
  return local;
}

void ParameterGroup::take(std::size_t slot, at::Tensor gradient) {
  const Quiet quiet;
  context().note_backward();
  ShardedParameter& p = parameters_[slot];
  at::Tensor local = local_gradient(p, gradient);
  gradient.reset();
  if (!p.gradient.defined()) {
    p.gradient = std::move(local);
    p.gradient_owned = false;
  } else if (p.gradient_owned) {
    p.gradient.add_(local);
  } else {
    p.gradient = p.gradient + local;
    p.gradient_owned = true;
  }
  p.arrived = true;
  // Parameters that forward never used are not waited for.
  const bool complete = std::all_of(parameters_.begin(), parameters_.end(), [](const ShardedParameter& q) { return q.arrived || !q.used; });
  if (complete) post_backward();
}

void ParameterGroup::post_backward() {
  const Quiet quiet;
  for (ShardedParameter& p : parameters_) {
    p.arrived = false;
    // A gradient that somebody put on the parameter itself, whole.
    const at::Tensor parameter = p.parameter();
    if (!parameter.defined()) continue;
    at::Tensor& own = parameter.mutable_grad();
    if (own.defined() && !p.placement.original && !is_dtensor(own)) {
      if (own.sizes() != c10::IntArrayRef(p.layout().shape()))
        throw ValueError(describe(fmt::format("grad() of parameter '{}'", p.name), fmt::format("[{}]", fmt::join(own.sizes(), ", ")), fmt::format("[{}]", fmt::join(p.layout().shape(), ", "))));
      p.gradient = p.gradient.defined() ? p.gradient + own : own;
      p.gradient_owned = false;
      own.reset();
    }
  }
  context().note_settled(*this);
  if (flags.reshard && !writable_) reshard();
  if (flags.reduce) {
    context().ready_to_reduce(*this);
    return;
  }
  // Kept whole, in the dtype that sums are made in.
  if (const auto dtype = options_.mixed_precision.reduce_dtype)
    for (ShardedParameter& p : parameters_)
      if (p.gradient.defined() && p.gradient.scalar_type() != *dtype && at::isFloatingType(p.gradient.scalar_type())) {
        p.gradient = p.gradient.to(*dtype);
        p.gradient_owned = true;
      }
}

void ParameterGroup::forget_gradients() {
  for (ShardedParameter& p : parameters_) {
    p.gradient.reset();
    p.gradient_owned = p.arrived = p.used = false;
  }
}

bool ParameterGroup::recorded() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const ShardedParameter& p) { return p.used; });
}

bool ParameterGroup::has_trainable() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const ShardedParameter& p) {
    const at::Tensor parameter = p.parameter();
    return parameter.defined() && parameter.requires_grad();
  });
}

std::uint64_t ParameterGroup::fingerprint() const {
  std::uint64_t hash = 1469598103934665603ull;
  const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  for (const ShardedParameter& p : parameters_) {
    for (const char letter : p.name) add(static_cast<unsigned char>(letter));
    add(static_cast<std::uint64_t>(p.dtype) << 8 | static_cast<std::uint64_t>(p.compute_dtype));
    for (const std::int64_t size : p.placement.sharded->shape()) add(static_cast<std::uint64_t>(size));
    for (const char letter : to_string(p.placement.sharded->placements())) add(static_cast<unsigned char>(letter));
    const at::Tensor parameter = p.parameter();
    add(parameter.defined() && parameter.requires_grad());
    add(static_cast<std::uint64_t>(p.row_bytes));
  }
  add(static_cast<std::uint64_t>(options_.mixed_precision.reduce_dtype.value_or(at::ScalarType::Undefined)));
  return hash;
}

ShardContext& ParameterGroup::context() {
  if (!context_) ShardContext::prepare(*this);
  return *context_;
}

std::int64_t ParameterGroup::gathered_bytes() const {
  std::int64_t bytes = slice_.defined() ? static_cast<std::int64_t>(slice_.nbytes()) : 0;
  if (whole_is_flat_) return bytes;
  if (whole_) bytes += static_cast<std::int64_t>(whole_->nbytes());
  if (gather_ && gather_->received.defined()) bytes += static_cast<std::int64_t>(gather_->received.nbytes());
  return bytes;
}

ParameterGroup::Memory ParameterGroup::memory() const {
  Memory memory{.shards = flat_.defined() ? static_cast<std::int64_t>(flat_.nbytes()) : 0, .gathered = gathered_bytes()};
  for (const ShardedParameter& p : parameters_)
    if (p.gradient.defined()) memory.gradients += static_cast<std::int64_t>(p.gradient.nbytes());
  return memory;
}

}  // namespace penstock
