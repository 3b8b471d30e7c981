#include "penstock/graph/compiler/dead_memory.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "penstock/graph/compiler/plain_tensor.h"

namespace penstock::graph {
namespace {

struct Row {
  std::string_view name, overload, writing_name, writing_overload;
};

// Pointwise operators: an element of the result depends on the elements of the arguments at the same place.
// Both forms run the same kernel over the same layout.
constexpr Row kRows[] = {
    {"aten::add", "Tensor", "aten::add", "out"},
    {"aten::add", "Scalar", "aten::add_", "Scalar"},
    {"aten::sub", "Tensor", "aten::sub", "out"},
    {"aten::sub", "Scalar", "aten::sub_", "Scalar"},
    {"aten::mul", "Tensor", "aten::mul", "out"},
    {"aten::mul", "Scalar", "aten::mul_", "Scalar"},
    {"aten::div", "Tensor", "aten::div", "out"},
    {"aten::div", "Scalar", "aten::div_", "Scalar"},
    {"aten::pow", "Tensor_Scalar", "aten::pow", "Tensor_Scalar_out"},
    {"aten::addcmul", "", "aten::addcmul", "out"},
    {"aten::addcdiv", "", "aten::addcdiv", "out"},
    {"aten::neg", "", "aten::neg", "out"},
    {"aten::abs", "", "aten::abs", "out"},
    {"aten::exp", "", "aten::exp", "out"},
    {"aten::log", "", "aten::log", "out"},
    {"aten::sqrt", "", "aten::sqrt", "out"},
    {"aten::rsqrt", "", "aten::rsqrt", "out"},
    {"aten::reciprocal", "", "aten::reciprocal", "out"},
    {"aten::sin", "", "aten::sin", "out"},
    {"aten::cos", "", "aten::cos", "out"},
    {"aten::erf", "", "aten::erf", "out"},
    {"aten::tanh", "", "aten::tanh", "out"},
    {"aten::sigmoid", "", "aten::sigmoid", "out"},
    {"aten::relu", "", "aten::relu_", ""},
    {"aten::gelu", "", "aten::gelu", "out"},
    {"aten::silu", "", "aten::silu", "out"},
    {"aten::threshold_backward", "", "aten::threshold_backward", "grad_input"},
    {"aten::gelu_backward", "", "aten::gelu_backward", "grad_input"},
    {"aten::silu_backward", "", "aten::silu_backward", "grad_input"},
    {"aten::tanh_backward", "", "aten::tanh_backward", "grad_input"},
    {"aten::sigmoid_backward", "", "aten::sigmoid_backward", "grad_input"},
};

// Where sizes differ from call to call, the operator itself checks the shape of what it writes.
bool is_reusable(const at::Tensor& dead, const Geometry& geometry) {
  return dead.defined() && is_plain(dead) && dead.scalar_type() == geometry.dtype &&
         (geometry.symbolic != kNotSymbolic || is_laid_out_as(dead, geometry)) && is_owned_alone(dead);
}

bool all_plain(const Step& step, const Frame& frame) {
  return std::all_of(step.arguments.begin(), step.arguments.end(), [&](const Argument& argument) {
    return argument.kind != Argument::Kind::Tensor || is_plain(frame.slots[argument.slot]);
  });
}

}  // namespace

std::optional<WritingForm> writing_form(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  const auto* row = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& candidate) {
    return candidate.name == name.name && candidate.overload == name.overload_name;
  });
  if (row == std::end(kRows)) return std::nullopt;
  const auto found = c10::Dispatcher::singleton().findSchema(
      {std::string(row->writing_name), std::string(row->writing_overload)});
  if (!found) return std::nullopt;
  const bool in_place = row->writing_name.ends_with('_');
  if (found->schema().arguments().size() != op.schema().arguments().size() + (in_place ? 0 : 1))
    return std::nullopt;
  return WritingForm{*found, in_place};
}

void call_reusing(const Step& step, Frame& frame) {
  const MemoryReuse& plan = frame.plan->reuses[step.special];
  at::Tensor& dead = frame.slots[plan.dead];
  if (!frame.unobserved || !is_reusable(dead, plan.geometry) || !all_plain(plan.writing, frame)) {
    step.otherwise(step, frame);
    return;
  }
  plan.writing.call(plan.writing, frame);
  frame.slots[plan.result] = std::move(dead);
}

}  // namespace penstock::graph
