// RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight, over the last dim.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace penstock::models {

class RmsNormImpl : public torch::nn::Cloneable<RmsNormImpl> {
 public:
  RmsNormImpl(std::int64_t width, double epsilon);
  void reset() override;
  // [..., width], plain or distributed.
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;

 private:
  std::int64_t width_;
  double epsilon_;
};
TORCH_MODULE(RmsNorm);

}  // namespace penstock::models
