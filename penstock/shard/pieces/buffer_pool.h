// Memory for the buffers of gathers and reductions, which come and go in the same sizes every step.
//
// A tensor of the pool gives its memory back when its last handle goes, and the next one of that size takes it: after the first
// steps nothing is asked of the system. On CUDA LibTorch's allocator does the same, with streams, and the pool passes on to it.
// Thread rule: any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace penstock {

class BufferPool {
 public:
  BufferPool();

  // Not initialized, contiguous.
  at::Tensor bytes(std::int64_t count, at::Device device) const;
  at::Tensor empty(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) const;
  // Memory for a storage that is filled and emptied: null for no bytes.
  at::DataPtr memory(std::int64_t count, at::Device device) const;

  // How often the pool had to ask the system, and how many bytes it holds, lent or not. Of CPU memory.
  std::size_t allocations() const;
  std::size_t held_bytes() const;

  struct Shelf;

 private:
  std::shared_ptr<Shelf> shelf_;
};

}  // namespace penstock
