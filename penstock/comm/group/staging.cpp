#include "penstock/comm/group/staging.h"

#include <fmt/format.h>

#include "penstock/errors.h"
#include "penstock/tensor_subclass.h"

#include "penstock/base/warnings.h"

namespace penstock::comm {

namespace {

void warn_host_path() {
  warn_once("comm",
            "CUDA tensors are copied through host memory, because no NCCL communicator with one GPU per rank "
            "is available; give each rank "
            "its own GPU for full speed");
}

}  // namespace

at::Tensor as_bytes(const at::Tensor& contiguous) {
  // A view by pointer: view(dtype) rejects some dtypes and 0-dim tensors. The deleter also keeps the tensor
  // alive, for code that holds only the view.
  return at::from_blob(
      contiguous.data_ptr(), {static_cast<std::int64_t>(contiguous.nbytes())}, [keep = contiguous](void*) {},
      at::TensorOptions().dtype(at::kByte));
}

at::Tensor to_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  warn_host_path();
  at::Tensor host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
  host.copy_(tensor);
  return host;
}

HostCopy::HostCopy(const at::Tensor& tensor, Direction direction) : target_(tensor) {
  if (!tensor.is_cuda() && tensor.is_contiguous()) {
    host_ = tensor;
    return;
  }
  copied_ = true;
  if (tensor.is_cuda()) warn_host_path();
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.is_cuda()) options = options.pinned_memory(true);
  host_ = at::empty(tensor.sizes(), options);
  if (direction == Direction::InOut) host_.copy_(tensor.detach());
}

void check_transferable(const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined() || tensor.layout() != at::kStrided)
    throw TypeError(fmt::format("{}: expected a dense tensor, got {}; convert it with to_dense()", operation,
                                tensor.defined() ? "a sparse one" : "an undefined one"));
  if (const Payload* payload = payload_of(tensor))
    throw TypeError(fmt::format(
        "{}: the tensor is a subclass ({}) without memory of its own; send the tensors that it wraps",
        operation, payload->kind()));
  if (tensor.is_conj() || tensor.is_neg())
    throw ValueError(fmt::format(
        "{}: the tensor is lazily {}, so its memory does not hold its values; call {} first", operation,
        tensor.is_conj() ? "conjugated" : "negated", tensor.is_conj() ? "resolve_conj()" : "resolve_neg()"));
}

void check_transferable(const std::vector<at::Tensor>& tensors, const char* operation) {
  for (const at::Tensor& tensor : tensors) check_transferable(tensor, operation);
}

}  // namespace penstock::comm
