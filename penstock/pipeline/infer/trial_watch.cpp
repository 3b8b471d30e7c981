#include "penstock/pipeline/infer/trial_watch.h"

#include <ATen/ATen.h>

#include "penstock/errors.h"
#include "penstock/operator_traits.h"
#include "penstock/tensor_subclass.h"

namespace penstock {
namespace {

const void* key_of(const at::Tensor& part) { return part.storage().unsafeGetStorageImpl(); }

// The tensor itself and the inner tensors of a subclass.
template <class Visit>
void for_each_part(const at::Tensor& tensor, const Visit& visit) {
  if (!tensor.defined()) return;
  if (tensor.has_storage()) visit(tensor);
  const Payload* payload = payload_of(tensor);
  if (!payload) return;
  std::vector<std::pair<std::string, at::Tensor>> inner;
  try {
    inner = payload->inner_tensors();
  } catch (const NotImplemented&) {
    return;
  }
  for (const auto& [name, part] : inner) for_each_part(part, visit);
}

at::Tensor bytes_of(const c10::Storage& storage) {
  return at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()))
      .set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
}

}  // namespace

TrialWatch::TrialWatch(const std::vector<at::Tensor>& registered) {
  for (const at::Tensor& tensor : registered)
    for_each_part(tensor, [&](const at::Tensor& part) { registered_.insert(key_of(part)); });
}

const TrialWatch::Made* TrialWatch::find_made(const at::Tensor& part) const {
  const auto found = made_.find(key_of(part));
  // The address may have been reused after the storage at it was freed.
  return found == made_.end() || found->second.storage.expired() ? nullptr : &found->second;
}

void TrialWatch::note_made(const at::Tensor& part, const Made& sources) {
  Made made = sources;
  if (const Made* known = find_made(part)) {
    made.from_stand_in |= known->from_stand_in;
    made.origins.insert(known->origins.begin(), known->origins.end());
  }
  made.storage = part.storage().getWeakStorageImpl();
  made_.insert_or_assign(key_of(part), std::move(made));
}

void TrialWatch::add_stand_in(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  for_each_part(tensor, [&](const at::Tensor& part) {
    Made made{part.storage().getWeakStorageImpl(), true, {}};
    note_made(part, made);
  });
}

void TrialWatch::add_sources(const at::Tensor& part, Made& sources) {
  if (const Made* made = find_made(part)) {
    sources.from_stand_in |= made->from_stand_in;
    sources.origins.insert(made->origins.begin(), made->origins.end());
  } else if (!registered_.contains(key_of(part)) && !part.unsafeGetTensorImpl()->is_wrapped_number()) {
    before_.try_emplace(key_of(part), part.storage().getWeakStorageImpl());
    sources.origins.insert(key_of(part));
  }
}

void TrialWatch::save(const at::Tensor& part) {
  if (find_made(part) || is_wrapper(part) || part.storage().nbytes() == 0 || saved_.contains(key_of(part)))
    return;
  const NoModesGuard no_modes;
  const at::NoGradGuard no_grad;
  saved_.emplace(key_of(part), Saved{part.storage(), bytes_of(part.storage()).clone()});
}

void TrialWatch::dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  const std::size_t base = stack->size() - traits.arguments.size();
  Made sources{WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()), false, {}};
  std::vector<at::Tensor> written;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < traits.arguments.size(); ++i) {
      if (traits.arguments[i].kind == ArgumentTraits::Kind::Other) continue;
      for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
        for_each_part(tensor, [&](const at::Tensor& part) {
          add_sources(part, sources);
          if (traits.arguments[i].written) save(part);
        });
        if (traits.arguments[i].written) written.push_back(tensor);
      });
    }
  }
  op.callBoxed(stack);
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < traits.returns.size(); ++i) {
    if (traits.returns[i].kind != ReturnAlias::Kind::Fresh) continue;
    for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
      for_each_part(tensor, [&](const at::Tensor& part) { note_made(part, sources); });
    });
  }
  // Storages from before the run will be restored; storages that the run made inherit the sources of what is
  // written to them.
  for (const at::Tensor& tensor : written)
    for_each_part(tensor, [&](const at::Tensor& part) {
      if (find_made(part)) note_made(part, sources);
    });
  for (std::size_t i = 0; i < traits.returns.size(); ++i)
    for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
      if (tensor.defined()) tensors_.emplace_back(tensor.getIntrusivePtr());
    });
}

void TrialWatch::put_back() {
  const NoModesGuard no_modes;
  const at::NoGradGuard no_grad;
  for (const auto& [key, saved] : saved_)
    if (static_cast<std::int64_t>(saved.storage.nbytes()) == saved.bytes.numel())
      bytes_of(saved.storage).copy_(saved.bytes);
  saved_.clear();
}

bool TrialWatch::is_wrong(const Made& made) const {
  if (made.from_stand_in) return true;
  for (const void* origin : made.origins)
    if (const auto found = before_.find(origin); found != before_.end() && found->second.expired())
      return true;
  return false;
}

std::vector<at::Tensor> TrialWatch::wrong_survivors() const {
  std::vector<at::Tensor> found;
  std::unordered_set<const void*> seen;
  for (const auto& weak : tensors_) {
    auto impl = weak.lock();
    if (!impl) continue;
    at::Tensor tensor(std::move(impl));
    for_each_part(tensor, [&](const at::Tensor& part) {
      const Made* made = is_wrapper(part) ? nullptr : find_made(part);
      if (made && is_wrong(*made) && seen.insert(part.unsafeGetTensorImpl()).second) found.push_back(part);
    });
  }
  return found;
}

}  // namespace penstock
