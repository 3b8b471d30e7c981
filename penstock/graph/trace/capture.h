// Captures a function and its backward as a graph.
//
//   const Graph forward = capture_forward(function, {x, w});
//   const ViewAndMutationMeta meta = analyze(function, {x, w});
//   const JointGraph joint = capture_joint(function, {x, w}, meta);
//
// A forward graph takes one input per tensor among the function's inputs and returns the function's results.
//
// The joint graph contains forward and backward, recorded through autograd. Its inputs are the tensors among
// the function's inputs, then one tangent (the gradient of a result) for each entry of `tangents`. Its
// outputs are
//   the mutated inputs with their new values (meta.mutated_at_run_time());
//   the function's results; those that are made from something else at run time (aliases) are omitted as
//     kNoValue;
//   the intermediate bases;
//   the new values of inputs that the graph is to write itself (meta.mutated_in_graph());
//   one gradient for each tensor among the inputs, kNoValue for those that have none;
//   the inputs that backward writes (in a user-defined autograd function), with their new values.
// Inputs are separate values here, whatever memory they share; wrap/synthetic_bases.h handles inputs that are
// written and shared. Views and in-place operators are recorded as they occur; functionalize() removes the
// writes.
//
// Throws NotImplemented if backward writes something that is visible outside and that a graph cannot write: a
// gradient that was passed to it, a tensor that forward returned, or an input that requires a gradient, that
// forward writes too, or whose shape backward changes.
//
// Tensor subclasses among inputs and results are flattened (subclass_record.h): the graph operates on the
// plain tensors inside them, and gradients are those that autograd computes for the subclasses themselves.
//
// Nothing is computed, and no random numbers are drawn. Thread safety: that of the function.
#pragma once

#include <optional>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/joint_graph.h"
#include "penstock/graph/trace/analyze.h"

namespace penstock::graph {

Graph capture_forward(const Function& function, const Values& inputs);

JointGraph capture_joint(const Function& function, const Values& inputs, const ViewAndMutationMeta& meta,
                         const Convention& convention = {});

// Analysis and joint graph from a single run of the function, at half the cost, for inputs that share no
// memory. There is no joint graph if the function writes a leaf that requires a gradient; capture_joint()
// must then run it again.
struct AnalyzedCapture {
  ViewAndMutationMeta meta;
  std::optional<JointGraph> joint;
};
AnalyzedCapture analyze_and_capture(const Function& function, const Values& inputs,
                                    const AnalyzeOptions& options = {});

}  // namespace penstock::graph
