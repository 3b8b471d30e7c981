#include "penstock/graph/ir/metadata.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/errors.h"

namespace penstock::graph {
namespace {

template <class Items, class Test>
std::vector<std::size_t> positions_where(const Items& items, Test&& test) {
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < items.size(); ++i)
    if (test(items[i])) positions.push_back(i);
  return positions;
}

}  // namespace

std::string_view to_text(OutputKind kind) {
  switch (kind) {
    case OutputKind::NonAlias:
      return "non_alias";
    case OutputKind::AliasOfInput:
      return "alias_of_input";
    case OutputKind::IsInput:
      return "is_input";
    case OutputKind::AliasOfIntermediateSaveAsOutput:
      return "alias_of_intermediate_save_as_output";
    case OutputKind::AliasOfIntermediate:
      return "alias_of_intermediate";
    case OutputKind::AliasOfIntermediateBaseIsUserOutput:
      return "alias_of_intermediate_base_is_user_output";
    case OutputKind::UnsafeViewAlias:
      return "unsafe_view_alias";
    case OutputKind::CustomFunctionView:
      return "custom_function_view";
  }
  return "?";
}

std::string_view to_text(MutationType type) {
  switch (type) {
    case MutationType::NotMutated:
      return "NOT_MUTATED";
    case MutationType::MutatedInGraph:
      return "MUTATED_IN_GRAPH";
    case MutationType::MutatedOutOfGraph:
      return "MUTATED_OUT_GRAPH";
  }
  return "?";
}

std::string_view to_text(OutputType type) {
  switch (type) {
    case OutputType::Tensor:
      return "Tensor";
    case OutputType::Int:
      return "int";
    case OutputType::Float:
      return "float";
    case OutputType::Bool:
      return "bool";
    case OutputType::None:
      return "NoneType";
    case OutputType::String:
      return "str";
    case OutputType::Other:
      return "other";
  }
  return "?";
}

void InputInfo::validate(std::size_t input) const {
  if (mutates_storage_metadata && !mutates_metadata)
    throw ValueError(
        fmt::format("graph: input {} is marked as getting other memory (set_) but keeping its metadata; set "
                    "mutates_metadata as well",
                    input));
}

MutationType InputInfo::mutation_type() const {
  if (!mutates_data && !mutates_metadata && !resizes_storage) return MutationType::NotMutated;
  // A graph cannot give an input other memory (set_): that is done after it has run.
  if (mutates_storage_metadata || resizes_storage) return MutationType::MutatedOutOfGraph;
  // The graph may write an input if autograd would not notice: no gradient is involved and the shape stays,
  // or the write is invisible to autograd.
  const bool unnoticed =
      (!mutates_metadata && !requires_grad) || mutations_hidden_from_autograd || mutations_under_no_grad;
  return keep_input_mutations && mutates_data && unnoticed ? MutationType::MutatedInGraph
                                                           : MutationType::MutatedOutOfGraph;
}

bool is_fresh(OutputKind kind) {
  return kind == OutputKind::NonAlias || kind == OutputKind::UnsafeViewAlias ||
         kind == OutputKind::CustomFunctionView;
}

std::vector<std::size_t> ViewAndMutationMeta::mutated_at_run_time() const {
  return positions_where(
      inputs, [](const InputInfo& info) { return info.mutation_type() == MutationType::MutatedOutOfGraph; });
}

std::vector<std::size_t> ViewAndMutationMeta::mutated_in_graph() const {
  return positions_where(
      inputs, [](const InputInfo& info) { return info.mutation_type() == MutationType::MutatedInGraph; });
}

std::vector<std::size_t> ViewAndMutationMeta::mutated_in_graph_seen_by_autograd() const {
  return positions_where(inputs, [](const InputInfo& info) {
    return info.mutation_type() == MutationType::MutatedInGraph && !info.mutations_hidden_from_autograd;
  });
}

std::vector<std::size_t> ViewAndMutationMeta::aliased_outputs() const {
  return positions_where(outputs, [](const OutputInfo& info) { return !is_fresh(info.kind); });
}

std::vector<std::size_t> ViewAndMutationMeta::unsafe_view_outputs() const {
  return positions_where(outputs,
                         [](const OutputInfo& info) { return info.kind == OutputKind::UnsafeViewAlias; });
}

std::size_t ViewAndMutationMeta::outputs_aliased_to_inputs() const {
  return static_cast<std::size_t>(std::count_if(outputs.begin(), outputs.end(), [](const OutputInfo& info) {
    return info.kind == OutputKind::AliasOfInput || info.kind == OutputKind::IsInput;
  }));
}

std::size_t ViewAndMutationMeta::outputs_aliased_to_intermediates() const {
  return aliased_outputs().size() - outputs_aliased_to_inputs();
}

bool ViewAndMutationMeta::dynamic_outputs() const {
  return std::any_of(outputs.begin(), outputs.end(),
                     [](const OutputInfo& info) { return !info.dynamic_dims.empty(); });
}

std::size_t ViewAndMutationMeta::forward_return_of(const TangentInfo& tangent) const {
  const std::vector<std::size_t> mutated = mutated_at_run_time();
  switch (tangent.kind) {
    case TangentInfo::Kind::MutatedInput:
      return static_cast<std::size_t>(std::find(mutated.begin(), mutated.end(), tangent.index) -
                                      mutated.begin());
    case TangentInfo::Kind::Output:
      return mutated.size() + tangent.index;
    case TangentInfo::Kind::IntermediateBase:
      return mutated.size() + outputs.size() + tangent.index;
  }
  throw InvariantError("graph: unknown kind of tangent");
}

bool ViewAndMutationMeta::operator==(const ViewAndMutationMeta& other) const {
  const auto same_tangent = [](const TangentInfo& a, const TangentInfo& b) {
    return a.geometry.sizes == b.geometry.sizes && a.geometry.dtype == b.geometry.dtype;
  };
  return inputs == other.inputs && outputs == other.outputs &&
         intermediate_bases == other.intermediate_bases &&
         keep_input_mutations == other.keep_input_mutations &&
         explicit_random_states == other.explicit_random_states &&
         random_states.size() == other.random_states.size() && backward_tokens == other.backward_tokens &&
         std::equal(tangents.begin(), tangents.end(), other.tangents.begin(), other.tangents.end(),
                    same_tangent);
}

bool ViewAndMutationMeta::same_in_every_field(const ViewAndMutationMeta& other) const {
  return *this == other && tangents == other.tangents && grad_mode_after == other.grad_mode_after &&
         symbols_for_backward == other.symbols_for_backward && static_inputs == other.static_inputs &&
         tokens == other.tokens && random_states == other.random_states &&
         backward_random_states == other.backward_random_states;
}

bool ViewAndMutationMeta::needs_autograd() const {
  const auto with_grad = [](const auto& info) { return info.requires_grad; };
  return std::any_of(outputs.begin(), outputs.end(), with_grad) ||
         std::any_of(inputs.begin(), inputs.end(), [](const InputInfo& info) {
           return info.requires_grad && info.mutation_type() != MutationType::NotMutated;
         });
}

}  // namespace penstock::graph
