// Which of the fake tensors made in a scope somebody still holds after it.
//
//   FakeWatch watch;
//   {
//     const FakeWatch::Guard guard(watch);
//     module->forward(fake_input);                 // may be entered several times
//   }
//   for (const at::Tensor& kept : watch.survivors()) mark_leftover(kept, "stage 1 kept it from its trial run");
//
// A module may keep a tensor that it made in a run in shape only: a mask or a table of positions that its first forward builds. Such a tensor has
// no values, so a real operator on it must fail with the reason.
// Thread rule: a watch is used by one thread. What autograd's worker threads make is not seen.
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

  // In the order in which they were made.
  std::vector<at::Tensor> survivors() const;

 private:
  friend void note_fake(const at::Tensor& fake);
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> made_;
};

// Every fake tensor that is made is noted with the watch of the thread, if there is one.
void note_fake(const at::Tensor& fake);

// From now on a real operator on the tensor, outside of trial runs and of FakeMode, throws a StateError that says `why`.
void mark_leftover(const at::Tensor& fake, std::string why);

}  // namespace penstock
