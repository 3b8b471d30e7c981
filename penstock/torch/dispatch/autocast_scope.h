// Mixed precision for a scope: operators that gain by it compute in 16 bits, the others in float32, as LibTorch's autocast decides.
//
//   const AutocastScope scope(device.type(), at::kBFloat16);
//   y = model->forward(x);                                    // backward() follows what forward did, outside of the scope
//
// Weights are cast once within the outermost scope of a thread. Without a dtype it does nothing. Made and destroyed on one thread.
#pragma once

#include <ATen/core/Tensor.h>

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
  bool was_enabled_ = false;
  at::ScalarType was_dtype_ = at::kFloat;
};

// Whether a model can be computed in a scope of this dtype. LibTorch 1.13 has no float16 on the CPU, later ones have it for some processors;
// that is tried out.
bool can_autocast(at::DeviceType device, at::ScalarType dtype);

// What autocast does on this thread: with equal states operators are cast alike.
struct AutocastState {
  bool cpu = false, cuda = false;
  at::ScalarType cpu_dtype = at::kFloat, cuda_dtype = at::kFloat;  // where it is on
  friend bool operator==(const AutocastState&, const AutocastState&) = default;
};
AutocastState autocast_state();

// Weights that autocast has cast and keeps for the rest of its scope are forgotten, at the beginning and at the end of this one: those from
// outside are not seen inside, and the other way round.
class OwnAutocastCache {
 public:
  OwnAutocastCache();
  ~OwnAutocastCache();
  OwnAutocastCache(const OwnAutocastCache&) = delete;
  OwnAutocastCache& operator=(const OwnAutocastCache&) = delete;
};

// Within a scope: a float32 tensor in the scope's dtype, else the tensor itself. For what several operators take in: each of them would cast
// it, and its gradients would be added up in float32.
at::Tensor cast_once(const at::Tensor& tensor);

}  // namespace penstock
