#include "penstock/graph/trace/function_trace.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/trace/fake_inputs.h"

namespace penstock::graph {
namespace {

std::vector<Geometry> geometries_of(const Values& inputs) {
  std::vector<Geometry> all;
  all.reserve(inputs.size());
  for (const c10::IValue& input : inputs)
    all.push_back(FunctionTrace::is_tensor(input) ? geometry_of(input.toTensor()) : Geometry{});
  return all;
}

std::vector<at::Tensor> found_among(const Values& inputs, const Convention& convention) {
  std::vector<at::Tensor> found;
  for (std::size_t i = 0; i < convention.found; ++i) found.push_back(inputs.at(i).toTensor());
  return found;
}

}  // namespace

FunctionTrace::FunctionTrace(const Function& function, const Values& real_inputs,
                             const Convention& convention, Leaves leaves)
    : before(geometries_of(real_inputs)), found(found_among(real_inputs, convention)) {
  make_inputs(real_inputs, convention, leaves);
  tracer.decompositions = convention.decompositions;
  for (const std::vector<at::Tensor>& tensors : parts) {
    memory_before.emplace_back();
    for (const at::Tensor& part : tensors) memory_before.back().push_back(tracer.storage_of(part));
  }
  const bool grad_mode = c10::GradMode::is_enabled();
  const c10::AutoGradMode restore(grad_mode);
  const ModeGuard below(fake_mode);
  const ModeGuard on(tracer);
  outputs = function(inputs);
  if (c10::GradMode::is_enabled() != grad_mode) grad_mode_after = c10::GradMode::is_enabled();
}

void FunctionTrace::make_inputs(const Values& real_inputs, const Convention& convention, Leaves leaves) {
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made;
  inputs.reserve(real_inputs.size());
  for (std::size_t i = 0; i < real_inputs.size(); ++i) {
    parts.emplace_back();
    is_leaf.push_back(is_tensor(real_inputs[i]) && real_inputs[i].toTensor().is_leaf());
    is_leaf_with_grad.push_back(is_leaf.back() && real_inputs[i].toTensor().requires_grad());
    if (!is_tensor(real_inputs[i])) {
      inputs.push_back(real_inputs[i]);
      continue;
    }
    const at::Tensor& real = real_inputs[i].toTensor();
    const bool finds = i < convention.found;
    std::string name =
        i < convention.names.size() ? convention.names[i] : fmt::format("primals_{}", primals.size() + 1);
    primals.push_back(finds ? real : to_fake_parts(real));
    records.push_back(FlattenRecord::of(primals.back(), tracer.graph.inputs.size()));
    const std::vector<std::string> suffixes = records.back().plain_names();
    const std::vector<at::Tensor> added = plain_parts(primals.back());
    for (std::size_t part = 0; part < added.size(); ++part)
      tracer.add_input(added[part], name + suffixes[part]);
    if (finds) tracer.found = tracer.graph.inputs.size();
    // A tensor passed twice is one value inside, but each position gets its own gradient: autograd adds them
    // up as usual.
    at::Tensor& first = made[real.unsafeGetTensorImpl()];
    if (first.defined()) {
      const bool own_gradient = leaves == Leaves::Writable && first.requires_grad();
      inputs.emplace_back(own_gradient ? non_leaf_of(primals.back(), first) : first);
      parts.back() = plain_parts(first);
      continue;
    }
    first = primals.back();
    const bool stays_leaf = finds || (leaves == Leaves::AsTheyAre && real.is_leaf());
    if (first.requires_grad() && !stays_leaf) first = non_leaf_of(first, first);
    inputs.emplace_back(first);
    parts.back() = plain_parts(first);
  }
}

}  // namespace penstock::graph
