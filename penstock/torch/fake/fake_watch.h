// Finds the fake tensors created in a scope that are still referenced after it.
//
//   FakeWatch watch;
//   {
//     const FakeWatch::Guard guard(watch);
//     module->forward(fake_input);                 // may be entered several times
//   }
//   for (const at::Tensor& kept : watch.survivors()) mark_leftover(kept,
//       "stage 1 kept it from its trial run");
//
// A module may keep a tensor that it created in a shape-only run, such as a mask or position table built by
// its first forward. That tensor has no values, so a real operator on it must fail with the reason.
// Thread safety: a watch is used by one thread. Tensors created on autograd's worker threads are not seen.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace penstock {

class FakeWatch {
 public:
  class Guard {
   public:
    explicit Guard(FakeWatch& watch);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    FakeWatch* before_;
  };

  // In the order of creation.
  std::vector<at::Tensor> survivors() const;

 private:
  friend void note_fake(const at::Tensor& fake);
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> made_;
};

// Records a new fake tensor in the thread's watch, if there is one.
void note_fake(const at::Tensor& fake);

// From now on, a real operator on the tensor outside of trial runs and FakeMode throws a StateError that
// contains `why`.
void mark_leftover(const at::Tensor& fake, std::string why);

}  // namespace penstock
