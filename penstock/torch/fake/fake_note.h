// A number that one owner writes on a fake tensor, found again on every copy of it: the copies that autograd saves, detaches and views as
// itself carry the same note. By it a tracer knows a tensor without holding it.
//
//   const std::uint64_t me = new_note_owner();
//   *fake_note(x) = {me, 7};
//   const FakeNote* note = fake_note(copy_of_x);       // {me, 7}; null for a tensor that is not fake
//
// A new tensor has a note of nobody. A later owner overwrites an earlier one. Thread rule: as for the tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

struct FakeNote {
  std::uint64_t owner = 0;  // 0: nobody
  std::int32_t value = -1;
};

FakeNote* fake_note(const at::Tensor& tensor);
// Never the same twice in a process.
std::uint64_t new_note_owner();

}  // namespace penstock
