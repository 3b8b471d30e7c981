#include "penstock/pipeline/infer/trial_scope.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace penstock {

SavedBuffers::SavedBuffers(const StageModule& module, bool values) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& buffer : module.buffers()) {
    buffers_.push_back({buffer, buffer.requires_grad(), {}, {}});
    if (!values) continue;
    buffers_.back().before = buffer.variable_data();
    buffers_.back().copy = buffer.clone();
  }
}

SavedBuffers::~SavedBuffers() {
  const at::NoGradGuard no_grad;
  for (const Buffer& buffer : buffers_) {
    // A write under autograd has made the buffer a result of the trial.
    if (buffer.tensor.requires_grad() && !buffer.requires_grad) {
      torch::autograd::impl::set_gradient_edge(buffer.tensor, {});
      buffer.tensor.set_requires_grad(false);
    }
    if (!buffer.copy.defined()) continue;
    if (buffer.tensor.sizes() != buffer.copy.sizes() || !buffer.tensor.is_alias_of(buffer.before))
      buffer.tensor.set_data(buffer.before);
    // Through a handle with a version counter of its own, so that graphs that have saved the buffer see no
    // change.
    buffer.tensor.variable_data().copy_(buffer.copy);
  }
}

SavedGenerators::SavedGenerators(at::Device device) {
  add(at::globalContext().defaultGenerator(at::kCPU));
  if (device.is_cuda()) add(at::globalContext().defaultGenerator(device));
}

void SavedGenerators::add(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  at::Tensor state = generator.get_state();
  states_.emplace_back(std::move(generator), std::move(state));
}

SavedGenerators::~SavedGenerators() {
  for (auto& [generator, state] : states_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace penstock
