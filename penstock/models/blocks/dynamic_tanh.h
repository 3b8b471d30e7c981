// Dynamic tanh (DyT): weight * tanh(alpha * x) + bias over the last dim, with a learnt number alpha. Used in
// place of a norm: it bounds large elements without a sum over the width.
//
//   DynamicTanh norm(1024);
//   y = norm->forward(x);
//
// 16-bit dtypes are computed in float32 and rounded once.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>

#include "penstock/models/blocks/initial_values.h"

namespace penstock::models {

class DynamicTanhImpl : public torch::nn::Cloneable<DynamicTanhImpl> {
 public:
  static constexpr double kInitialAlpha = 0.5;

  explicit DynamicTanhImpl(std::int64_t width);
  void reset() override;
  // Sets weight to 1, bias to 0 and alpha to kInitialAlpha, whatever the seed.
  void initialize(const std::string& name, const BlockInit& init);
  // [..., width], plain or distributed. Throws ValueError for another width.
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;  // [width]
  at::Tensor alpha;         // [1]

 private:
  std::int64_t width_;
};
TORCH_MODULE(DynamicTanh);

}  // namespace penstock::models
