// Mixed precision within a scope: LibTorch's autocast decides which operators compute in 16 bits and which in
// float32.
//
//   const AutocastScope scope(device.type(), at::kBFloat16);
//   y = model->forward(x);  // call backward() outside of the scope; it uses forward's dtypes
//
// Every use of a weight casts it, and its gradients are added up in float32. LibTorch's cache of cast weights
// is off within the scope: it belongs to the process, so that other threads could clear it between two uses
// of a weight, and the last bits of its gradient would depend on their timing. A weight that is used several
// times can be cast with cast_once() before.
//
// Without a dtype the scope does nothing. Construct and destroy it on the same thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace penstock {

class AutocastScope {
 public:
  AutocastScope(at::DeviceType device, std::optional<at::ScalarType> dtype);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  at::DeviceType device_;
  bool active_;
  bool was_enabled_ = false, was_cached_ = true;
  at::ScalarType was_dtype_ = at::kFloat;
};

// Returns whether a model can be computed in a scope of this dtype. LibTorch 1.13 has no float16 on the CPU;
// later versions have it for some processors, which is determined by trying.
bool can_autocast(at::DeviceType device, at::ScalarType dtype);

// The autocast state of this thread: operators are cast the same way under equal states.
struct AutocastState {
  bool cpu = false, cuda = false;
  bool cached = false;  // cast weights are kept in LibTorch's cache; false if autocast is off
  at::ScalarType cpu_dtype = at::kFloat, cuda_dtype = at::kFloat;  // when enabled
  friend bool operator==(const AutocastState&, const AutocastState&) = default;
};
AutocastState autocast_state();

// Makes a state that this or another thread had current within its scope, also if autocast is off in it.
class AutocastStateScope {
 public:
  explicit AutocastStateScope(const AutocastState& state);
  ~AutocastStateScope();
  AutocastStateScope(const AutocastStateScope&) = delete;
  AutocastStateScope& operator=(const AutocastStateScope&) = delete;

 private:
  struct Device {
    at::DeviceType type;
    bool was_enabled;
    at::ScalarType was_dtype;
  };
  static Device set(at::DeviceType type, bool enabled, at::ScalarType dtype);
  Device cpu_, cuda_;
  bool was_cached_;
};

// Clears autocast's cache of cast weights at the start and at the end of this scope if this thread uses it,
// so that weights cast outside are not used inside and the reverse.
class OwnAutocastCache {
 public:
  OwnAutocastCache();
  ~OwnAutocastCache();
  OwnAutocastCache(const OwnAutocastCache&) = delete;
  OwnAutocastCache& operator=(const OwnAutocastCache&) = delete;

 private:
  bool cached_;
};

// Returns the dtype to which cast_once() casts a tensor: that of the scope for float32, otherwise its own.
at::ScalarType dtype_in_scope(const at::Tensor& tensor);

// Within an autocast scope, returns a float32 tensor cast to the scope's dtype, otherwise the tensor itself.
// For a tensor that several operators use: each would cast it, and its gradients would be added up in
// float32.
at::Tensor cast_once(const at::Tensor& tensor);

// The same for a parameter, through autocast's cache of cast weights where that is on: for operators of our
// own, which autocast does not know.
at::Tensor cast_weight(const at::Tensor& parameter);

// Turns autocast off within its scope, for operators that must compute in the dtype of their inputs.
class NoAutocastScope {
 private:
  c10::impl::ExcludeDispatchKeyGuard without_{c10::autocast_dispatch_keyset};
};

}  // namespace penstock
