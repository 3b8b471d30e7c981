// The forward of a whole module as a graph that autograd can run again, with the module of every node: what
// is cut into stages.
//
//   const ForwardTrace trace = trace_forward(function, inputs, {.roots = {model}, .names = names, .found =
//   12}); trace.module_of_node[7];                          // "encoder.layers.0.attention"
//   to_text(trace.graph);                             // forward only; writes and views as they occurred
//
// Nodes are the operators that reach the kernels, with autograd on: called again through the dispatcher, in
// order, they compute the same bits and have the same derivatives. The exception is a user-defined autograd
// function (torch::autograd::Function): its forward is recorded as nodes without derivative, and its
// backward, recorded as well, is a CustomFunction. Other nodes that ran without grad mode have no derivative
// either.
//
// Nothing is computed. Parameters and buffers become fake for the time of the trace; those without memory (on
// the meta device, or fake) are traced as if they were on `device`.
// Thread safety: that of the function.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/trace/analyze.h"

namespace penstock::graph {

// One call of a user-defined autograd function.
struct CustomFunction {
  std::string name;  // "LeanRmsNorm", for messages
  // The nodes of its forward are among [first, end). Its results get their history when the last of these has
  // run.
  std::size_t first = 0, end = 0;
  std::vector<ValueId> inputs;    // one for each gradient it returns; kNoValue: that gradient is not wanted
  std::vector<ValueId> outputs;   // one for each gradient it takes; kNoValue: nothing uses this result
  std::vector<ValueId> tangents;  // the values that stand for these gradients
  std::vector<ValueId> saved;     // values of forward that backward reads
  std::vector<Node> backward;
  std::vector<Operand> gradients;  // one for each input: what backward returns

  // Calls `visit(ValueId)` for each value that the function needs where it gets its history.
  template <class Visit>
  void for_each_use(Visit&& visit) const {
    for (const std::vector<ValueId>* values : {&inputs, &outputs, &saved})
      for (const ValueId value : *values)
        if (value != kNoValue) visit(value);
  }
};

struct TraceSettings {
  std::vector<std::shared_ptr<torch::nn::Module>>
      roots;                       // with several, paths begin with the index of the root
  std::vector<std::string> names;  // of the inputs
  std::size_t found = 0;           // how many of them are parameters and buffers
  // All names of parameters and buffers that have several, the one among `names` first. Where the module that
  // is running does not tell, the first use in the forward is under the first name, the second under the
  // second.
  std::map<std::size_t, std::vector<std::string>> aliases;
  at::Device device = at::kCPU;  // of tensors without memory
};

struct ForwardTrace {
  // Its inputs are the tensors among the function's inputs, its outputs what the function returned.
  Graph graph;
  std::vector<std::size_t> input_of_graph;  // by input of the graph: of the function
  std::vector<std::string> module_of_node;  // by node; empty for the root
  std::vector<std::size_t> marks;           // pipe_split(): the number of nodes before each
  std::vector<CustomFunction> functions;    // in the order of `end`
  std::vector<char> requires_grad;          // by value
  std::size_t found = 0;                    // inputs of the graph that are parameters and buffers

  // "%12: float32[3] = aten::relu(%11) in module 'layer1.relu'", for messages.
  std::string line(std::size_t node) const;
};

// Throws DataDependentError for a forward that depends on values, NotImplemented for a user-defined autograd
// function that cannot be recorded and for a gradient hook that the forward sets, TypeError for distributed
// tensors among the inputs; each names the module.
ForwardTrace trace_forward(const Function& function, const Values& inputs, const TraceSettings& settings);

// "encoder.layers.0" for "encoder.layers.0.weight"; empty for a tensor of the root.
std::string owner_of(const std::string& tensor_name);
// Whether `path` is the module `module` or inside of it. Everything is inside of the root, "".
bool is_inside(const std::string& path, const std::string& module);

}  // namespace penstock::graph
