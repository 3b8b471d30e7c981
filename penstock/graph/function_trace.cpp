#include "penstock/graph/function_trace.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "penstock/base/errors.h"
#include "penstock/graph/fake_inputs.h"
#include "penstock/torch/wrapper.h"

namespace penstock::graph {
namespace {

std::vector<Geometry> geometries_of(const Values& inputs) {
  std::vector<Geometry> all;
  all.reserve(inputs.size());
  for (const c10::IValue& input : inputs) all.push_back(FunctionTrace::is_tensor(input) ? geometry_of(input.toTensor()) : Geometry{});
  return all;
}

std::vector<at::Tensor> found_among(const Values& inputs, const Convention& convention) {
  std::vector<at::Tensor> found;
  for (std::size_t i = 0; i < convention.found; ++i) found.push_back(inputs.at(i).toTensor());
  return found;
}

}  // namespace

FunctionTrace::FunctionTrace(const Function& function, const Values& real_inputs, const Convention& convention, Leaves leaves)
    : before(geometries_of(real_inputs)), found(found_among(real_inputs, convention)) {
  make_inputs(real_inputs, convention, leaves);
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
    is_leaf.push_back(is_tensor(real_inputs[i]) && real_inputs[i].toTensor().is_leaf());
    if (!is_tensor(real_inputs[i])) {
      inputs.push_back(real_inputs[i]);
      continue;
    }
    const at::Tensor& real = real_inputs[i].toTensor();
    if (is_wrapper(real) && !is_fake(real))
      throw TypeError(describe("graph: " + convention.name_of(i), "a tensor of kind " + std::string(payload_of(real)->kind()), "a plain tensor",
                               "hand over what it holds, and make it inside of the function"));
    const bool finds = i < convention.found;
    std::string name = i < convention.names.size() ? convention.names[i] : fmt::format("primals_{}", primals.size() + 1);
    primals.push_back(tracer.add_input(finds ? real : to_fake(real), std::move(name)));
    // The same tensor again is the same value inside, but each place gets its own gradient: autograd adds them up as it would have.
    at::Tensor& first = made[real.unsafeGetTensorImpl()];
    if (first.defined()) {
      const bool own_gradient = leaves == Leaves::Writable && first.requires_grad();
      inputs.emplace_back(own_gradient ? non_leaf_of(primals.back(), first) : first);
      continue;
    }
    first = primals.back();
    const bool stays_leaf = finds || (leaves == Leaves::AsTheyAre && real.is_leaf());
    if (first.requires_grad() && !stays_leaf) first = non_leaf_of(first, first);
    inputs.emplace_back(first);
  }
}

}  // namespace penstock::graph
