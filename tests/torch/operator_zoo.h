// Single operator calls with inputs of many kinds, for tests that run each of them in two ways and compare.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace penstock::zoo {

struct OperatorCall {
  std::string name;
  std::function<std::vector<at::Tensor>()> inputs;  // recreated each time, from a fixed seed
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor>&)> run;
  bool differentiable = true;   // floating-point inputs require gradients, and backward runs too
  bool may_be_refused = false;  // not every supported LibTorch can run it on real tensors
};

inline void PrintTo(const OperatorCall& call, std::ostream* out) { *out << call.name; }

// Names are unique and fit a GoogleTest parameter.
const std::vector<OperatorCall>& operator_calls();

// Operators that not every supported LibTorch has: called by schema name, so that older versions compile.
at::Tensor call_by_name(const std::string& name, const std::string& overload,
                        std::vector<c10::IValue> arguments);
bool has_operator(const std::string& name, const std::string& overload);

}  // namespace penstock::zoo
