#include "penstock/pipeline/step_gradients.h"

#include <ATen/ATen.h>

#include <unordered_map>

namespace penstock::pipeline {

StepGradients::StepGradients(const std::vector<PipelineStage>& stages, int divisor, bool apart) : divisor_(divisor) {
  if (divisor_ == 1 && !apart) return;
  std::unordered_map<const c10::TensorImpl*, std::size_t> known;
  for (const PipelineStage& stage : stages) {
    for (const at::Tensor& tensor : stage.parameters()) {
      const auto [at, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), parameters_.size());
      if (is_new) {
        parameters_.push_back({tensor, tensor.grad(), 0, false});
        if (parameters_.back().before.defined()) tensor.mutable_grad() = at::Tensor();
      }
      ++parameters_[at->second].stages;
      by_stage_[stage.index()].push_back(at->second);
    }
  }
}

StepGradients::~StepGradients() {
  for (Parameter& parameter : parameters_)
    if (parameter.before.defined()) parameter.tensor.mutable_grad() = parameter.before;
}

void StepGradients::divide_stage(int stage) {
  std::vector<Parameter*> ready;
  for (const std::size_t index : by_stage_[stage])
    if (parameters_[index].stages == 1) ready.push_back(&parameters_[index]);
  divide(ready);
}

void StepGradients::divide_all() {
  std::vector<Parameter*> ready;
  for (Parameter& parameter : parameters_) ready.push_back(&parameter);
  divide(ready);
}

void StepGradients::divide(const std::vector<Parameter*>& parameters) {
  if (divisor_ == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (Parameter* parameter : parameters) {
    if (parameter->divided) continue;
    parameter->divided = true;
    if (parameter->tensor.grad().defined()) gradients.push_back(parameter->tensor.grad());
  }
  if (!gradients.empty()) at::_foreach_div_(gradients, static_cast<double>(divisor_));
}

void StepGradients::add_earlier() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    if (!parameter.before.defined()) continue;
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    gradient = gradient.defined() ? parameter.before.add_(gradient) : parameter.before;
    parameter.before.reset();
  }
}

}  // namespace penstock::pipeline
