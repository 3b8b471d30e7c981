// Separates the gradients that one step adds from those .grad() held before. Only the new ones are divided by
// the number of microbatches or summed over copies, so that accumulated steps have equal weight.
//
// With one buffer, where possible: .grad() is multiplied by the divisor when the step begins, backwards add
// to it, and the division at the end applies to the whole. If the number of microbatches is a power of two
// this is exact: the bits are those of (loss / n).backward() in one process. Otherwise the earlier gradients
// are rounded twice, which is acceptable in float32 and float64.
//
// With a second buffer otherwise: .grad() is set aside and added back at the end. This is used for
//   - steps whose gradients are used alone before they are added (`alone`; modules that reduce their own,
//     gradient_sync.h),
//   - float16, where the product could overflow, and bfloat16 unless the divisor is a power of two,
//   - gradients with a replicated placement, to which autograd could not add terms of a sum without
//   communication.
#pragma once

#include <map>
#include <vector>

#include "penstock/stage.h"

namespace penstock {

class StepGradients {
 public:
  // `alone`: .grad() must hold only the gradients of this step until add_earlier(). If the object is
  // destroyed before the step is complete, .grad() holds the earlier gradients again, and with one buffer
  // also what the step had added by then.
  StepGradients(const std::vector<PipelineStage>& stages, int divisor, bool alone);
  ~StepGradients();
  StepGradients(const StepGradients&) = delete;
  StepGradients& operator=(const StepGradients&) = delete;

  // Divides the gradients of a stage whose gradients are complete. Parameters shared with other stages of
  // this rank are left to `divide_all`.
  void divide_stage(int stage);
  void divide_all();
  // Adds the gradients that were set aside.
  void add_earlier();

 private:
  struct Parameter {
    at::Tensor tensor;
    at::Tensor before;        // the gradient that was set aside
    bool multiplied = false;  // .grad() holds the earlier gradient times the divisor
    int stages = 0;
    bool divided = false;
  };
  void divide(const std::vector<Parameter*>& parameters);

  int divisor_;
  std::vector<Parameter> parameters_;
  std::map<int, std::vector<std::size_t>> by_stage_;
};

}  // namespace penstock
