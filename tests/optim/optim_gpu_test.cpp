// Optimizers, clipping and loss scaling on a GPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "penstock/gradients.h"
#include "penstock/optimizer.h"

namespace penstock::optim {
namespace optim_gpu_test {

const at::Device kDevice(at::kCUDA, 0);

std::vector<NamedParameter> make(at::ScalarType dtype = at::kFloat) {
  std::vector<NamedParameter> result;
  torch::manual_seed(3);
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{300, 50}, {13}, {}, {3, 4, 5}, {0, 2}})
    result.push_back(
        {"p" + std::to_string(result.size()), at::randn(shape).to(kDevice, dtype).set_requires_grad(true)});
  return result;
}

void set_gradients(const std::vector<NamedParameter>& parameters, int step) {
  torch::manual_seed(step);
  for (const NamedParameter& parameter : parameters)
    at::Tensor(parameter.tensor).mutable_grad() =
        at::randn(parameter.tensor.sizes()).to(kDevice, parameter.tensor.scalar_type());
}

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> result;
  for (const NamedParameter& parameter : parameters) result.push_back(parameter.tensor);
  return result;
}

TEST(OptimGpu, AdamWAndSgdAgainstTorch) {
  for (const Kernels kernels : {Kernels::Auto, Kernels::Foreach})
    for (const int kind : {0, 1, 2, 3}) {
      const auto own = make(), other = make();
      std::unique_ptr<Optimizer> ours;
      std::unique_ptr<torch::optim::Optimizer> theirs;
      if (kind == 0) {
        ours =
            std::make_unique<AdamW>(own, AdamWOptions{.lr = 0.02, .weight_decay = 0.1, .kernels = kernels});
        theirs = std::make_unique<torch::optim::AdamW>(tensors_of(other),
                                                       torch::optim::AdamWOptions(0.02).weight_decay(0.1));
      } else {
        const double momentum = kind == 1 ? 0 : 0.9;
        ours = std::make_unique<SGD>(own, SGDOptions{.lr = 0.02,
                                                     .momentum = momentum,
                                                     .nesterov = kind == 3,
                                                     .weight_decay = 0.1,
                                                     .kernels = kernels});
        theirs = std::make_unique<torch::optim::SGD>(
            tensors_of(other),
            torch::optim::SGDOptions(0.02).momentum(momentum).nesterov(kind == 3).weight_decay(0.1));
      }
      for (int step = 0; step < 20; ++step) {
        set_gradients(own, step);
        set_gradients(other, step);
        ours->step();
        theirs->step();
      }
      for (std::size_t i = 0; i < own.size(); ++i)
        EXPECT_TRUE(at::allclose(own[i].tensor, other[i].tensor, 1e-5, 1e-5)) << kind << " " << own[i].name;
    }
}

TEST(OptimGpu, ClipGradNorm) {
  for (const double order : {2.0, std::numeric_limits<double>::infinity()})
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const auto own = make(dtype);
      set_gradients(own, 1);
      std::vector<at::Tensor> before;
      double expected = 0;
      for (const NamedParameter& parameter : own) {
        const at::Tensor gradient = parameter.tensor.grad().to(at::kDouble);
        before.push_back(gradient.clone());
        if (gradient.numel() == 0) continue;
        expected = order == 2 ? std::hypot(expected, gradient.norm().item<double>())
                              : std::max(expected, gradient.abs().max().item<double>());
      }
      const ClipResult result = clip_grad_norm(own, 0.5, {.order = order});
      EXPECT_TRUE(result.norm.is_cuda());
      EXPECT_NEAR(result.value(), expected, 1e-5 * expected);
      const double rtol = dtype == at::kFloat ? 1e-5 : 1e-2;
      for (std::size_t i = 0; i < own.size(); ++i)
        EXPECT_TRUE(
            at::allclose(own[i].tensor.grad().to(at::kDouble), before[i] * (0.5 / expected), rtol, 1e-6))
            << own[i].name;
    }
}

TEST(OptimGpu, NotFiniteGradientsStayAsTheyAre) {
  const auto own = make();
  set_gradients(own, 1);
  own[1].tensor.grad()[3] = std::numeric_limits<float>::infinity();
  const at::Tensor before = own[0].tensor.grad().clone();
  EXPECT_FALSE(clip_grad_norm(own, 0.5).finite());
  EXPECT_TRUE(at::equal(own[0].tensor.grad(), before));
  EXPECT_TRUE(clip_grad_norm(own, 0.5, {.non_finite = NonFinite::Skip}).skipped);
  EXPECT_EQ(non_finite_gradients(own), std::vector<std::string>{"p1"});
}

TEST(OptimGpu, LossScaler) {
  LossScaler scaler({.initial_scale = 8, .growth_interval = 1});
  const auto own = make();
  set_gradients(own, 1);
  const at::Tensor before = own[0].tensor.grad().clone();
  EXPECT_TRUE(scaler.unscale(own));
  EXPECT_TRUE(at::equal(own[0].tensor.grad() * 8, before));
  scaler.update();
  EXPECT_EQ(scaler.scale(), 16);
  own[3].tensor.grad()[0][0][0] = std::nan("");
  EXPECT_FALSE(scaler.unscale(own));
  scaler.update();
  EXPECT_EQ(scaler.scale(), 8);
}

}  // namespace optim_gpu_test
}  // namespace penstock::optim
