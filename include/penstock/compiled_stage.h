// Stages of a pipeline that run as captured graphs: forward and backward of a stage are captured on the first
// call and replayed after that, with the same bits.
//
//   torch::nn::Sequential block(torch::nn::Linear(16, 16), torch::nn::Tanh());
//   StageModule plain([block](at::Tensor x) mutable { return block->forward(x); }, {block.ptr()});
//   StageModule fast = compiled_stage(plain, {.captured = [](const StageCapture& capture) {
//     std::printf("%zu operators in %.2f s\n", capture.nodes, capture.seconds);
//   }});
//   // PipelineStage(fast, 0, 2, at::kCPU) trains block
//
// What a graph depends on is described in compile.h and docs/capture.md. Besides:
//
//   Values of the running step (StepContext). Keys of random numbers and the loss scale are those of each
//   replay. A forward that computes with others (step, microbatch, seed) is refused with a StateError that
//   shows the operator: each capture is repeated in another step, and both graphs must be equal. A forward
//   must not choose between operators by these values. Rows and the number of microbatches belong to what a
//   capture is valid for.
//   Sharded modules (fully_shard.h): all parameters of the stage are gathered for its forward, and freed
//   after it unless the schedule holds them. Not with MixedPrecision::param_dtype and cast_forward_inputs.
//   Schedules that split the backward (ZBVZeroBubble, DualPipeV): set compile.split_backward. The backward
//   then consists of two graphs, I runs the first one and W the second one, and what W does not need is freed
//   after I. Without it, I runs the whole backward, and W does nothing. Gradients that the graph sums over
//   ranks, and those of operators that compute them together with the gradient of an input, are computed in
//   I.
//   Modules, parameters and buffers that are replaced (replace_module): the stage is captured again.
//   Blocks of a chain become one graph.
//   Trial runs, recomputations and forwards under a mode (mode.h) call the original module.
//
// Thread safety: that of the module.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "penstock/compile_options.h"
#include "penstock/pytree.h"
#include "penstock/stage_module.h"

namespace penstock {

// Where a graph came from.
enum class GraphSource : std::uint8_t {
  Captured,  // the module ran on fake tensors
  Cache,     // the cache folder (docs/compile_cache.md)
  Artifact   // CacheOptions::artifact
};

// A graph that a stage got: captured, or loaded in place of a capture.
struct StageCapture {
  std::size_t graph = 1;   // which graph of this kind of call it is, from 1; larger: it was captured again
  std::size_t graphs = 1;  // of the stage, all kinds together
  std::size_t nodes = 0;   // operators, forward and backward
  // Operators of the second part of a split backward (CompileOptions::split_backward).
  std::size_t deferred = 0;
  double seconds = 0;  // for capturing or loading, compiling and checking, with the first run
  // Why the graph before it was not valid: "args[0] has sizes [1, 8], in the capture [2, 8]"; empty for the
  // first one.
  std::string reason = {};
  GraphSource source = GraphSource::Captured;  // where the graph came from
  // How long capturing and compiling took; for a graph that was loaded, when its entry was made.
  double made_in_seconds = 0;
};

// How a stage is compiled.
struct CompiledStageOptions {
  // Arguments are named by position ("args[0]") and by keyword ("kwargs['mask']"). With an identity of
  // compile.cache, a later process loads the graphs instead of running the module on fake tensors.
  graph::CompileOptions compile = {};
  // Whether forward depends on which rows of a microbatch this process has (StepContext::rows), as dropout
  // does. If false, data-parallel ranks share the entries of a cache; a forward that depends on its first row
  // is then a StateError.
  bool uses_rows = true;
  // Most graphs for one kind of call (structure of the arguments, training flags, grad mode). A call that
  // would need one more is a StateError that names what differs: captures that never repeat are slower than
  // none.
  std::size_t max_graphs = 16;
  // Called for each graph that was captured or loaded. May be empty.
  std::function<void(const StageCapture& capture)> captured = {};
  // What forward leaves outside of its result and of buffers: tensors in members of a module, which would
  // otherwise belong to the capture. values_left() is called after each captured forward, in its scope;
  // set_values_left() after each run of the graph, with the values of this run. Both or neither.
  std::function<Tree()> values_left = {};
  std::function<void(const Tree& values)> set_values_left = {};  // see values_left
};

// Returns a module that runs as a graph. It has the modules, parameters and buffers of the original one.
// Nothing is captured yet. Forward throws what a compiled module throws (compile.h), and DataDependentError
// for control flow that depends on values. Throws ValueError for only one of values_left and set_values_left.
StageModule compiled_stage(StageModule module, CompiledStageOptions options = {});

}  // namespace penstock
