#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>

#include "penstock/torch/compat/version.h"
#include "penstock/torch/kernels/window_attention.h"

namespace penstock::detail {

bool device_has_fused_attention([[maybe_unused]] const at::Tensor& tensor) {
#if PENSTOCK_TORCH_AT_LEAST(2, 5)
  // Fake tensors may be on a device that does not exist here.
  return at::globalContext().userEnabledFlashSDP() && tensor.get_device() < c10::cuda::device_count() &&
         at::cuda::getDeviceProperties(tensor.get_device())->major >= 8;
#else
  return false;
#endif
}

}  // namespace penstock::detail
