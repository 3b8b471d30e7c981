// What a function does to its inputs and how its outputs relate to memory that others hold: what must be known to replace a call
// of it by a call of a graph that writes nothing and returns nothing but fresh tensors.
//
//   const ViewAndMutationMeta meta = analyze(function, inputs);       // penstock/graph/trace/analyze.h
//   for (const std::size_t i : meta.mutated_at_run_time()) ...         // inputs to be written after the graph has run
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
  NonAlias,                              // memory of its own
  AliasOfInput,                          // a view of input `base_index`
  IsInput,                               // input `base_index` itself
  AliasOfIntermediateSaveAsOutput,       // a view of a tensor inside; this output adds it as intermediate base `base_index`
  AliasOfIntermediate,                   // a view of intermediate base `base_index`, which an earlier output has added
  AliasOfIntermediateBaseIsUserOutput,   // a view of output `base_index`
  UnsafeViewAlias,                       // a view of a tensor inside that nobody else sees: as good as memory of its own
  CustomFunctionView                     // a view made by a user's autograd function: differentiated like any other result
};
std::string_view to_text(OutputKind kind);

enum class MutationType : std::uint8_t { NotMutated, MutatedInGraph, MutatedOutOfGraph };
std::string_view to_text(MutationType type);

struct InputInfo {
  bool is_leaf = false;
  bool mutates_data = false;
  bool mutates_metadata = false;             // sizes, strides, offset
  bool mutations_hidden_from_autograd = true;
  bool mutations_under_no_grad = false;      // all of them under no_grad or in InferenceMode
  bool mutates_storage_metadata = false;     // set_: other memory
  bool resizes_storage = false;
  bool requires_grad = false;                // after the call
  bool keep_input_mutations = false;         // the graph may write this input itself where that is legal
  bool is_touched = false;                   // some operator writes it or its metadata, even if it ends up as it was
  bool is_tensor = true;                     // and so an input of the graph

  // Throws ValueError when the flags contradict each other: other memory is other metadata, and what changes the memory itself
  // can only be done in the graph.
  void validate(std::size_t input) const;
  MutationType mutation_type() const;

  bool operator==(const InputInfo&) const = default;
};

// What type an output has.
enum class OutputType : std::uint8_t { Tensor, Int, Float, Bool, None, String, Other };
std::string_view to_text(OutputType type);

struct OutputInfo {
  OutputKind kind = OutputKind::NonAlias;
  OutputType type = OutputType::Tensor;
  std::optional<std::size_t> base_index;     // among inputs, intermediate bases or outputs: see OutputKind
  bool requires_grad = false;
  bool requires_grad_for_backward = false;   // and something to differentiate: not so a view taken under no_grad
  std::optional<std::size_t> same_as;        // an earlier output that is the same tensor
  Geometry geometry;                         // of a tensor
  std::vector<std::size_t> dynamic_dims;     // of a tensor: whose sizes depend on symbols
  bool has_view_replay = false;              // the steps from its base to it say what it is; not so once the base has another shape
  bool by_geometry = false;                  // made from its base by as_strided, because no steps lead from it as it is after the call
  ViewReplay view;                           // the steps from its base, of an alias

  bool operator==(const OutputInfo&) const = default;
};

// Where a tangent, an input of backward, belongs to.
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
  std::vector<TangentInfo> tangents;               // mutated inputs, then outputs, then intermediate bases
  std::optional<bool> grad_mode_after;             // what the function leaves grad mode at, when it changes it
  // How many symbols backward depends on, once the graph is split. They are kept with the call; forward does not return them.
  std::size_t symbols_for_backward = 0;

  // ---- derived ----
  std::vector<std::size_t> mutated_at_run_time() const;      // written after the graph has run
  std::vector<std::size_t> mutated_in_graph() const;
  std::vector<std::size_t> mutated_in_graph_seen_by_autograd() const;
  std::vector<std::size_t> aliased_outputs() const;          // all kinds but NonAlias, UnsafeViewAlias, CustomFunctionView
  std::vector<std::size_t> unsafe_view_outputs() const;
  std::size_t outputs_non_aliased() const { return outputs.size() - aliased_outputs().size(); }
  std::size_t outputs_aliased_to_inputs() const;
  std::size_t outputs_aliased_to_intermediates() const;
  // What the forward graph returns before the tensors saved for backward: mutated inputs, outputs, intermediate bases.
  std::size_t forward_returns() const { return mutated_at_run_time().size() + outputs.size() + intermediate_bases; }
  // Which of the forward returns a tangent is the gradient of.
  std::size_t forward_place(const TangentInfo& tangent) const;
  // Some result has a gradient.
  bool needs_autograd() const;
  // Some result has a size that depends on symbols.
  bool dynamic_outputs() const;

  bool operator==(const ViewAndMutationMeta&) const = default;
};

// Whether an output of this kind comes out of the graph with memory of its own, so that autograd may treat it as a plain result.
bool is_fresh(OutputKind kind);

}  // namespace penstock::graph
