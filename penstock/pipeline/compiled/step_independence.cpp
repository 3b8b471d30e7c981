#include "penstock/pipeline/compiled/step_independence.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <sstream>
#include <string>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/run/function_capture.h"

namespace penstock {
namespace {

// Far away and of another parity: a forward that compares the step with a limit, or counts it modulo 2,
// becomes visible.
constexpr std::int64_t kStepsAway = (std::int64_t{1} << 40) + 1;

// The rows of another data-parallel rank, if there is one.
BatchRows other_rows(BatchRows rows) {
  if (rows.first >= rows.count)
    rows.first -= rows.count;
  else if (rows.first + 2 * rows.count <= rows.global)
    rows.first += rows.count;
  return rows;
}

StepContext another(const StepContext& step, bool uses_rows) {
  StepContext other = step;
  if (step.rows && !uses_rows) other.rows = other_rows(*step.rows);
  other.seed = step.seed ^ 0x5bd1e995u;
  other.step = step.step + kStepsAway;
  if (step.microbatch) other.microbatch = (*step.microbatch + 1) % step.microbatches;
  other.loss_scale = step.loss_scale >= 1 ? step.loss_scale / 2 : step.loss_scale * 2;
  return other;
}

graph::FunctionCapture captured_in(StepContext step, const graph::Function& function,
                                   const graph::Values& inputs, const graph::Convention& convention) {
  const StepGuard guard(std::move(step));
  return graph::capture_function(function, inputs, convention);
}

std::string first_difference(const graph::Graph& one, const graph::Graph& two) {
  std::istringstream a(to_text(one)), b(to_text(two));
  std::string in_one, in_two, whole;
  while (true) {
    const bool more_a = static_cast<bool>(std::getline(a, in_one)),
               more_b = static_cast<bool>(std::getline(b, in_two));
    if (!more_a && !more_b) break;
    if (!more_a) in_one = "nothing";
    if (!more_b) in_two = "nothing";
    if (in_one == in_two) continue;
    std::string difference = fmt::format("'{}', in another step '{}'", in_one, in_two);
    // The inputs, in the first line, also differ in the numbers of values; an operator says more.
    if (!in_one.starts_with("graph(")) return difference;
    whole = std::move(difference);
  }
  if (!whole.empty()) return whole;
  for (std::size_t i = 0; i < one.constants.size(); ++i) {
    const at::Tensor &x = one.constants[i].tensor, &y = two.constants[i].tensor;
    if (!x.is_same(y) && !x.is_alias_of(y) && !at::equal(x, y))
      return fmt::format("constant %{} has other values in another step", index_of(one.constants[i].value));
  }
  return {};
}

}  // namespace

void check_independence_of_step(const graph::Function& function, const graph::Values& inputs,
                                const graph::Convention& convention, const StepContext& step,
                                bool uses_rows) {
  const graph::FunctionCapture here = captured_in(step, function, inputs, convention),
                               there = captured_in(another(step, uses_rows), function, inputs, convention);
  const std::string difference = first_difference(here.joint.graph, there.joint.graph);
  if (difference.empty()) return;
  throw StateError(fmt::format(
      "compiled_stage: forward computes with a value of the running step (StepContext: step, "
      "microbatch, seed, loss scale{}), which a graph would repeat in every step: {}; take random "
      "numbers from StepContext::key(), pass the value as an argument, or run this stage without a "
      "graph",
      uses_rows || !step.rows ? "" : ", or first row, with CompiledStageOptions::uses_rows off", difference));
}

}  // namespace penstock
