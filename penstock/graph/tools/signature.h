// Which input and output of a captured module's graph is what: the names by which others (exporters, optimizers, checkpoints) know them.
//
//   auto fast = graph::compile(net);
//   fast->forward(x);
//   const Compiled& compiled = fast->compiled(0);
//   SignatureOptions options{.state = &fast->state()};
//   options.hidden_outputs = 1;                     // a compiled module returns how its results nest as one more result
//   const GraphSignature signature = make_signature(compiled.joint(0), compiled.inner_meta(0), options);
//   signature.inputs_to_parameters.at(GraphInput("0.weight"));      // Qualified("0.weight")
//
// Inputs of the graph stand in the order: tokens, parameters, buffers, what the user gives, tangents. Outputs: tokens, inputs as they are
// after they were written, what the user gets, gradients. An output is named by its value ("%12"); one that was there before, by that and
// a number ("%12.1").
// Things are told apart by their place, never by their name. Every count that does not fit is a ValueError that names what is over.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/graph/trace/capture.h"
#include "penstock/graph/run/module_state.h"

namespace penstock::graph {

// A text of one kind: names of inputs, outputs and parameters cannot be taken for each other.
template <class Tag>
struct NameOf {
  NameOf() = default;
  explicit NameOf(std::string text) : text(std::move(text)) {}
  auto operator<=>(const NameOf&) const = default;
  std::string text;
};
using GraphInput = NameOf<struct GraphInputTag>;
using GraphOutput = NameOf<struct GraphOutputTag>;
using Qualified = NameOf<struct QualifiedTag>;  // of a parameter or buffer in its module

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
  std::string in_spec, out_spec;  // how arguments and results nest: TreeSpec::to_string
  std::optional<BackwardSignature> backward;
  std::vector<GraphInput> input_tokens;
  std::vector<GraphOutput> output_tokens;

  bool operator==(const GraphSignature&) const = default;
};

struct SignatureOptions {
  const ModuleState* state = nullptr;       // of the captured module; null: a function, all of whose inputs are the user's
  std::optional<std::size_t> loss_index;    // among the results; the first one that needs a gradient when not given
  std::size_t hidden_outputs = 0;           // results at the end that the user does not see
  std::string in_spec, out_spec;
};

// Throws ValueError where the graph has what no signature can say: tensor subclasses, writes that stay in the graph, writes in backward, inputs whose shape alone is changed,
// results that are made at run time from others, and in a graph with backward a parameter that is written.
GraphSignature make_signature(const JointGraph& joint, const ViewAndMutationMeta& meta, const SignatureOptions& options = {});

std::string to_text(const GraphSignature& signature);

}  // namespace penstock::graph
