#include "penstock/fake.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "penstock/base/describe.h"
#include "penstock/operator_traits.h"
#include "penstock/step_context.h"
#include "penstock/torch/fake/fake_payload.h"
#include "penstock/torch/fake/fake_watch.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock {
namespace detail {
namespace {

// Returns the payload if the tensor is fake, otherwise null.
FakePayload* fake_of(const at::Tensor& tensor) { return payload_as<FakePayload>(tensor); }

at::Device with_index(at::Device device) {
  return device.is_cuda() && !device.has_index() ? at::Device(device.type(), 0) : device;
}

// Code branches on whether a tensor is a lazy conjugate or negative, so a fake tensor must report the same as
// the real one.
void copy_lazy_bits(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_conj() != to.is_conj())
    to._set_conj(from.is_conj());  // a view starts with the bits of its base
  if (from.is_neg() != to.is_neg()) to._set_neg(from.is_neg());
}

at::Tensor meta_like(const at::Tensor& tensor) {
  const at::TensorOptions options =
      tensor.options().device(at::kMeta).requires_grad(false).pinned_memory(false);
  at::Tensor meta;
  if (const std::int64_t offset = tensor.storage_offset(); offset == 0) {
    meta = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  } else {  // storage that extends to the last element
    std::int64_t elements = offset + (tensor.numel() > 0 ? 1 : 0);
    for (std::int64_t i = 0; i < tensor.dim(); ++i)
      elements += std::max<std::int64_t>(tensor.size(i) - 1, 0) * tensor.stride(i);
    meta = at::empty({elements}, options).as_strided(tensor.sizes(), tensor.strides(), offset);
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  copy_lazy_bits(tensor, meta);
  return meta;
}

// Autograd asks the device guard for the streams of a tensor's device. Without CUDA there is no guard, and
// the engine requires one.
void require_grad(const at::Tensor& fake) {
  if (fake.is_cuda() && !c10::impl::hasDeviceGuardImpl(at::kCUDA))
    throw StateError(
        "fake tensors: autograd of this LibTorch build, which has no CUDA, cannot differentiate CUDA "
        "tensors; create them without "
        "requires_grad, or put them on the CPU");
  fake.requires_grad_(true);
}

// The device of a result: that of the arguments; CPU scalars may be mixed with any device.
class CommonDevice {
 public:
  explicit CommonDevice(const OperatorTraits& traits, bool mixing_allowed)
      : traits_(traits), mixing_allowed_(mixing_allowed) {}

  void add(const at::Tensor& tensor, at::Device device, bool fake) {
    const bool number = tensor.dim() == 0 && device.is_cpu();
    if (!device_ || (from_number_ && !number)) {
      device_ = device;
      fake_ = fake;
      from_number_ = number;
    } else if (device != *device_ && !number && !mixing_allowed_) {
      throw ValueError(fmt::format(
          "{}: arguments on different devices, a {} tensor on {} and a {} one on {}; move one of them with "
          "to(device){}",
          traits_.name, fake_ ? "fake" : "real", device_->str(), fake ? "fake" : "real", device.str(),
          fake_ != fake ? ", or make the fake one with to_fake(tensor, device)" : ""));
    }
  }
  at::Device get() const { return device_.value_or(at::kCPU); }

 private:
  const OperatorTraits& traits_;
  bool mixing_allowed_;
  bool fake_ = false;
  bool from_number_ = false;
  std::optional<at::Device> device_;
};

[[noreturn]] void refuse_data_dependence(const OperatorTraits& traits) {
  throw DataDependentError(
      fmt::format("{}: its result depends on values, which a fake tensor does not have; take this operator "
                  "out of what runs "
                  "on fake tensors, or run it with real tensors",
                  traits.name));
}

[[noreturn]] void refuse_missing(const OperatorTraits& traits, const std::string& why) {
  throw NotImplemented(fmt::format(
      "{}: no shape function for fake tensors{}; add one with register_shape_function(\"{}\", ...)",
      traits.name, why.empty() ? "" : " (" + why + ")", traits.name));
}

[[noreturn]] void refuse_real_write(const OperatorTraits& traits, std::size_t argument) {
  throw TypeError(
      fmt::format("{}: argument {} is a real tensor and cannot be written from a fake tensor, which has no "
                  "values; convert it with "
                  "to_fake first, or run under FakeMode, which leaves real tensors alone",
                  traits.name, argument));
}

// Runs the composite kernel of an operator on the fake tensors themselves; the mode intercepts factories
// inside it.
void decompose(const c10::OperatorHandle& op, Stack* stack, FakeMode* mode) {
  FakeMode local;
  const ModeGuard guard(mode ? *mode : local);
  for (const auto key : {c10::DispatchKey::CompositeExplicitAutograd,
                         c10::DispatchKey::CompositeExplicitAutogradNonFunctional})
    if (op.hasKernelForDispatchKey(key)) {
      op.callBoxedForDispatchKey(key, *stack);
      return;
    }
  refuse_missing(traits_of(op), "its composite kernel is no longer registered");
}

// One shape-only call of an operator, from the arguments on the stack to the results.
class FakeCall {
 public:
  FakeCall(const c10::OperatorHandle& op, Stack* stack, FakeMode* mode)
      : op_(op),
        traits_(traits_of(op)),
        rule_(fake_rule(op)),
        stack_(stack),
        mode_(mode),
        base_(stack->size() - traits_.arguments.size()),
        device_(traits_, rule_.mixes_devices) {}

  void run() {
    // A composite kernel may call operators without a meta kernel; then the arguments are needed again.
    const bool may_retry = rule_.kind == FakeRule::Kind::Meta && rule_.composite;
    c10::SmallVector<c10::IValue, 10> original;
    if (mode_ && traits_.pure_view && !any_wrapper()) return run_for_real();
    if (rule_.kind == FakeRule::Kind::Decompose) return decompose(op_, stack_, mode_);
    if (rule_.kind == FakeRule::Kind::DataDependent) return data_dependent();
    if (rule_.kind == FakeRule::Kind::Missing) refuse_missing(traits_, "");
    if (may_retry) original.append(stack_->begin() + static_cast<std::ptrdiff_t>(base_), stack_->end());
    const std::optional<std::int64_t> filling =
        rule_.fills ? whole_number((*stack_)[base_ + 1].toScalar()) : std::nullopt;
    std::unique_ptr<FakePayload::Compared> comparison =
        rule_.compares && mode_ ? comparison_of_real() : nullptr;
    to_meta();
    const at::Device device = result_device();
    try {
      const BelowWrappersGuard below;
      if (rule_.kind == FakeRule::Kind::Shape) {
        const ShapeDeviceScope scope(device);
        rule_.shape->callBoxed(op_, c10::DispatchKeySet(c10::DispatchKey::Meta), stack_);
      } else {
        op_.callBoxed(stack_);
      }
    } catch (const c10::NotImplementedError& error) {
      if (!may_retry) refuse_missing(traits_, error.what_without_backtrace());
      mark_for_decomposition(op_);
      stack_->resize(base_);
      stack_->insert(stack_->end(), std::make_move_iterator(original.begin()),
                     std::make_move_iterator(original.end()));
      return decompose(op_, stack_, mode_);
    }
    wrap_results(device);
    if (filling) note_filled(*filling);
    if (comparison) fake_of((*stack_)[base_].toTensor())->compared = std::move(comparison);
  }

 private:
  struct Outer {
    std::size_t argument;
    c10::IValue value;
  };

  at::Tensor meta_of(const at::Tensor& tensor, bool written, std::size_t argument) {
    if (FakePayload* fake = fake_of(tensor)) {
      device_.add(tensor, fake->device, true);
      return fake->meta;
    }
    if (is_wrapper(tensor))
      penstock::payload_of(tensor)->refuse(
          op_, "it was mixed with a fake tensor; build the subclass from fake tensors instead");
    if (written && !mode_) refuse_real_write(traits_, argument);
    if (tensor.is_meta()) return tensor;
    device_.add(tensor, tensor.device(), false);
    const BelowWrappersGuard below;
    return meta_like(tensor);
  }

  void to_meta() {
    for (std::size_t i = 0; i < traits_.arguments.size(); ++i) {
      const ArgumentTraits& argument = traits_.arguments[i];
      if (argument.kind == ArgumentTraits::Kind::Other) continue;
      c10::IValue& value = (*stack_)[base_ + i];
      if (value.isTensor()) {
        if (!value.toTensor().defined()) continue;
        at::Tensor meta = meta_of(value.toTensor(), argument.written, i);
        if (traits_.any_alias || argument.written) outer_.push_back({i, std::move(value)});
        value = std::move(meta);
      } else if (value.isList()) {
        c10::IValue mapped = map_tensors(
            value, [&](const at::Tensor& tensor) { return meta_of(tensor, argument.written, i); });
        if (traits_.any_alias || argument.written) outer_.push_back({i, std::move(value)});
        value = std::move(mapped);
      }
    }
  }

  at::Device result_device() {
    at::Device device = device_.get();
    if (traits_.device_argument >= 0) {
      c10::IValue& asked = (*stack_)[base_ + static_cast<std::size_t>(traits_.device_argument)];
      if (!asked.isNone()) device = with_index(asked.toDevice());
      asked = at::Device(at::kMeta);
      if (traits_.pin_memory_argument >= 0)
        (*stack_)[base_ + static_cast<std::size_t>(traits_.pin_memory_argument)] = c10::IValue();
    }
    return device;
  }

  const c10::IValue* outer(int argument) const {
    for (const Outer& outer : outer_)
      if (static_cast<int>(outer.argument) == argument) return &outer.value;
    return nullptr;
  }

  void wrap_results(at::Device device) {
    if (traits_.mutates) sync_written();
    for (std::size_t i = 0; i < traits_.returns.size(); ++i) {
      c10::IValue& result = (*stack_)[base_ + i];
      const ReturnAlias& source = traits_.returns[i];
      const c10::IValue* argument =
          source.kind == ReturnAlias::Kind::Fresh ? nullptr : outer(source.argument);
      if (source.kind == ReturnAlias::Kind::Same && argument) {
        result = *argument;
        continue;
      }
      const at::Tensor* viewed =
          argument && argument->isTensor() && fake_of(argument->toTensor()) ? &argument->toTensor() : nullptr;
      if (result.isTensor()) {
        if (result.toTensor().defined()) result = wrap_meta(result.toTensor(), device, viewed);
        if (viewed && fake_of(*viewed)->filled) [[unlikely]]
          fake_of(result.toTensor())->filled = fake_of(*viewed)->filled;
      } else if (result.isList()) {
        result = map_tensors(result, [&](const at::Tensor& meta) { return wrap_meta(meta, device, viewed); });
      }
    }
  }

  // In-place operators may have changed the geometry (transpose_, resize_).
  void sync_written() {
    for (const Outer& outer : outer_)
      if (traits_.arguments[outer.argument].written)
        for_each_tensor(outer.value, [](const at::Tensor& tensor) {
          if (const FakePayload* fake = fake_of(tensor)) sync_geometry(tensor, fake->meta);
        });
  }

  bool any_wrapper() const {
    bool any = false;
    for (std::size_t i = base_; i < stack_->size(); ++i)
      for_each_tensor((*stack_)[i], [&](const at::Tensor& tensor) { any |= is_wrapper(tensor); });
    return any;
  }

  // A view of a real tensor is cheap, changes nothing, and keeps the values readable.
  void run_for_real() {
    const NoModesGuard off;
    op_.callBoxed(stack_);
  }

  static std::optional<std::int64_t> whole_number(const at::Scalar& scalar) {
    return scalar.isIntegral(false) ? std::optional(scalar.toLong()) : std::nullopt;
  }

  void note_filled(std::int64_t value) {
    const at::Tensor& self = (*stack_)[base_].toTensor();
    FakePayload* fake = fake_of(self);
    // The version is incremented when this call returns to autograd. Inference tensors have none.
    if (fake && self.numel() == 1 && self.scalar_type() == at::kLong && !self.is_inference())
      fake->filled = FakePayload::Filled{value, static_cast<std::uint32_t>(self._version()) + 1};
  }

  std::unique_ptr<FakePayload::Compared> comparison_of_real() const {
    const at::Tensor& self = (*stack_)[base_].toTensor();
    if (is_wrapper(self) || self.is_meta() || self.is_inference()) return nullptr;
    return std::make_unique<FakePayload::Compared>(FakePayload::Compared{
        self.detach(), (*stack_)[base_ + 1].toScalar(), static_cast<std::uint32_t>(self._version())});
  }

  // nonzero() of `real == number`: known, because the values of the real tensor are.
  bool find_known_equals() {
    const FakePayload* fake = fake_of((*stack_)[base_].toTensor());
    if (!fake || !fake->compared ||
        fake->compared->version != static_cast<std::uint32_t>(fake->compared->real._version()))
      return false;
    const NoModesGuard off;
    at::Tensor found = fake->compared->real.eq(fake->compared->number).nonzero();
    stack_->resize(base_);
    stack_->emplace_back(std::move(found));
    return true;
  }

  // repeat_interleave with a count, which LibTorch turns into a tensor filled with it.
  bool repeat_by_known_count() {
    const at::Tensor repeats = (*stack_)[base_].toTensor();
    const FakePayload* fake = fake_of(repeats);
    if (!fake || !fake->filled || repeats.is_inference() ||
        fake->filled->version != static_cast<std::uint32_t>(repeats._version()))
      return false;
    at::Tensor indices;
    {
      const BelowWrappersGuard below;
      indices = at::empty({fake->filled->value * repeats.numel()},
                          at::dtype(repeats.scalar_type()).device(at::kMeta));
    }
    const at::Device device = fake->device;
    stack_->resize(base_);
    stack_->emplace_back(wrap_meta(indices, device));
    return true;
  }

  // The values of real tensors are known, so they may be read under the mode.
  void data_dependent() {
    if (!any_wrapper() && !traits_.mutates) return run_for_real();
    if (op_.operator_name().name == "aten::repeat_interleave" && repeat_by_known_count()) return;
    if (op_.operator_name().name == "aten::nonzero" && find_known_equals()) return;
    if (op_.operator_name().name == "aten::equal") {
      // The same tensor twice, or tensors of different sizes: torch::nn::MultiheadAttention uses this to
      // detect self-attention.
      const at::Tensor self = (*stack_)[base_].toTensor(), other = (*stack_)[base_ + 1].toTensor();
      const bool same = fake_of(self) && fake_of(other) && fake_of(self)->meta.is_same(fake_of(other)->meta);
      if (same || self.sizes() != other.sizes()) {
        stack_->resize(base_);
        stack_->emplace_back(same);
        return;
      }
    }
    refuse_data_dependence(traits_);
  }

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  const FakeRule& rule_;
  Stack* stack_;
  FakeMode* mode_;
  std::size_t base_;
  CommonDevice device_;
  c10::SmallVector<Outer, 4> outer_;
};

}  // namespace

void FakePayload::dispatch(const c10::OperatorHandle& op, Stack* stack) {
  if (leftover && !StepContext::current()->trial) [[unlikely]]
    throw StateError(
        describe(fmt::format("{}: an argument", traits_of(op).name),
                 fmt::format("a fake tensor {} without values: {}", c10::str(meta.sizes()), *leftover),
                 "tensors with values, because this is not a trial run",
                 "create it in the module's constructor, write it in place, register it as a buffer, or do "
                 "not keep it while StepContext::current()->trial is set"));
  FakeCall(op, stack, nullptr).run();
}

at::Tensor wrap_meta(const at::Tensor& meta, at::Device device, const at::Tensor* viewed) {
  WrapperGeometry geometry = geometry_of(meta);
  geometry.device = device;
  at::Tensor fake = make_wrapper(c10::make_intrusive<FakePayload>(meta, device), geometry, viewed);
  note_fake(fake);
  copy_lazy_bits(meta, fake);
  return fake;
}

}  // namespace detail

