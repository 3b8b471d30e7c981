#include "penstock/torch/compat/cpu_bfloat16.h"

#include <ATen/ATen.h>

#include <mutex>
#include <thread>

#include "penstock/base/warnings.h"
#include "penstock/torch/compat/version.h"

namespace penstock {

void ensure_cpu_bfloat16() {
#if !PENSTOCK_TORCH_AT_LEAST(2, 0)
  static std::once_flag once;
  std::call_once(once, [] {
    bool works = true;
    // On a separate thread, so that the modes and guards of the calling thread do not apply.
    std::thread([&] {
      const at::NoGradGuard no_grad;
      try {
        const at::Tensor one = at::ones({2, 2}, at::kBFloat16);
        at::gelu(at::mm(one, one));
      } catch (const std::exception&) {
        works = false;
      }
    }).join();
    if (works) return;
    at::globalContext().setUserEnabledMkldnn(false);
    warn_once("torch",
              "this LibTorch has no oneDNN kernels for bfloat16 on this processor; oneDNN is switched off "
              "for the process");
  });
#endif
}

}  // namespace penstock
