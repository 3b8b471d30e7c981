// Restores the state that a trial run of a stage must not change, when the trial ends.
//
// One scope lasts from the trial forward to the end of the trial backward: a buffer that autograd has saved
// must not change in between. Scopes of several stages of a rank end in reverse order.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "penstock/stage.h"

namespace penstock {

// Restores buffers: values, geometry and autograd history. A run on fake tensors writes no values, but what
// it computes may become part of a buffer's history.
class SavedBuffers {
 public:
  SavedBuffers(const StageModule& module, bool values);
  ~SavedBuffers();
  SavedBuffers(const SavedBuffers&) = delete;
  SavedBuffers& operator=(const SavedBuffers&) = delete;

 private:
  struct Buffer {
    at::Tensor tensor;
    bool requires_grad;
    at::Tensor before, copy;  // its data, and a copy of its values; only with `values`
  };
  std::vector<Buffer> buffers_;
};

// Restores the default generators of the CPU and of the stage's device.
class SavedGenerators {
 public:
  explicit SavedGenerators(at::Device device);
  ~SavedGenerators();
  SavedGenerators(const SavedGenerators&) = delete;
  SavedGenerators& operator=(const SavedGenerators&) = delete;

 private:
  void add(at::Generator generator);
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

}  // namespace penstock
