// Maps the inputs and outputs of a captured module's graph to the names by which exporters, optimizers and
// checkpoints know them.
//
//   auto fast = graph::compile(net);
//   fast->forward(x);
//   const Compiled& compiled = compiled_entry(*fast, 0);
//   SignatureOptions options{.state = &state_of(*fast)};
//   options.hidden_outputs = 1;   // a compiled module returns the structure of its results as well
//   const GraphSignature signature = make_signature(compiled.joint(0), compiled.inner_meta(0), options);
//   signature.inputs_to_parameters.at(GraphInput("0.weight"));      // Qualified("0.weight")
//
// The signature lists inputs in this order: tokens, parameters, buffers, user inputs, states of generators;
// then those of backward. Outputs: tokens, mutated inputs, user outputs, states of generators; then gradients
// and the states of backward. In a joint graph, states of both kinds come last (ir/joint_graph.h);
// forward_signature() and backward_signature() describe the graphs that a compiler gets. An output is named
// by its value ("%12"), or by the value and a number ("%12.1") if the value occurred before. Inputs and
// outputs are identified by position, never by name. Any count that does not match is a ValueError that names
// the surplus entry.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/graph/partition/partition.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/graph/trace/capture.h"

namespace penstock::graph {

// A string with a kind, so that names of inputs, outputs and parameters cannot be mixed up.
template <class Tag>
struct NameOf {
  NameOf() = default;
  explicit NameOf(std::string text) : text(std::move(text)) {}
  auto operator<=>(const NameOf&) const = default;
  std::string text;
};
using GraphInput = NameOf<struct GraphInputTag>;
using GraphOutput = NameOf<struct GraphOutputTag>;
using Qualified = NameOf<struct QualifiedTag>;  // of a parameter or buffer, in its module

// States that a graph takes and returns: "token[ordered]", "random_state[cpu]". An output is the state after
// the input of the same index.
struct StateSignature {
  std::vector<GraphInput> input_tokens, input_random_states;
  std::vector<GraphOutput> output_tokens, output_random_states;

  bool operator==(const StateSignature&) const = default;
};

struct BackwardSignature {
  std::map<GraphOutput, Qualified> gradients_to_parameters;
  std::map<GraphOutput, GraphInput> gradients_to_user_inputs;
  GraphOutput loss_output;
  StateSignature states;

  bool operator==(const BackwardSignature&) const = default;
};

struct GraphSignature {
  std::vector<Qualified> parameters, buffers;
  std::vector<GraphInput> user_inputs;
  std::vector<GraphOutput> user_outputs;
  std::map<GraphInput, Qualified> inputs_to_parameters, inputs_to_buffers;
  std::map<GraphOutput, Qualified> buffers_to_mutate, parameters_to_mutate;
  std::map<GraphOutput, GraphInput> user_inputs_to_mutate;
  std::string in_spec, out_spec;  // the structure of arguments and results: TreeSpec::to_string
  std::optional<BackwardSignature> backward;
  StateSignature states;  // of forward

  bool operator==(const GraphSignature&) const = default;
};

struct SignatureOptions {
  // Of the captured module; null for a function, whose inputs are all user inputs.
  const ModuleState* state = nullptr;
  // Among the results; if not set, the first one that requires a gradient.
  std::optional<std::size_t> loss_index;
  std::size_t hidden_outputs = 0;  // trailing results that are hidden from the user
  // Refuses a graph with backward that writes a parameter or an input that requires a gradient, for users of
  // signatures who rely on parameters being changed by optimizers only.
  bool joint_checks = false;
  std::string in_spec, out_spec;
};

// Throws ValueError for graphs that a signature cannot describe: tensor subclasses, writes that stay in the
// graph, writes in backward, inputs of which only the shape changes, results made from others at run time,
// and what joint_checks refuses.
GraphSignature make_signature(const JointGraph& joint, const ViewAndMutationMeta& meta,
                              const SignatureOptions& options = {});

std::string to_text(const GraphSignature& signature);

// What the inputs and outputs of one half are as its compiler gets it.
struct HalfSignature {
  // Forward: tokens, then one for each tensor among the inputs, then states of generators.
  // Backward: saved tensors and tangents, then tokens, then states of generators.
  std::vector<GraphInput> inputs;
  // Forward: tokens, mutated inputs, results and bases, states of generators, saved tensors.
  // Backward: gradients and inputs that backward writes, states of generators, tokens.
  std::vector<GraphOutput> outputs;
  std::vector<GraphOutput> saved;  // of forward: the last outputs
  StateSignature states;

  bool operator==(const HalfSignature&) const = default;
};
HalfSignature forward_signature(const JointGraph& joint, const Partition& halves);
HalfSignature backward_signature(const JointGraph& joint, const Partition& halves);

}  // namespace penstock::graph
