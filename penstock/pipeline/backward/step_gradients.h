// The gradients that one step adds to what .grad() held before. They are divided by the number of microbatches, or summed over copies,
// and what was there before is not, so that steps which accumulate weigh the same.
//
// In one buffer where that can be done: what .grad() holds is multiplied by the divisor when the step begins, backwards add to it, and
// the division at the end is that of the whole. For a number of microbatches that is a power of two this is exact: the bits are those
// of (loss / n).backward() in one process. For others what was there before is rounded twice, which float32 and float64 can afford.
//
// In a second buffer elsewhere: what .grad() holds is set aside and added at the end. That is so for
//   - steps whose gradients somebody uses alone before they are added (`alone`; modules that reduce their own, gradient_sync.h),
//   - float16, where the product could overflow, and bfloat16 unless the divisor is a power of two,
//   - gradients with a replicated placement, to which autograd could not add terms of a sum without communication.
#pragma once

#include <map>
#include <vector>

#include "penstock/stage.h"

namespace penstock::pipeline {

class StepGradients {
 public:
  // `alone`: .grad() must hold the gradients of this step alone until add_earlier(). An object that is given up leaves what was there
  // before in .grad(), and with it, where there is one buffer, what the step had added until then.
  StepGradients(const std::vector<PipelineStage>& stages, int divisor, bool alone);
  ~StepGradients();
  StepGradients(const StepGradients&) = delete;
  StepGradients& operator=(const StepGradients&) = delete;

  // The gradients of this stage are complete: divides them. Parameters that other stages of this rank share wait for `divide_all`.
  void divide_stage(int stage);
  void divide_all();
  // Adds what was set aside.
  void add_earlier();

 private:
  struct Parameter {
    at::Tensor tensor;
    at::Tensor before;       // what was set aside
    bool multiplied = false;  // .grad() holds what was there before, times the divisor
    int stages = 0;
    bool divided = false;
  };
  void divide(const std::vector<Parameter*>& parameters);

  int divisor_;
  std::vector<Parameter> parameters_;
  std::map<int, std::vector<std::size_t>> by_stage_;
};

}  // namespace penstock::pipeline
