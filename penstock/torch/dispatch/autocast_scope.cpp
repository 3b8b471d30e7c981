#include "penstock/torch/dispatch/autocast_scope.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <exception>

#include "penstock/torch/compat/cpu_bfloat16.h"
#include "penstock/torch/compat/version.h"

namespace penstock {

namespace {

#if PENSTOCK_TORCH_AT_LEAST(2, 4)
bool is_enabled(at::DeviceType device) { return at::autocast::is_autocast_enabled(device); }
void set_enabled(at::DeviceType device, bool enabled) { at::autocast::set_autocast_enabled(device, enabled); }
at::ScalarType dtype_of(at::DeviceType device) { return at::autocast::get_autocast_dtype(device); }
void set_dtype(at::DeviceType device, at::ScalarType dtype) {
  at::autocast::set_autocast_dtype(device, dtype);
}
#else
bool is_enabled(at::DeviceType device) {
  return device == at::kCUDA ? at::autocast::is_enabled() : at::autocast::is_cpu_enabled();
}
void set_enabled(at::DeviceType device, bool enabled) {
  device == at::kCUDA ? at::autocast::set_enabled(enabled) : at::autocast::set_cpu_enabled(enabled);
}
at::ScalarType dtype_of(at::DeviceType device) {
  return device == at::kCUDA ? at::autocast::get_autocast_gpu_dtype()
                             : at::autocast::get_autocast_cpu_dtype();
}
void set_dtype(at::DeviceType device, at::ScalarType dtype) {
  device == at::kCUDA ? at::autocast::set_autocast_gpu_dtype(dtype)
                      : at::autocast::set_autocast_cpu_dtype(dtype);
}
#endif

}  // namespace

AutocastScope::AutocastScope(at::DeviceType device, std::optional<at::ScalarType> dtype)
    : device_(device), active_(dtype.has_value()) {
  if (!active_) return;
  if (device_ == at::kCPU && dtype == at::kBFloat16) ensure_cpu_bfloat16();
  was_enabled_ = is_enabled(device_);
  was_dtype_ = dtype_of(device_);
  was_cached_ = at::autocast::is_autocast_cache_enabled();
  set_dtype(device_, *dtype);
  set_enabled(device_, true);
  at::autocast::set_autocast_cache_enabled(false);
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (!active_) return;
  // This scope caches nothing, but LibTorch's own scopes within it leave it to the outermost to clear.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(was_cached_);
  set_enabled(device_, was_enabled_);
  set_dtype(device_, was_dtype_);
}

bool can_autocast(at::DeviceType device, at::ScalarType dtype) {
  try {
    const AutocastScope scope(device, dtype);
    if (device != at::kCPU || dtype != at::kHalf) return true;
    // LibTorch 2 accepts float16 on every processor, but has matrix products for some only. The size is one
    // for which oneDNN is used.
    const at::Tensor rows = at::ones({4, 64, 64});
    at::matmul(at::linear(rows, rows[0]), rows);
    return true;
  } catch (
      const std::exception&) {  // c10::Error when enabling it, oneDNN's own type in a product: not supported
    return false;
  }
}

AutocastState autocast_state() {
  AutocastState state;
  state.cpu = is_enabled(at::kCPU);
  state.cuda = is_enabled(at::kCUDA);
  if (state.cpu) state.cpu_dtype = dtype_of(at::kCPU);
  if (state.cuda) state.cuda_dtype = dtype_of(at::kCUDA);
  state.cached = (state.cpu || state.cuda) && at::autocast::is_autocast_cache_enabled();
  return state;
}

AutocastStateScope::Device AutocastStateScope::set(at::DeviceType type, bool enabled, at::ScalarType dtype) {
  const Device before{type, is_enabled(type), dtype_of(type)};
  if (enabled) set_dtype(type, dtype);
  set_enabled(type, enabled);
  return before;
}

AutocastStateScope::AutocastStateScope(const AutocastState& state)
    : cpu_(set(at::kCPU, state.cpu, state.cpu_dtype)),
      cuda_(set(at::kCUDA, state.cuda, state.cuda_dtype)),
      was_cached_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(state.cached);
}

AutocastStateScope::~AutocastStateScope() {
  at::autocast::set_autocast_cache_enabled(was_cached_);
  for (const Device& device : {cpu_, cuda_}) {
    set_enabled(device.type, device.was_enabled);
    set_dtype(device.type, device.was_dtype);
  }
}

OwnAutocastCache::OwnAutocastCache() : cached_(at::autocast::is_autocast_cache_enabled()) {
  if (cached_) at::autocast::clear_cache();
}
OwnAutocastCache::~OwnAutocastCache() {
  if (cached_) at::autocast::clear_cache();
}

namespace {

// The dtype to which a tensor is cast in the current scope, if any.
std::optional<at::ScalarType> cast_dtype(const at::Tensor& tensor) {
  const at::DeviceType device = tensor.device().type();
  const bool known = device == at::kCPU || device == at::kCUDA;
  if (!known || tensor.scalar_type() != at::kFloat || !is_enabled(device)) return std::nullopt;
  return dtype_of(device);
}

}  // namespace

at::ScalarType dtype_in_scope(const at::Tensor& tensor) {
  return cast_dtype(tensor).value_or(tensor.scalar_type());
}

at::Tensor cast_once(const at::Tensor& tensor) {
  const auto dtype = cast_dtype(tensor);
  return dtype ? tensor.to(*dtype) : tensor;
}

at::Tensor cast_weight(const at::Tensor& parameter) {
  const auto dtype = cast_dtype(parameter);
  return dtype ? at::autocast::cached_cast(*dtype, parameter, parameter.device().type()) : parameter;
}

}  // namespace penstock
