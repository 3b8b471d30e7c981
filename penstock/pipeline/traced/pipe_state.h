// What a Pipe holds (trace_pipeline.h): the traces of the model for each example and mode, cut alike.
//
// Immutable once it is made.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/stages/pipe_cut.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/trace_pipeline.h"

namespace penstock {

// A module of the model.
struct ModelModule {
  std::string path;  // "" for the root
  std::string kind;  // "torch::nn::LinearImpl"
  bool training = true;
};

// One trace: of one example, in training or evaluation mode.
struct PipeVariant {
  TreeSpec args, kwargs;     // structure of the example
  std::vector<Tree> leaves;  // of args, then of kwargs; without tensors, which are None
  graph::ForwardTrace trace;
  std::vector<graph::InputKind> kinds;  // by input of the graph
  graph::PipeCut cut;
  TreeSpec result;
  std::vector<bool> training;  // by module of the model
  // By module: whether it may also be in the other mode. So are modules in training if all of them in
  // evaluation compute the same; one that was in evaluation was traced in that mode only.
  std::vector<bool> any_mode;

  // The leaf of args and kwargs that an input of the graph is.
  std::size_t leaf_of(std::size_t input) const { return trace.input_of_graph[input] - trace.found; }
  const graph::Geometry& geometry(graph::ValueId value) const { return trace.graph[value].geometry; }
};

// A parameter or buffer of a stage.
struct OwnedTensor {
  std::size_t index = 0;           // among those of the model
  std::vector<std::string> names;  // that it has in the stage, at least one
};

struct PipeState {
  std::vector<PipeVariant> variants;  // the first is of the first example, in the mode of the model
  std::string why_no_evaluation;      // why there is none in evaluation mode
  std::vector<ModelModule> modules;   // parents first
  std::vector<std::string> names;     // of the parameters, then the buffers, each once
  std::vector<at::Tensor> tensors;
  std::size_t parameters = 0;                   // how many of them are parameters
  std::vector<std::vector<OwnedTensor>> state;  // by stage, ascending by index
  at::Device device = at::kCPU;                 // where operators that make tensors made them in the trace
  AutocastState autocast;                       // around the trace
  at::ScalarType default_dtype = at::kFloat;    // in the trace
  PipeGraph outer;

  int stages() const { return static_cast<int>(state.size()); }
  const PipeVariant& main() const { return variants.front(); }
  // The first stage that uses a parameter or buffer.
  int first_user(std::size_t index) const;
  bool is_parameter(std::size_t index) const { return index < parameters; }
};

const PipeState& state_of(const Pipe& pipe);

// Throws ValueError for a stage that a pipe does not have.
void check_stage(const PipeState& pipe, int stage);
// The graph of the main variant.
PipeGraph outer_graph(const PipeState& pipe);
// "float32[4, 8]"
std::string record_text(const graph::Geometry& geometry);

}  // namespace penstock
