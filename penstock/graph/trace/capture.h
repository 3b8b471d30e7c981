// Captures a function, and its backward with it, as a graph.
//
//   const Graph forward = capture_forward(function, {x, w});
//   const ViewAndMutationMeta meta = analyze(function, {x, w});
//   const JointGraph joint = capture_joint(function, {x, w}, meta);
//
// Forward alone takes one input per tensor among the function's inputs and returns its results.
//
// The joint graph is forward and backward in one, recorded through autograd. Its inputs are the tensors among the function's inputs,
// then one tangent, the gradient of a result, for each entry of `tangents`. Its outputs are
//   the inputs that are written, as they are afterwards (meta.mutated_at_run_time());
//   the function's results, where those that are made at run time from something else (aliases) are left out as kNoValue;
//   the intermediate bases;
//   one gradient for each tensor among the inputs, kNoValue for those that get none;
//   the inputs that backward writes (in a user's autograd function), as they are afterwards.
// Inputs are separate values here, whatever memory they share: see input_plan.h for those that are written and shared.
// Views and in-place operators are recorded as they come; functionalize() takes the writes out.
//
// Throws NotImplemented where backward writes what others would notice and a graph cannot do: a gradient that it was given, a tensor that forward
// returned, an input that needs a gradient, that forward writes too, or whose shape it changes.
//
// Tensor subclasses among inputs and results are taken apart (subclass_record.h): the graph is over the plain tensors in them, gradients are those that
// autograd gives for the subclasses themselves.
//
// Nothing is computed, and no random numbers are drawn. Thread rule: as for the function.
#pragma once

#include <optional>

#include "penstock/graph/trace/analyze.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/joint_graph.h"

namespace penstock::graph {

Graph capture_forward(const Function& function, const Values& inputs);

JointGraph capture_joint(const Function& function, const Values& inputs, const ViewAndMutationMeta& meta, const Convention& convention = {});

// Both from one run of the function, at half the price, for inputs that share no memory with each other. Without a joint graph where the
// function writes a leaf that needs a gradient: then capture_joint() must run it again.
struct AnalyzedCapture {
  ViewAndMutationMeta meta;
  std::optional<JointGraph> joint;
};
AnalyzedCapture analyze_and_capture(const Function& function, const Values& inputs, const Convention& convention = {});

}  // namespace penstock::graph
