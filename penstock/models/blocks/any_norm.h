// A norm whose kind is an option: RMSNorm or dynamic tanh, with one interface.
//
//   // in a module
//   AnyNorm norm = make_norm("dynamic_tanh", 1024, 1e-5);
//   register_module("norm", norm.module());
//   y = norm.forward(x);
//
// Parameters have the names of the module inside (norm_options.h: NormOptions::shapes), so that a model with
// RMSNorm has the same names as one that holds RmsNorm itself. Copies refer to the same module, like module
// holders of LibTorch.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <variant>

#include "penstock/models/blocks/dynamic_tanh.h"
#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/blocks/norm.h"
#include "penstock/models/plan/norm_options.h"

namespace penstock::models {

class AnyNorm {
 public:
  // Holds no module, until one is assigned.
  AnyNorm() = default;
  // Throws ConfigError for options that are not valid.
  explicit AnyNorm(const NormOptions& options);

  // For register_module().
  std::shared_ptr<torch::nn::Module> module() const;
  // [..., width]
  at::Tensor forward(const at::Tensor& x) const;
  // Sets the initial values, which depend neither on the name nor on the seed.
  void initialize(const std::string& name, const BlockInit& init) const;

 private:
  std::variant<RmsNorm, DynamicTanh> norm_ = RmsNorm(nullptr);
};

// `kind`: "rms_norm" or "dynamic_tanh". Throws ConfigError for another one.
AnyNorm make_norm(std::string_view kind, std::int64_t width, double epsilon);

}  // namespace penstock::models
