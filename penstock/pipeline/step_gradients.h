// The gradients that one step adds, kept apart from what .grad() held before: they are divided, or summed over copies, and only then
// added to it, so that steps which accumulate weigh the same.
#pragma once

#include <map>
#include <vector>

#include "penstock/pipeline/stage.h"

namespace penstock::pipeline {

class StepGradients {
 public:
  // Sets aside what .grad() holds, if `apart`. An object that is given up puts it back.
  StepGradients(const std::vector<PipelineStage>& stages, int divisor, bool apart);
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
    at::Tensor before;
    int stages = 0;
    bool divided = false;
  };
  void divide(const std::vector<Parameter*>& parameters);

  int divisor_;
  std::vector<Parameter> parameters_;
  std::map<int, std::vector<std::size_t>> by_stage_;
};

}  // namespace penstock::pipeline
