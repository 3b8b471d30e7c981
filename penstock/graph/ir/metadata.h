// Describes what a function does to its inputs and how its outputs alias other memory: what is needed to
// replace a call of it by a call of a graph that writes nothing and returns only fresh tensors.
//
//   const ViewAndMutationMeta meta = analyze(function, inputs);       // penstock/graph/trace/analyze.h
//   for (const std::size_t i : meta.mutated_at_run_time()) ...   // inputs to be written after a run
//
// Indices are positions among the inputs and outputs of the function as it is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/view_replay.h"

namespace penstock::graph {

enum class OutputKind : std::uint8_t {
  NonAlias,      // has its own memory
  AliasOfInput,  // a view of input `base_index`
  IsInput,       // input `base_index` itself
  // A view of an internal tensor; this output adds it as intermediate base `base_index`.
  AliasOfIntermediateSaveAsOutput,
  AliasOfIntermediate,  // a view of intermediate base `base_index`, which an earlier output has added
  AliasOfIntermediateBaseIsUserOutput,  // a view of output `base_index`
  // A view of an internal tensor that nothing else refers to; equivalent to its own memory.
  UnsafeViewAlias,
  // A view made by a user-defined autograd function; differentiated like any other result.
  CustomFunctionView
};
std::string_view to_text(OutputKind kind);

enum class MutationType : std::uint8_t { NotMutated, MutatedInGraph, MutatedOutOfGraph };
std::string_view to_text(MutationType type);

struct InputInfo {
  bool is_leaf = false;
  bool mutates_data = false;
  bool mutates_metadata = false;  // sizes, strides, offset
  bool mutations_hidden_from_autograd = true;
  bool mutations_under_no_grad = false;   // all of them under no_grad or in InferenceMode
  bool mutates_storage_metadata = false;  // set_: other memory
  bool resizes_storage = false;
  bool requires_grad = false;         // after the call
  bool keep_input_mutations = false;  // the graph may write this input itself where that is allowed
  // Some operator writes it or its metadata, even if the value ends up unchanged.
  bool is_touched = false;
  bool is_tensor = true;  // if so, it is an input of the graph

  // Throws ValueError if the flags contradict each other: new memory implies new metadata.
  void validate(std::size_t input) const;
  MutationType mutation_type() const;

  bool operator==(const InputInfo&) const = default;
};

// The type of an output.
enum class OutputType : std::uint8_t { Tensor, Int, Float, Bool, None, String, Other };
std::string_view to_text(OutputType type);

struct OutputInfo {
  OutputKind kind = OutputKind::NonAlias;
  OutputType type = OutputType::Tensor;
  // Index among inputs, intermediate bases or outputs, depending on OutputKind.
  std::optional<std::size_t> base_index;
  bool requires_grad = false;
  // It also has something to differentiate, unlike a view taken under no_grad.
  bool requires_grad_for_backward = false;
  std::optional<std::size_t> same_as;     // an earlier output that is the same tensor
  Geometry geometry;                      // of a tensor
  std::vector<std::size_t> dynamic_dims;  // of a tensor: whose sizes depend on symbols
  // `view` reproduces it from its base; false if the base has changed shape.
  bool has_view_replay = false;
  // Made from its base by as_strided, because no view operators lead to it from the base after the call.
  bool by_geometry = false;
  ViewReplay view;  // for an alias, the view operators that lead from its base to it

  bool operator==(const OutputInfo&) const = default;
};

// What a tangent, an input of backward, is the gradient of.
struct TangentInfo {
  enum class Kind : std::uint8_t { MutatedInput, Output, IntermediateBase };
  Kind kind = Kind::Output;
  std::size_t index = 0;
  Geometry geometry;

  bool operator==(const TangentInfo&) const = default;
};

struct ViewAndMutationMeta {
  std::vector<InputInfo> inputs;
  std::vector<OutputInfo> outputs;
  std::size_t intermediate_bases = 0;
  bool keep_input_mutations = false;
  std::vector<TangentInfo> tangents;    // mutated inputs, then outputs, then intermediate bases
  std::optional<bool> grad_mode_after;  // the grad mode after the function, if it changes it
  // The number of symbols backward depends on once the graph is split. They are kept with the call; forward
  // does not return them.
  std::size_t symbols_for_backward = 0;
  // Inputs that are the same tensors in every call, normally at the same address: parameters and buffers.
  std::vector<std::size_t> static_inputs;
  // The effects whose tokens forward takes and returns, in the order of these inputs, and the number of those
  // of backward (CompileOptions::effect_tokens).
  std::vector<std::string> tokens;
  std::size_t backward_tokens = 0;
  // Random operators take and return the states of generators (CompileOptions::explicit_random_states): those
  // that forward draws from, in the order of these inputs, and the number of those of backward.
  bool explicit_random_states = false;
  std::vector<std::string> random_states;
  std::size_t backward_random_states = 0;

  // ---- derived ----
  std::vector<std::size_t> mutated_at_run_time() const;  // written after the graph has run
  std::vector<std::size_t> mutated_in_graph() const;
  std::vector<std::size_t> mutated_in_graph_seen_by_autograd() const;
  std::vector<std::size_t> aliased_outputs()
      const;  // all kinds but NonAlias, UnsafeViewAlias, CustomFunctionView
  std::vector<std::size_t> unsafe_view_outputs() const;
  std::size_t outputs_non_aliased() const { return outputs.size() - aliased_outputs().size(); }
  std::size_t outputs_aliased_to_inputs() const;
  std::size_t outputs_aliased_to_intermediates() const;
  // The number of values the forward graph returns before the tensors saved for backward: mutated inputs,
  // outputs, intermediate bases.
  std::size_t forward_returns() const {
    return mutated_at_run_time().size() + outputs.size() + intermediate_bases;
  }
  // With the states of generators, which come after them. Tokens come before and are not counted.
  std::size_t forward_outputs() const { return forward_returns() + random_states.size(); }
  // The index, among the forward returns, of the value that a tangent is the gradient of.
  std::size_t forward_return_of(const TangentInfo& tangent) const;
  // Whether some result has a gradient.
  bool needs_autograd() const;
  // Whether some result has a size that depends on symbols.
  bool dynamic_outputs() const;

  // Whether two functions may use one compiled graph: inputs, outputs, the number of bases,
  // keep_input_mutations, explicit_random_states, the number of random_states, the number, sizes and dtypes
  // of the tangents, and the number of backward_tokens are equal. Nothing else counts: what a tangent belongs
  // to follows from inputs and outputs, and symbols_for_backward from the graph.
  bool operator==(const ViewAndMutationMeta& other) const;
  // Also what operator== ignores: tangents by their whole layout, the grad mode afterwards, the number of
  // symbols of backward, and which tokens and generators there are.
  bool same_in_every_field(const ViewAndMutationMeta& other) const;
};

// Whether an output of this kind is returned by the graph with its own memory, so that autograd may treat it
// as a plain result.
bool is_fresh(OutputKind kind);

}  // namespace penstock::graph
