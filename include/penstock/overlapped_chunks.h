// The backward of one chunk and the forward of another as one call, for training loops that alternate them
// by themselves as DualPipe does. Pipelines (pipeline.h) do so in their overlapped units.
//
//   OverlappedForward next{.module = StageModule(block), .inputs = Tree::tuple({x})};
//   OverlappedBackward previous{.loss = torch::nn::Linear(4, 1)->forward(torch::ones({1, 4})).sum()};
//   OverlappedResult made = overlapped_chunks(next, previous);
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "penstock/pytree.h"
#include "penstock/stage_module.h"

namespace penstock {

// The chunk that runs forward.
struct OverlappedForward {
  StageModule module;           // what computes it
  Tree inputs = {};             // a tuple or list is spread into several arguments; anything else is one
  Tree kwargs = {};             // keyword arguments: a dictionary or None
  PipelineLoss criterion = {};  // computes the loss of the last stage; empty: no loss
  Tree target = {};             // second argument of the criterion
};

// The chunk that runs backward: from its loss, or from its outputs.
struct OverlappedBackward {
  at::Tensor loss = {};                       // a scalar; undefined: from the outputs
  std::vector<at::Tensor> outputs = {};       // those that need no gradient are ignored
  std::vector<at::Tensor> output_grads = {};  // one for each output; undefined: that output adds nothing
};

// What the forward made.
struct OverlappedResult {
  Tree outputs;     // as the module returned them, with their graph
  at::Tensor loss;  // with its graph; undefined without a criterion
};

// Runs the backward of one chunk, which adds to .grad() of its leaves, then the forward of the other. The
// memory of the graph of the first is free before the second one begins. Throws ValueError for a backward
// with both a loss and outputs, for neither, and for another number of gradients than of outputs, before
// anything runs.
OverlappedResult overlapped_chunks(const OverlappedForward& forward, const OverlappedBackward& backward);

}  // namespace penstock
