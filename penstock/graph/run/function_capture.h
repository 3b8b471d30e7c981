// A function captured for one kind of call: what it does to its inputs, how its results alias, and what it
// computes, forward and backward, as one graph without writes. The first stage on the way to a compiled call:
//
//   FunctionCapture capture = capture_function(function, inputs);
//   PartitionedCapture halves = partition(std::move(capture), Partitioner::MinCut);
//   CompiledCall call(std::move(halves), graph_compiler("executor"));
//   Values results = call.run(inputs);
//
// Every stage is a value. The graph of a capture can be read, and replaced by one with the same inputs and
// outputs, before it is partitioned.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/compile_options.h"
#include "penstock/graph/ir/joint_graph.h"
#include "penstock/graph/partition/partition.h"
#include "penstock/graph/run/call_guard.h"
#include "penstock/graph/run/dynamic_call.h"
#include "penstock/graph/run/run_again.h"
#include "penstock/graph/wrap/call_wrapper.h"

namespace penstock::graph {

class PassList;
struct PassLog;

struct FunctionCapture {
  CallGuard guard;                     // the calls for which it is valid
  std::vector<WrapperInUse> wrappers;  // outermost first
  ViewAndMutationMeta meta;            // of the function inside the wrappers
  Convention convention;               // the inputs of that function
  JointGraph joint;                    // without writes
  // For each primal: whether its data is written; whether an input in the same memory changes.
  std::vector<char> primal_written, primal_shares_changed;
  std::vector<Geometry> geometry_after;  // of the mutated inputs, in the order of the forward outputs
  // Of these: the input in whose memory an input is after set_, if it is one of them.
  std::vector<std::optional<std::size_t>> memory_after;
  // How a backward that is differentiated is computed; null for a function without backward.
  std::shared_ptr<const RunAgain> run_again;
  SecondDerivatives second_derivatives = SecondDerivatives::RunAgain;
  std::vector<StorageId> memory_of_output;  // of the forward outputs, before the writes were removed
  std::vector<DynamicSymbol> symbols;       // of a capture for all sizes; its table is that of the graph

  // Of the function as it is called.
  const ViewAndMutationMeta& user_meta() const { return wrappers.empty() ? meta : wrappers.front().outer; }
  // Of a decoded capture: the function as it is called, which runs again for second derivatives.
  void set_function(Function function);
};

// Runs the function on fake tensors: nothing is computed. `keep_input_mutations`: the graph itself writes
// inputs of which only the data changes and where autograd would not notice
// (CompileOptions::keep_input_mutations).
FunctionCapture capture_function(const Function& function, const Values& inputs,
                                 const Convention& convention = {},
                                 const CallWrappers& wrappers = default_call_wrappers(),
                                 bool keep_input_mutations = false);

// Which states outside of the graph become inputs and outputs of it.
struct ExplicitStates {
  bool effects = false;         // of side effects: tokens (CompileOptions::effect_tokens)
  bool random_numbers = false;  // of generators (CompileOptions::explicit_random_states)
};
// Changes the graph of a capture (wrap/effect_tokens.h, wrap/random_numbers.h), and notes it in the metadata.
// Throws NotImplemented, naming it, for an operator whose state cannot be an argument.
FunctionCapture with_explicit_states(FunctionCapture capture, const ExplicitStates& states);

// Calls `visit(meta)` for the metadata of the function as it is called, and inside each of the wrappers.
template <class Capture, class Visit>
void for_each_meta(Capture& capture, Visit&& visit) {
  for (auto& used : capture.wrappers) visit(used.outer);
  visit(capture.meta);
}

// How a graph is split in two.
struct SplitOptions {
  SplitOptions(Partitioner how = Partitioner::Default) : partitioner(how) {}
  explicit SplitOptions(const CompileOptions& options)
      : partitioner(options.partitioner),
        activations(options.activations),
        split_backward(options.split_backward) {}

  Partitioner partitioner;
  ActivationOptions activations = {};
  bool split_backward = false;  // CompileOptions::split_backward
};
// Throws ValueError for options that contradict each other or are malformed.
void check_split(const SplitOptions& options);
// Throws what plan_activations() throws (partition/activation_plan.h).
Partition split_graph(const JointGraph& joint, const SplitOptions& options);

// A capture whose graph is split in two.
struct PartitionedCapture {
  FunctionCapture capture;
  Partition halves;
};
PartitionedCapture partition(FunctionCapture capture, const SplitOptions& options);
// The same with passes on the halves (run/graph_passes.h). `log` may be null.
PartitionedCapture partition(FunctionCapture capture, const SplitOptions& options, const PassList& passes,
                             PassLog* log);

}  // namespace penstock::graph
