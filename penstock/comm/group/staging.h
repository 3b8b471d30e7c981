// Getting tensors into the form a backend moves: contiguous host memory, seen as bytes.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace penstock::comm {

// The memory of a contiguous tensor as bytes. Any dtype: backends then need no knowledge of it.
at::Tensor as_bytes(const at::Tensor& contiguous);

// CPU tensors as they are; CUDA tensors copied into pinned host memory, with one warning per process: the backend for CUDA
// tensors is absent, and this path is slow.
at::Tensor to_host(const at::Tensor& tensor);

// A tensor that a backend writes to: itself when it is contiguous host memory, else a host copy that is written back.
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

// Throws TypeError or ValueError, with the remedy, for a tensor whose memory is not its values: undefined, sparse, a
// subclass, lazily conjugated or negated.
void check_transferable(const at::Tensor& tensor, const char* operation);
void check_transferable(const std::vector<at::Tensor>& tensors, const char* operation);

}  // namespace penstock::comm
