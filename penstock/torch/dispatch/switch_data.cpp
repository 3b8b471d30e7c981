#include "penstock/torch/dispatch/switch_data.h"

#include <memory>
#include <typeinfo>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/dispatch_kernel.h"
#include "penstock/torch/dispatch/wrapper_impl.h"

namespace penstock {

void switch_data(const at::Tensor& self, const at::Tensor& other) {
  PENSTOCK_INVARIANT(self.sizes() == other.sizes(), "a tensor is switched to one of the same sizes");
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (typeid(*impl) == typeid(c10::TensorImpl) && is_wrapper(other)) {
    detail::install_dispatch_kernel();
    detail::AdoptedImpl::adopt(impl);
  }
  impl->shallow_copy_from(other.getIntrusivePtr());
}

// Held by a gradient hook that does nothing: hooks live as long as their tensor.
void tie_lifetime(const at::Tensor& tensor, std::shared_ptr<void> object) {
  const bool requires_grad = tensor.requires_grad();
  tensor.set_requires_grad(true);  // hooks are only allowed on tensors that require gradients
  tensor.register_hook([object = std::move(object)](const at::Tensor&) {});
  tensor.set_requires_grad(requires_grad);
}

}  // namespace penstock
