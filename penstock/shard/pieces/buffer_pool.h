// Memory for the buffers of gathers and reductions, which are needed in the same sizes every step.
//
// A tensor of the pool returns its memory when its last handle is destroyed, and the next request for that
// size reuses it: after the first steps nothing is allocated from the system. On CUDA LibTorch's allocator
// does the same, per stream, and the pool forwards to it.
// Thread safety: may be used from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace penstock {

class BufferPool {
 public:
  BufferPool();

  // Uninitialized, contiguous.
  at::Tensor bytes(std::int64_t count, at::Device device) const;
  at::Tensor empty(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) const;
  // Memory for a storage that is filled and released repeatedly; null for 0 bytes.
  at::DataPtr memory(std::int64_t count, at::Device device) const;

  // How often the pool allocated from the system, and how many bytes it holds, lent or not. CPU memory only.
  std::size_t allocations() const;
  std::size_t held_bytes() const;

  struct Shelf;

 private:
  std::shared_ptr<Shelf> shelf_;
};

}  // namespace penstock
