#include "penstock/fake.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "penstock/operator_traits.h"
#include "penstock/torch/fake/fake_payload.h"

namespace penstock {
namespace {

using detail::FakePayload;

const FakePayload* fake_of(const at::Tensor& tensor) {
  return tensor.defined() ? payload_as<FakePayload>(tensor) : nullptr;
}

// Shared by tensors that are views of one another.
const void* memory_of(const FakePayload& fake) { return fake.meta.storage().unsafeGetStorageImpl(); }

bool any_fake(const std::vector<c10::IValue>& values) {
  bool any = false;
  for (const c10::IValue& value : values)
    for_each_tensor(value, [&](const at::Tensor& tensor) { any |= fake_of(tensor) != nullptr; });
  return any;
}

// In older versions LibTorch's tag does not mark all of them; a generator among the arguments does.
bool draws_numbers(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return true;
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    return argument.type()->str().find("Generator") != std::string::npos;
  });
}

// Separate handles to the same fake tensors.
std::vector<c10::IValue> own_handles(const c10::IValue* first, std::size_t count) {
  std::vector<c10::IValue> copies;
  for (std::size_t i = 0; i < count; ++i)
    copies.push_back(map_tensors(first[i], [](const at::Tensor& tensor) {
      Payload* payload = fake_of(tensor) ? payload_of(tensor) : nullptr;
      return payload ? make_wrapper_like(PayloadPtr::reclaim_copy(payload), tensor) : tensor;
    }));
  return copies;
}

// The fake parameters and buffers of a module tree, each once.
std::vector<at::Tensor> fake_tensors(torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto add = [&](const at::Tensor& tensor) {
    if (is_fake(tensor) && seen.insert(tensor.unsafeGetTensorImpl()).second) tensors.push_back(tensor);
  };
  for (const at::Tensor& parameter : module.parameters()) add(parameter);
  for (const at::Tensor& buffer : module.buffers()) add(buffer);
  return tensors;
}

}  // namespace

void DeferredInit::dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  const std::size_t base = stack->size() - traits.arguments.size();
  Step step{op, own_handles(stack->data() + base, traits.arguments.size()), {}};
  if (traits.mutates)
    for (std::size_t i = 0; i < traits.arguments.size(); ++i)
      if (traits.arguments[i].written)
        for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
          if (!is_wrapper(tensor) && tensor.has_storage())
            stale_.insert(tensor.storage().unsafeGetStorageImpl());
        });
  fake_.dispatch(op, stack);
  step.results = own_handles(stack->data() + base, traits.returns.size());
  if (!any_fake(step.arguments) && !any_fake(step.results)) return;
  steps_.push_back(std::move(step));
  replayed_.push_back(false);
}

void DeferredInit::materialize(torch::nn::Module& module, std::optional<at::Device> device) {
  materialize(fake_tensors(module), device);
}

void DeferredInit::materialize(const std::vector<at::Tensor>& tensors, std::optional<at::Device> device) {
  const NoModesGuard real;
  // The values are computed below autograd, as in initialization.
  const at::AutoDispatchBelowADInplaceOrView below;
  // Casts made by autocast are among the recorded operators.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const std::vector<bool> needed = steps_needed(tensors);
  for (std::size_t i = 0; i < steps_.size(); ++i)
    if (needed[i]) replay(i);
  for (const at::Tensor& tensor : tensors) {
    if (!is_fake(tensor)) continue;
    const auto found = real_.find(fake_of(tensor));
    if (found == real_.end())
      throw StateError(
          fmt::format("DeferredInit: a fake tensor of shape {} was not created under this mode; materialize "
                      "it with the DeferredInit "
                      "that it was created under, or with materialize_empty",
                      c10::str(tensor.sizes())));
    // Parts that are materialized later see the tensor on its new device.
    if (device && found->second.device() != *device) found->second = found->second.to(*device);
    replace_data(tensor, found->second);
  }
}

std::vector<bool> DeferredInit::steps_needed(const std::vector<at::Tensor>& tensors) const {
  std::unordered_set<const void*> wanted;
  for (const at::Tensor& tensor : tensors)
    if (const FakePayload* fake = fake_of(tensor)) wanted.insert(memory_of(*fake));
  std::vector<bool> needed(steps_.size(), false);
  for (std::size_t i = steps_.size(); i-- > 0;) {
    if (replayed_[i]) continue;
    const Step& step = steps_[i];
    const OperatorTraits& traits = traits_of(step.op);
    bool gives = false;
    const auto look = [&](const at::Tensor& tensor) {
      if (const FakePayload* fake = fake_of(tensor)) gives |= wanted.count(memory_of(*fake)) > 0;
    };
    for (const c10::IValue& result : step.results) for_each_tensor(result, look);
    for (std::size_t j = 0; j < step.arguments.size(); ++j)
      if (traits.arguments[j].written) for_each_tensor(step.arguments[j], look);
    if (!gives) continue;
    needed[i] = true;
    for (const c10::IValue& argument : step.arguments)
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (const FakePayload* fake = fake_of(tensor)) wanted.insert(memory_of(*fake));
      });
  }
  return needed;
}

