// A number that an owner attaches to a fake tensor and finds on every copy of it: the copies that autograd
// saves, detaches and aliases carry the same note. Tracers use it to identify a tensor without holding it.
//
//   const std::uint64_t me = new_note_owner();
//   *fake_note(x) = {me, 7};
//   const FakeNote* note = fake_note(copy_of_x);       // {me, 7}; null for a tensor that is not fake
//
// A new tensor's note has no owner. A later owner overwrites an earlier one. Thread safety: as for the
// tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

struct FakeNote {
  std::uint64_t owner = 0;  // 0: none
  std::int32_t value = -1;
};

FakeNote* fake_note(const at::Tensor& tensor);
// Returns a number that is unique in the process.
std::uint64_t new_note_owner();

}  // namespace penstock
