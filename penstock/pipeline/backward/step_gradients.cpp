#include "penstock/pipeline/backward/step_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "penstock/dtensor.h"
#include "penstock/fully_shard.h"
#include "penstock/pipeline/stage/gradient_sync.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock {

namespace {

// Whether autograd can add to the gradient times `divisor`, and dividing it afterwards gives the right
// result.
bool can_multiply(const at::Tensor& parameter, const at::Tensor& gradient, int divisor) {
  if (gradient.layout() != at::kStrided) return false;
  const bool exact = (divisor & (divisor - 1)) == 0;
  const at::ScalarType dtype = gradient.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && !(dtype == at::kBFloat16 && exact)) return false;
  if (is_dtensor(gradient) && !shard_of(parameter)) {
    const Placements& placements = placements_of(gradient);
    if (std::any_of(placements.begin(), placements.end(),
                    [](const Placement& placement) { return placement.is_replicate(); }))
      return false;
  }
  return local_if_distributed(gradient, kDetach).is_non_overlapping_and_dense();
}

}  // namespace

StepGradients::StepGradients(const std::vector<PipelineStage>& stages, int divisor, bool alone)
    : divisor_(divisor) {
  const at::NoGradGuard no_grad;
  std::unordered_map<const c10::TensorImpl*, std::size_t> known;
  std::unordered_set<const void*> memory;  // of gradients that have been multiplied
  std::vector<at::Tensor> multiplied;
  for (const PipelineStage& stage : stages) {
    std::optional<bool> reduces;  // whether a module of the stage reduces its own gradients
    for (const at::Tensor& tensor : stage.parameters()) {
      const auto [at, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), parameters_.size());
      if (is_new) parameters_.push_back({tensor, {}, false, 0, false});
      Parameter& parameter = parameters_[at->second];
      ++parameter.stages;
      by_stage_[stage.index()].push_back(at->second);
      at::Tensor& gradient = tensor.mutable_grad();
      if (!is_new || !gradient.defined()) continue;
      if (!reduces) reduces = !gradient_syncs_of(stage.module()).empty();
      if (!alone && !*reduces && divisor_ == 1) continue;
      if (!alone && !*reduces && can_multiply(tensor, gradient, divisor_)) {
        const at::Tensor local = local_if_distributed(gradient, kDetach);
        if (local.numel() == 0 || memory.insert(local.data_ptr()).second) {
          parameter.multiplied = true;
          multiplied.push_back(local);
          continue;
        }
      }
      parameter.before = gradient;
      gradient = at::Tensor();
    }
  }
  if (!multiplied.empty()) at::_foreach_mul_(multiplied, static_cast<double>(divisor_));
}

StepGradients::~StepGradients() {
  for (Parameter& parameter : parameters_)
    if (parameter.before.defined()) parameter.tensor.mutable_grad() = parameter.before;
  std::vector<Parameter*> multiplied;
  for (Parameter& parameter : parameters_)
    if (parameter.multiplied) multiplied.push_back(&parameter);
  try {
    divide(multiplied);
  } catch (...) {  // a device that has failed: its memory is not usable any more
  }
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
    if (std::exchange(parameter->divided, true)) continue;
    if (parameter->tensor.grad().defined()) gradients.push_back(parameter->tensor.grad());
  }
  if (!gradients.empty()) at::_foreach_div_(gradients, static_cast<double>(divisor_));
}

void StepGradients::add_earlier() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    if (!parameter.before.defined()) continue;
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    // Expanded tensors cannot be written.
    const bool in_place = is_dtensor(parameter.before) || parameter.before.is_non_overlapping_and_dense();
    gradient = !gradient.defined() ? parameter.before
               : in_place          ? parameter.before.add_(gradient)
                                   : parameter.before + gradient;
    parameter.before.reset();
  }
}

}  // namespace penstock
