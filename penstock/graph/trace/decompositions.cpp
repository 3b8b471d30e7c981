#include "penstock/graph/trace/decompositions.h"

#include <fmt/format.h>

#include "penstock/errors.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

c10::OperatorHandle operator_to_decompose(const std::string& name) {
  const std::size_t dot = name.find('.');
  const auto op = c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == std::string::npos ? std::string() : name.substr(dot + 1)});
  if (!op)
    throw ValueError(
        fmt::format("graph: decompositions: there is no operator {}; use its name with the overload "
                    "(\"aten::add.Tensor\")",
                    name));
  return *op;
}

}  // namespace

DecompositionTable::DecompositionTable(const std::map<std::string, Decomposition>& decompositions) {
  for (const auto& [name, decomposition] : decompositions) {
    const c10::OperatorHandle op = operator_to_decompose(name);
    const OperatorTraits& traits = traits_of(op);
    if (!decomposition)
      throw ValueError(fmt::format("graph: decompositions: {} has no function; set one", name));
    if (traits.composite)
      throw ValueError(fmt::format(
          "graph: decompositions: {} is composite, so graphs contain only its parts; decompose those", name));
    bool only_tensors = !traits.mutates && !traits.any_alias && !op.schema().returns().empty();
    for (const c10::Argument& result : op.schema().returns())
      only_tensors &= result.type()->kind() == c10::TypeKind::TensorType;
    if (!only_tensors)
      throw ValueError(fmt::format(
          "graph: decompositions: {} writes an argument, or returns something else than new tensors; only "
          "operators that return new tensors can be decomposed",
          name));
    table_.emplace(op.operator_name(), decomposition);
  }
}

const Decomposition* DecompositionTable::find(const c10::OperatorHandle& op) const {
  const auto found = table_.find(op.operator_name());
  return found == table_.end() ? nullptr : &found->second;
}

}  // namespace penstock::graph
