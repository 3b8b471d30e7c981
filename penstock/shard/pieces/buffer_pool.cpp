#include "penstock/shard/pieces/buffer_pool.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <map>
#include <mutex>
#include <vector>

#include "penstock/shard/pieces/piece_copy.h"

namespace penstock {

struct BufferPool::Shelf {
  std::mutex mutex;
  std::map<std::size_t, std::vector<at::DataPtr>> free;
  std::size_t allocations = 0, held_bytes = 0;
};

namespace {

// Passed to the deleter of lent memory: where it came from. The shelf lives as long as any of its memory is
// lent.
struct Loan {
  std::shared_ptr<BufferPool::Shelf> shelf;
  std::size_t bytes;
  at::DataPtr memory;
};

void return_memory(void* context) {
  std::unique_ptr<Loan> loan(static_cast<Loan*>(context));
  const std::lock_guard lock(loan->shelf->mutex);
  loan->shelf->free[loan->bytes].push_back(std::move(loan->memory));
}

constexpr std::size_t kStep = 64;  // sizes in the same step share memory

}  // namespace

BufferPool::BufferPool() : shelf_(std::make_shared<Shelf>()) {}

at::DataPtr BufferPool::memory(std::int64_t count, at::Device device) const {
  const std::size_t bytes = (static_cast<std::size_t>(count) + kStep - 1) / kStep * kStep;
  if (bytes == 0) return at::DataPtr(nullptr, device);
  if (!device.is_cpu()) return at::GetAllocator(device.type())->allocate(bytes);
  auto loan = std::make_unique<Loan>(Loan{shelf_, bytes, {}});
  {
    const std::lock_guard lock(shelf_->mutex);
    std::vector<at::DataPtr>& free = shelf_->free[bytes];
    if (!free.empty()) {
      loan->memory = std::move(free.back());
      free.pop_back();
    } else {
      shelf_->allocations += 1;
      shelf_->held_bytes += bytes;
    }
  }
  if (!loan->memory) loan->memory = c10::GetCPUAllocator()->allocate(bytes);
  void* data = loan->memory.get();
  return at::DataPtr(data, loan.release(), &return_memory, device);
}

at::Tensor BufferPool::bytes(std::int64_t count, at::Device device) const {
  if (!device.is_cpu()) return at::empty({count}, at::TensorOptions(at::kByte).device(device));
  at::DataPtr data = memory(count, device);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::size_t>(count), std::move(data), nullptr,
      /*resizable=*/false));
  return at::empty({0}, at::TensorOptions(at::kByte).device(device))
      .set_(std::move(storage), 0, {count}, {1});
}

at::Tensor BufferPool::empty(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) const {
  if (!device.is_cpu()) return at::empty(shape, at::TensorOptions(dtype).device(device));
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  return typed_part(bytes(c10::multiply_integers(shape) * item, device), 0, dtype, shape);
}

std::size_t BufferPool::allocations() const {
  const std::lock_guard lock(shelf_->mutex);
  return shelf_->allocations;
}

std::size_t BufferPool::held_bytes() const {
  const std::lock_guard lock(shelf_->mutex);
  return shelf_->held_bytes;
}

}  // namespace penstock
