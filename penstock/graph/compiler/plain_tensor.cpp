#include "penstock/graph/compiler/plain_tensor.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

namespace penstock::graph {
namespace {

// The keys of an ordinary tensor. Those of one made in inference mode are fewer.
c10::DispatchKeySet keys_of(c10::DispatchKey backend, c10::DeviceType device) {
  const c10::InferenceMode off(false);
  return c10::TensorImpl(c10::DispatchKeySet(backend), caffe2::TypeMeta::Make<float>(), c10::Device(device))
      .key_set();
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  static const c10::DispatchKeySet cpu = keys_of(c10::DispatchKey::CPU, c10::kCPU);
  static const c10::DispatchKeySet cuda = keys_of(c10::DispatchKey::CUDA, c10::kCUDA);
  static constexpr c10::DispatchKeySet kAutograd = c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::DispatchKeySet keys = tensor.key_set() | kAutograd;
  return keys == (cpu | kAutograd) || keys == (cuda | kAutograd);
}

bool is_owned_alone(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 && tensor.storage().resizable();
}

bool is_laid_out_as(const at::Tensor& tensor, const StridedLayout& layout) {
  return tensor.sizes() == at::IntArrayRef(layout.sizes) &&
         tensor.strides() == at::IntArrayRef(layout.strides) &&
         tensor.storage_offset() == layout.storage_offset;
}

}  // namespace penstock::graph
