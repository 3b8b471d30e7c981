// Unmodified torch::nn modules and small functions with inputs, for tests that run each of them in two ways
// and compare.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace penstock::zoo {

using Tensors = std::vector<at::Tensor>;

struct Case {
  std::string name;
  // Built by `make`, so that a test may build it under a mode; null for plain functions.
  std::shared_ptr<torch::nn::Module> module;
  // Everything that a caller would use; differentiable if it is floating point.
  std::function<Tensors(const Tensors&)> forward;
  Tensors inputs;
  bool random = false;  // draws random numbers in forward
};

// Each call rebuilds the case from a fixed seed, so that two calls have equal parameters and inputs.
struct Entry {
  std::string name;
  std::function<Case()> make;
};

inline void PrintTo(const Entry& entry, std::ostream* out) { *out << entry.name; }

const std::vector<Entry>& all();

// Sum over the floating-point outputs of (output * a fixed pattern): a loss with a non-uniform gradient.
at::Tensor loss_of(const Tensors& outputs);

}  // namespace penstock::zoo