void FakeMode::dispatch(const c10::OperatorHandle& op, Stack* stack) {
  // A subclass built from fake tensors handles its operators itself; the operators it calls come back here.
  const std::size_t count = traits_of(op).arguments.size();
  bool other_subclass = false;
  for (std::size_t i = stack->size() - count; i < stack->size(); ++i)
    for_each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      other_subclass |= is_wrapper(tensor) && !is_fake(tensor);
    });
  if (other_subclass) {
    op.callBoxed(stack);
    return;
  }
  detail::FakeCall(op, stack, this).run();
}

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && payload_as<detail::FakePayload>(tensor) != nullptr;
}

FakeNote* fake_note(const at::Tensor& tensor) {
  detail::FakePayload* payload = payload_as<detail::FakePayload>(tensor);
  return payload ? &payload->note : nullptr;
}

std::uint64_t new_note_owner() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

at::Tensor to_fake(const at::Tensor& real) { return to_fake(real, real.device()); }

at::Tensor to_fake(const at::Tensor& real, at::Device device) {
  at::Tensor meta;
  {
    const at::NoGradGuard no_grad;
    const NoModesGuard no_modes;
    const BelowWrappersGuard below;
    meta = detail::meta_like(real);
  }
  const at::Device placed = detail::with_index(device);
  at::Tensor fake = detail::wrap_meta(meta, placed);
  if (real.requires_grad()) detail::require_grad(fake);
  return fake;
}

at::Tensor make_fake(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<std::int64_t>(sizes[i], 1);
  return make_fake_strided(sizes, strides, options);
}

at::Tensor make_fake_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                             const at::TensorOptions& options) {
  at::Tensor meta;
  {
    const NoModesGuard no_modes;
    const BelowWrappersGuard below;
    meta = at::empty_strided(sizes, strides,
                             options.device(at::kMeta).requires_grad(false).pinned_memory(false));
  }
  const at::Device device = detail::with_index(options.device());
  at::Tensor fake = detail::wrap_meta(meta, device);
  if (options.requires_grad()) detail::require_grad(fake);
  return fake;
}

}  // namespace penstock
