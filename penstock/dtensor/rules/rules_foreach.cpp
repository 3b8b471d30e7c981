// Operators on lists of tensors (_foreach_*, fused optimizer steps): one call on the local parts of all of
// them.
//
// Positions are independent and may have different placements and even different meshes; some tensors may be
// plain.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/dtensor/rules/foreach_lists.h"
#include "penstock/dtensor/rules/norm_terms.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/spec.h"
#include "penstock/errors.h"

namespace penstock::detail {
namespace {

// Linear in all its lists together: each rank may apply it to its partial sums.
bool partial_allowed(const std::string& name) {
  static const std::set<std::string, std::less<>> linear{
      "mul.Scalar", "mul.ScalarList", "mul.Tensor", "div.Scalar", "div.ScalarList", "div.Tensor",
      "neg",        "zero",           "add.List",   "sub.List",   "copy",           "lerp.Scalar"};
  std::string bare = name.substr(std::string("aten::_foreach_").size());
  if (const std::size_t mark = bare.find("_."); mark != std::string::npos) bare.erase(mark, 1);
  if (!bare.empty() && bare.back() == '_') bare.pop_back();
  return linear.count(bare) > 0;
}

// Replaces the arguments by the local results.
void push_results(const OperatorTraits& traits, const ForeachCall& call, Stack* stack) {
  for (std::size_t i = 0; i < traits.returns.size(); ++i) {
    c10::List<at::Tensor> list;
    const auto results = call.local[i].toListRef();
    for (std::size_t position = 0; position < results.size(); ++position) {
      // Step counters of optimizers have no dims and are the same on every rank.
      const at::Tensor result = results[position].toTensor();
      const bool counter = result.dim() == 0 && call.spec(position) && !call.spec(position)->shape().empty();
      list.push_back(counter ? result : call.wrap(result, position));
    }
    stack->push_back(std::move(list));
  }
}

void on_lists(const c10::OperatorHandle& op, Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  ForeachCall call(op, stack, partial_allowed(traits.name));
  op.callBoxed(&call.local);
  push_results(traits, call, stack);
}

// An optimizer step needs whole gradients.
void fused_step(const c10::OperatorHandle& op, Stack* stack) {
  ForeachCall call(op, stack, false);
  op.callBoxed(&call.local);
  push_results(traits_of(op), call, stack);
}

// The axes of each mesh along which ranks have other parts than this one.
struct SplitAxes {
  comm::MeshGroups mesh;
  std::set<int> axes;
};

std::map<std::uint64_t, SplitAxes> split_axes(const ForeachCall& call) {
  std::map<std::uint64_t, SplitAxes> result;
  for (std::size_t position = 0; position < call.first_list().size(); ++position) {
    const SpecPtr& spec = call.spec(position);
    if (!spec) continue;
    SplitAxes& entry = result.try_emplace(spec->mesh_id(), SplitAxes{call.mesh(position), {}}).first->second;
    for (std::size_t axis = 0; axis < spec->placements().size(); ++axis)
      if (spec->placements()[axis].splits()) entry.axes.insert(static_cast<int>(axis));
  }
  return result;
}

// If gradients are not finite on one rank, they count as such on all: all ranks skip the step, or none.
void check_and_unscale(const c10::OperatorHandle& op, Stack* stack) {
  if (op.operator_name().name != "aten::_amp_foreach_non_finite_check_and_unscale_" ||
      !op.schema().returns().empty())
    throw NotImplemented(fmt::format("{} of distributed tensors; use the in-place form", traits_of(op).name));
  const c10::IValue found_argument = (*stack)[stack->size() - 2];
  ForeachCall call(op, stack, false);
  at::Tensor found = call.local[1].toTensor();
  if (const DTensorPayload* payload = dtensor_payload(found_argument.toTensor());
      payload && !payload->spec->is_replicated())
    throw ValueError(describe("_amp_foreach_non_finite_check_and_unscale_: found_inf",
                              to_string(payload->spec->placements()), "a replicated tensor",
                              "create it with Replicate on every axis"));
  op.callBoxed(&call.local);
  for (const auto& [_, split] : split_axes(call))
    reduce_over(split.mesh, {split.axes.begin(), split.axes.end()}, found, comm::ReduceOp::Max);
}

// The norm of every tensor, or the sum of powers that it is the root of, with one all-reduce per mesh axis
// for all tensors together.
void foreach_norm(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema().arguments();
  for (const c10::Argument& argument : schema)
    if (argument.alias_info() && argument.alias_info()->isWrite())
      throw NotImplemented(fmt::format("{} of distributed tensors; use the form that returns its results",
                                       traits_of(op).name));
  ForeachCall call(op, stack, false);
  double order = 2;
  at::ScalarType dtype = at::ScalarType::Undefined;
  for (std::size_t i = 0; i < schema.size(); ++i) {
    if (schema[i].name() == "ord") order = call.local[i].toScalar().toDouble();
    if (schema[i].name() == "dtype" && !call.local[i].isNone()) dtype = call.local[i].toScalarType();
  }
  const NormTerms norms(order);
  const bool powers = op.operator_name().name == "aten::_foreach_powsum";
  const std::vector<at::Tensor> parts = call.local[0].toTensorVector();
  std::vector<at::Tensor> terms;
  for (const at::Tensor& part : parts) {
    std::vector<std::int64_t> dims(static_cast<std::size_t>(part.dim()));
    for (std::size_t dim = 0; dim < dims.size(); ++dim) dims[dim] = static_cast<std::int64_t>(dim);
    terms.push_back(norms.of(part, dims).reshape({}));
  }
  for (const auto& [mesh_id, split] : split_axes(call))
    for (const int axis : split.axes) {
      std::vector<std::size_t> positions;
      std::vector<at::Tensor> mine;
      for (std::size_t position = 0; position < parts.size(); ++position) {
        const SpecPtr& spec = call.spec(position);
        if (!spec || spec->mesh_id() != mesh_id ||
            !spec->placements()[static_cast<std::size_t>(axis)].splits())
          continue;
        positions.push_back(position);
        mine.push_back(terms[position].to(at::kDouble));
      }
      at::Tensor all = at::stack(mine);
      norms.reduce(split.mesh, {axis}, all);
      for (std::size_t i = 0; i < positions.size(); ++i)
        terms[positions[i]] = all[static_cast<std::int64_t>(i)].to(terms[positions[i]].scalar_type());
    }
  c10::List<at::Tensor> results;
  for (std::size_t position = 0; position < parts.size(); ++position) {
    const at::Tensor result =
        (powers ? terms[position] : norms.norm(terms[position]))
            .to(dtype != at::ScalarType::Undefined ? dtype
                                                   : c10::toRealValueType(parts[position].scalar_type()));
    const SpecPtr& spec = call.spec(position);
    results.push_back(!spec ? result
                            : make_dtensor(result,
                                           DTensorSpec::get(*spec, Placements(spec->placements().size()),
                                                            global_geometry_of(result)),
                                           call.mesh(position)));
  }
  stack->push_back(std::move(results));
}

// Reductions of whole tensors run one by one; their results may be partial.
void foreach_max(const c10::OperatorHandle& op, Stack* stack) {
  if (op.schema().arguments().size() != 1)
    throw NotImplemented(
        fmt::format("{} of distributed tensors; use the form that returns its results", traits_of(op).name));
  c10::List<at::Tensor> results;
  for (const at::Tensor& tensor : stack->back().toTensorVector()) results.push_back(at::max(tensor));
  stack->back() = std::move(results);
}

// Matrix products choose their placements pair by pair, like single ones.
void foreach_mm(const c10::OperatorHandle& op, Stack* stack) {
  const std::vector<at::Tensor> right = torch::jit::pop(*stack).toTensorVector(),
                                left = torch::jit::pop(*stack).toTensorVector();
  if (left.size() != right.size())
    throw ValueError(describe(fmt::format("{}: matrices on the right", traits_of(op).name),
                              std::to_string(right.size()), std::to_string(left.size()),
                              "pass lists of the same length"));
  c10::List<at::Tensor> results;
  for (std::size_t position = 0; position < left.size(); ++position)
    results.push_back(at::mm(left[position], right[position]));
  stack->push_back(std::move(results));
}

}  // namespace

void add_foreach_rules(RuleTable& table) {
  const std::set<std::string> one_by_one{"_foreach_norm", "_foreach_powsum", "_foreach_max", "_foreach_mm"};
  std::set<std::string> lists, fused;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto starts = [&](std::string_view with) { return op.name.rfind(with, 0) == 0; };
    const std::string bare = starts("aten::") ? op.name.substr(6) : "";
    if (starts("aten::_foreach_") && !one_by_one.count(bare)) lists.insert(bare);
    if (starts("aten::_fused_ada") || starts("aten::_fused_sgd")) fused.insert(bare);
  }
  table.handle({lists.begin(), lists.end()}, on_lists);
  table.handle({fused.begin(), fused.end()}, fused_step);
  table.handle({"_foreach_norm", "_foreach_powsum"}, foreach_norm);
  table.handle({"_foreach_max"}, foreach_max);
  table.handle({"_foreach_mm"}, foreach_mm);
  table.handle({"_amp_foreach_non_finite_check_and_unscale"}, check_and_unscale);
}

}  // namespace penstock::detail
