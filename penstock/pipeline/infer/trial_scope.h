// What a trial run of a stage must not leave behind, put back when it ends.
//
// One scope lasts from the trial forward to the end of the trial backward: what autograd has saved of a buffer must still be what it was.
// Scopes of several stages of a rank end in reverse order.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "penstock/stage.h"

namespace penstock::pipeline {

// Buffers: values, geometry and place in autograd. A run on fake tensors writes no values, but what it computes may become part of a
// buffer's history.
class KeptBuffers {
 public:
  KeptBuffers(const StageModule& module, bool values);
  ~KeptBuffers();
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  struct Buffer {
    at::Tensor tensor;
    bool requires_grad;
    at::Tensor before, copy;  // its data, and a copy of its values; only with `values`
  };
  std::vector<Buffer> buffers_;
};

// The default generators of the CPU and of the stage's device.
class KeptGenerators {
 public:
  explicit KeptGenerators(at::Device device);
  ~KeptGenerators();
  KeptGenerators(const KeptGenerators&) = delete;
  KeptGenerators& operator=(const KeptGenerators&) = delete;

 private:
  void add(at::Generator generator);
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

}  // namespace penstock::pipeline
