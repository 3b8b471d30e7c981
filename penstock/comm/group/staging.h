// Converts tensors to the form that a backend transfers: contiguous host memory, viewed as bytes.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace penstock::comm {

// Returns the memory of a contiguous tensor as bytes. Accepts any dtype, so that backends need not know it.
at::Tensor as_bytes(const at::Tensor& contiguous);

// Returns CPU tensors unchanged and copies CUDA tensors into pinned host memory. Copying warns once per
// process: the backend for CUDA tensors is absent, and this path is slow.
at::Tensor to_host(const at::Tensor& tensor);

// A tensor that a backend writes to: the tensor itself if it is contiguous host memory, else a host copy that
// is written back.
class HostCopy {
 public:
  enum class Direction { Out, InOut };  // InOut: the copy starts with the tensor's values
  HostCopy(const at::Tensor& tensor, Direction direction);

  const at::Tensor& host() const { return host_; }
  bool copied() const { return copied_; }
  void write_back() const { target_.copy_(host_); }

 private:
  at::Tensor target_;
  at::Tensor host_;
  bool copied_ = false;
};

// Throws TypeError or ValueError, with the remedy, for a tensor whose memory does not hold its values:
// undefined, sparse, a subclass, lazily conjugated or negated.
void check_transferable(const at::Tensor& tensor, const char* operation);
void check_transferable(const std::vector<at::Tensor>& tensors, const char* operation);

}  // namespace penstock::comm
