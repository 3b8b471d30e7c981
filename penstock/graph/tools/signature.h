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
// The inputs of the graph are, in this order: tokens, parameters, buffers, user inputs, tangents. The
// outputs: tokens, mutated inputs, user outputs, gradients. An output is named by its value ("%12"), or by
// the value and a number ("%12.1") if the value occurred before.
// Inputs and outputs are identified by position, never by name. Any count that does not match is a ValueError
// that names the surplus entry.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

struct BackwardSignature {
  std::map<GraphOutput, Qualified> gradients_to_parameters;
  std::map<GraphOutput, GraphInput> gradients_to_user_inputs;
  GraphOutput loss_output;

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
  std::vector<GraphInput> input_tokens;
  std::vector<GraphOutput> output_tokens;

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

}  // namespace penstock::graph
