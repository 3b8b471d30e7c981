// rms_norm compared with its formula in float64, gradients included; on a GPU this is a kernel of its own.
#include "penstock/torch/kernels/rms_norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <vector>

#include "penstock/fake.h"
#include "penstock/mode.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock {
namespace rms_norm_test {

struct Case {
  at::Device device;
  at::ScalarType dtype, weight_dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
    if (device == at::kCUDA && !torch::cuda::is_available()) continue;
    const at::Device where(device, device == at::kCUDA ? 0 : -1);
    all.insert(all.end(), {{where, at::kDouble, at::kDouble},
                           {where, at::kFloat, at::kFloat},
                           {where, at::kBFloat16, at::kFloat},
                           {where, at::kBFloat16, at::kBFloat16}});
  }
  return all;
}

double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 3e-6 : 1.0 / 64;
}

double off(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor wanted = expected.to(at::kDouble);
  return ((actual.to(at::kCPU, at::kDouble) - wanted).abs().max() / (wanted.abs().max() + 1e-30))
      .item<double>();
}

at::Tensor exact_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  return x * at::rsqrt(x.square().mean(-1, true) + epsilon) * weight;
}

void expect_norm(const Case& each, at::IntArrayRef sizes, bool strided) {
  SCOPED_TRACE(testing::Message() << each.device << " " << each.dtype << ", weight " << each.weight_dtype
                                  << ", " << sizes << (strided ? ", strided" : ""));
  at::Tensor values = at::randn(sizes, at::kDouble) * 3;
  if (strided) values = at::cat({values, values}, -1).narrow(-1, sizes.back() / 2, sizes.back());
  const at::Tensor x = values.to(each.device, each.dtype).set_requires_grad(true);
  const at::Tensor weight =
      (at::randn({sizes.back()}, at::kDouble) + 1).to(each.device, each.weight_dtype).set_requires_grad(true);
  const auto wide = [](const at::Tensor& of) {
    return of.detach().to(at::kCPU, at::kDouble).set_requires_grad(true);
  };
  const at::Tensor exact_x = wide(x), exact_weight = wide(weight),
                   expected = exact_norm(exact_x, exact_weight, 1e-3);
  const at::Tensor y = rms_norm(x, weight, 1e-3);
  EXPECT_EQ(y.scalar_type(), each.dtype);
  EXPECT_LT(off(y, expected), tolerance(each.dtype));
  const at::Tensor by = at::randn(sizes, at::kDouble);
  y.backward(by.to(each.device, each.dtype));
  expected.backward(by);
  EXPECT_EQ(x.grad().scalar_type(), each.dtype);
  EXPECT_EQ(weight.grad().scalar_type(), each.weight_dtype);
  EXPECT_LT(off(x.grad(), exact_x.grad()), 2 * tolerance(each.dtype));
  EXPECT_LT(off(weight.grad(), exact_weight.grad()), 2 * tolerance(each.dtype));
}

TEST(RmsNorm, RandomSizes) {
  torch::manual_seed(11);
  for (const Case& each : cases()) {
    for (const std::int64_t width : {1, 7, 32, 96, 768, 1000, 1536, 4096})
      expect_norm(each, {3, 5, width}, width % 2 == 0 && width > 32);
    expect_norm(each, {1, 24}, false);
    expect_norm(each, {700, 64}, false);
  }
}

TEST(RmsNorm, WithinAutocastAGpuRoundsOnce) {
  torch::manual_seed(12);
  const at::Tensor x = at::randn({4, 64}), weight = at::randn({64});
  {
    const AutocastScope scope(at::kCPU, std::optional<at::ScalarType>(at::kBFloat16));
    EXPECT_EQ(rms_norm(x, weight, 1e-5).scalar_type(), at::kFloat);
  }
  if (!torch::cuda::is_available()) return;
  const at::Tensor there = x.cuda().set_requires_grad(true), scale = weight.cuda();
  const AutocastScope scope(at::kCUDA, std::optional<at::ScalarType>(at::kBFloat16));
  const at::Tensor y = rms_norm(there, scale, 1e-5);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_LT(off(y, exact_norm(x.to(at::kDouble), weight.to(at::kDouble), 1e-5)), 1.0 / 256);
  y.sum().backward();
  EXPECT_EQ(there.grad().scalar_type(), at::kFloat);
}

TEST(RmsNorm, FakeShapes) {
  FakeMode mode;
  const ModeGuard guard(mode);
  const at::TensorOptions options = cases().back().device;  // a GPU if there is one
  const at::Tensor x = at::empty({2, 3, 8}, options.dtype(at::kBFloat16)).set_requires_grad(true),
                   weight = at::empty({8}, options).set_requires_grad(true);
  const at::Tensor y = rms_norm(x, weight, 1e-5);
  EXPECT_EQ(y.sizes(), x.sizes());
  y.sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(weight.grad().sizes(), weight.sizes());
}

// Against LibTorch's own derivatives of the formula: the first ones, and those of these.
TEST(RmsNorm, SecondDerivativesOnTheCpu) {
  const at::Tensor x = at::randn({2, 3, 5}, at::kDouble).requires_grad_(true),
                   weight = at::randn({5}, at::kDouble).requires_grad_(true);
  const at::Tensor by = at::randn({2, 3, 5}, at::kDouble), again = at::randn({2, 3, 5}, at::kDouble);
  const auto derivatives = [&](const at::Tensor& y) {
    const auto first = torch::autograd::grad({y}, {x, weight}, {by}, /*retain_graph=*/true, true);
    const at::Tensor mixed = (first[0] * again).sum() + (first[1] * first[1]).sum();
    const auto second = torch::autograd::grad({mixed}, {x, weight});
    return std::vector<at::Tensor>{first[0], first[1], second[0], second[1]};
  };
  const auto ours = derivatives(rms_norm(x, weight, 1e-3));
  const auto wanted = derivatives(x * at::rsqrt(at::mean(x * x, at::IntArrayRef{-1}, true) + 1e-3) * weight);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(at::allclose(ours[i], wanted[i], 1e-10, 1e-12)) << i;
}

TEST(RmsNorm, KeepsItsInputAloneOnTheCpu) {
  count_cpu_memory();
  const at::Tensor x = at::randn({64, 256}).requires_grad_(true),
                   weight = at::ones({256}).requires_grad_(true);
  const std::int64_t before = cpu_memory().live;
  const at::Tensor y = rms_norm(x, weight, 1e-5);
  const std::int64_t kept = cpu_memory().live - before;
  EXPECT_GE(kept, y.numel() * 4);
  EXPECT_LT(kept, y.numel() * 4 + 4096);
}

}  // namespace rms_norm_test
}  // namespace penstock
