#include "penstock/torch/switch_data.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <typeinfo>

#include "penstock/base/errors.h"
#include "penstock/torch/dispatch_kernel.h"
#include "penstock/torch/version.h"
#include "penstock/torch/wrapper_impl.h"

namespace penstock {
namespace {

// A hook of the tensor's gradient that leaves it alone: hooks live as long as their tensor.
struct Keeper final : torch::autograd::FunctionPreHook {
  explicit Keeper(std::shared_ptr<void> object) : object(std::move(object)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override { return gradients; }
  std::shared_ptr<void> object;
};

}  // namespace

void switch_data(const at::Tensor& self, const at::Tensor& other) {
  PENSTOCK_INVARIANT(self.sizes() == other.sizes(), "a tensor is switched to one of the same sizes");
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (typeid(*impl) == typeid(c10::TensorImpl) && is_wrapper(other)) {
    detail::install_dispatch_kernel();
    detail::AdoptedImpl::adopt(impl);
  }
  impl->shallow_copy_from(other.getIntrusivePtr());
}

void tie_lifetime(const at::Tensor& tensor, std::shared_ptr<void> object) {
#if PENSTOCK_TORCH_AT_LEAST(2, 0)
  torch::autograd::impl::add_hook(tensor, std::make_unique<Keeper>(std::move(object)));
#else
  torch::autograd::impl::add_hook(tensor, std::make_shared<Keeper>(std::move(object)));
#endif
}

}  // namespace penstock