// Real tensors among the arguments and results of recorded operators, and who else holds them.
class DeferredInit::Holders {
 public:
  explicit Holders(const std::vector<Step>& steps) {
    for (const Step& step : steps)
      for (const auto* values : {&step.arguments, &step.results})
        for (const c10::IValue& value : *values)
          for_each_tensor(value, [&](const at::Tensor& tensor) {
            if (!is_wrapper(tensor) && tensor.has_storage())
              ++tensors_[tensor.storage().unsafeGetStorageImpl()][tensor.unsafeGetTensorImpl()];
          });
  }
  // Returns whether something outside of the record holds the tensor or a view of the same memory.
  bool held_elsewhere(const at::Tensor& tensor) const {
    const auto& known = tensors_.at(tensor.storage().unsafeGetStorageImpl());
    for (const auto& [impl, count] : known)
      if (c10::raw::intrusive_ptr::use_count(const_cast<c10::TensorImpl*>(impl)) > count) return true;
    return tensor.storage().use_count() > known.size();
  }

 private:
  std::unordered_map<const void*, std::unordered_map<const c10::TensorImpl*, std::size_t>> tensors_;
};

std::vector<at::Tensor> DeferredInit::replayable(const std::vector<at::Tensor>& tensors) const {
  if (tensors.empty()) return {};
  const Holders holders(steps_);
  const auto values_are_known = [&](const at::Tensor& wanted) {
    const FakePayload* goal = fake_of(wanted);
    if (!goal) return false;
    const std::vector<bool> needed = steps_needed({wanted});
    std::unordered_set<const FakePayload*> made;
    bool known = true;
    for (std::size_t i = 0; i < steps_.size() && known; ++i) {
      if (!needed[i]) continue;
      const Step& step = steps_[i];
      known = !draws_numbers(step.op);
      for (const c10::IValue& argument : step.arguments)
        for_each_tensor(argument, [&](const at::Tensor& tensor) {
          if (const FakePayload* fake = fake_of(tensor)) {
            known = known && (made.contains(fake) || real_.contains(fake));
          } else {
            known = known && !is_wrapper(tensor) && tensor.has_storage() &&
                    !stale_.contains(tensor.storage().unsafeGetStorageImpl()) &&
                    (tensor.unsafeGetTensorImpl()->is_wrapped_number() || holders.held_elsewhere(tensor));
          }
        });
      for (const c10::IValue& result : step.results)
        for_each_tensor(result, [&](const at::Tensor& tensor) {
          if (const FakePayload* fake = fake_of(tensor)) made.insert(fake);
        });
    }
    return known && (made.contains(goal) || real_.contains(goal));
  };
  std::vector<at::Tensor> found;
  for (const at::Tensor& tensor : tensors)
    if (values_are_known(tensor)) found.push_back(tensor);
  return found;
}

at::Tensor DeferredInit::real_of(const at::Tensor& tensor) const {
  const FakePayload* fake = fake_of(tensor);
  if (!fake) return tensor;
  const auto found = real_.find(fake);
  if (found == real_.end())
    throw StateError(
        fmt::format("DeferredInit: the values of a module depend on a fake tensor of shape {} that was not "
                    "created under this mode",
                    c10::str(tensor.sizes())));
  return found->second;
}

void DeferredInit::replay(std::size_t index) {
  Step& step = steps_[index];
  Stack stack;
  for (const c10::IValue& argument : step.arguments)
    stack.push_back(map_tensors(argument, [&](const at::Tensor& tensor) { return real_of(tensor); }));
  step.op.callBoxed(&stack);
  for (std::size_t i = 0; i < step.results.size(); ++i) {
    std::vector<at::Tensor> values;
    for_each_tensor(stack[i], [&](const at::Tensor& tensor) { values.push_back(tensor); });
    std::size_t at = 0;
    for_each_tensor(step.results[i], [&](const at::Tensor& tensor) {
      const at::Tensor& value = values.at(at++);
      if (const FakePayload* fake = fake_of(tensor)) real_[fake] = value;
    });
  }
  replayed_[index] = true;
}

void materialize_empty(torch::nn::Module& module, std::optional<at::Device> device) {
  const NoModesGuard real;
  std::unordered_map<const void*, at::Tensor>
      flat;  // one per memory block, so that tied parameters stay tied
  for (const at::Tensor& tensor : fake_tensors(module)) {
    const FakePayload& fake = *fake_of(tensor);
    at::Tensor& memory = flat[memory_of(fake)];
    if (!memory.defined()) {
      const std::int64_t bytes = static_cast<std::int64_t>(fake.meta.storage().nbytes());
      memory = at::empty({bytes}, at::dtype(at::kByte).device(device.value_or(fake.device)));
    }
    at::Tensor typed = at::empty({0}, at::dtype(tensor.scalar_type()).device(memory.device()));
    typed.set_(memory.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
    replace_data(tensor, typed);
  }
}

}  // namespace penstock
