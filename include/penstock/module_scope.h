// Tells whoever captures a forward which module is running, and where it may be cut into pipeline stages.
//
//   struct EncoderLayerImpl : torch::nn::Module {
//     at::Tensor forward(const at::Tensor& x) {
//       const ModuleScope scope(*this);           // operators from here on belong to this module
//       return x + body->forward(x);
//     }
//     torch::nn::Sequential body;
//   };
//
// LibTorch has no hooks around `forward`, so a module reports itself: one line at its beginning. Modules that
// do not are still known by their parameters and buffers: an operator that takes "layers.2.weight" belongs to
// "layers.2". The modules of a torch::nn::Sequential are reported for them (trace_pipeline.h). A scope costs
// two reads of a thread-local pointer when nothing is captured.
//
// Thread safety: a scope belongs to the thread that creates it; scopes nest.
#pragma once

#include <torch/nn/module.h>

namespace penstock {

// Internal.
class ScopeListener;

// The forward of one module, for as long as the object lives.
class ModuleScope {
 public:
  // The module must be one that the captured model has registered; others are ignored.
  explicit ModuleScope(const torch::nn::Module& module);
  // The forward has ended.
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  ScopeListener* listener_;
};

// Marks a place in a forward at which a pipeline stage ends and the next one begins, for
// PipeSplit::at_marks() (trace_pipeline.h). Does nothing otherwise.
void pipe_split();

}  // namespace penstock
