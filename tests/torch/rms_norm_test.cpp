// rms_norm compared with its formula in float64, gradients included; on a GPU this is a kernel of its own.
#include "penstock/torch/kernels/rms_norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mode.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/torch/without_gradient.h"

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

// ---- unusual arguments: those of the formula, or an error ----

at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  const at::Tensor rows = x * at::rsqrt(at::mean(x * x, at::IntArrayRef{-1}, true) + epsilon);
  return weight.defined() ? rows * weight : rows;
}

using Norm = at::Tensor (*)(const at::Tensor&, const at::Tensor&, double);

// The result and the gradients of those that require one.
std::vector<at::Tensor> normed(Norm norm, const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& by) {
  const at::Tensor y = norm(x, weight, 1e-3);
  std::vector<at::Tensor> all{y}, leaves;
  if (x.requires_grad()) leaves.push_back(x);
  if (weight.defined() && weight.requires_grad()) leaves.push_back(weight);
  EXPECT_EQ(y.requires_grad(), !leaves.empty());
  if (leaves.empty()) return all;
  for (const at::Tensor& gradient :
       torch::autograd::grad({y}, leaves, {by.to(y.options().requires_grad(false))}, c10::nullopt, false,
                             /*allow_unused=*/true))
    all.push_back(gradient);
  return all;
}

TEST(RmsNorm, RandomFormsOfArguments) {
  constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  for (unsigned seed = 0; seed < 400 && !HasFailure(); ++seed) {
    std::mt19937 random(seed);
    torch::manual_seed(seed);
    const auto choose = [&](std::size_t count) { return static_cast<std::int64_t>(random() % count); };
    const at::Device device(torch::cuda::is_available() && choose(2) > 0 ? at::kCUDA : at::kCPU);
    std::vector<std::int64_t> sizes;
    const std::int64_t dims = choose(4);
    for (std::int64_t i = 0; i < dims; ++i) sizes.push_back(choose(5) == 0 ? 0 : 1 + choose(6));
    const at::ScalarType dtype = kDtypes[choose(4)], weight_dtype = kDtypes[choose(4)];
    const bool x_wants = choose(3) > 0, weight_wants = choose(3) > 0;
    const std::int64_t width = sizes.empty() ? 1 : sizes.back();
    const std::vector<std::vector<std::int64_t>> forms{{width}, {width}, {1}, {}, sizes, {3, width}};
    const std::int64_t form = choose(forms.size() + 1);
    const auto made = [&](std::vector<std::int64_t> of, at::ScalarType as, bool wants) {
      at::Tensor values = at::randn(of, at::kDouble) + 0.25;
      const std::int64_t layout = choose(3);
      if (layout == 1 && values.dim() > 1) values = values.transpose(0, -1).contiguous().transpose(0, -1);
      if (layout == 2 && values.dim() > 0)
        values = at::stack({values, values}, values.dim()).select(values.dim(), 1);
      // Not contiguous after the cast, either.
      return values.to(device, as, false, false, at::MemoryFormat::Preserve)
          .detach()
          .set_requires_grad(wants);
    };
    const at::Tensor x = made(sizes, dtype, x_wants);
    if (form == 5 && dims > 1 && sizes[sizes.size() - 2] != 3 && sizes[sizes.size() - 2] != 1) continue;
    const at::Tensor weight = form == static_cast<std::int64_t>(forms.size())
                                  ? at::Tensor()
                                  : made(forms[static_cast<std::size_t>(form)], weight_dtype, weight_wants);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + c10::str(x.sizes()) + " of " + c10::toString(dtype) +
                 ", weight form " + std::to_string(form) + " of " + c10::toString(weight_dtype));
    const auto exact = [](const at::Tensor& of) {
      return of.defined() ? of.detach().to(at::kCPU, at::kDouble).set_requires_grad(of.requires_grad()) : of;
    };
    const at::Tensor exact_x = exact(x), exact_weight = exact(weight);
    // Numbers that every dtype has.
    const at::Tensor by =
        at::randint(-8, 9, plain_norm(exact_x, exact_weight, 1e-3).sizes(), at::kDouble).div(4);
    const auto ours = normed(&rms_norm, x, weight, by),
               wanted = normed(&plain_norm, exact_x, exact_weight, by);
    EXPECT_EQ(ours[0].scalar_type(), dtype);
    ASSERT_EQ(ours.size(), wanted.size());
    for (std::size_t i = 0; i < ours.size(); ++i) {
      ASSERT_EQ(ours[i].sizes(), wanted[i].sizes()) << i;
      const auto near_of = [](at::ScalarType of) {
        return of == at::kDouble ? 1e-6 : of == at::kFloat ? 1e-4 : 1.0 / 16;
      };
      const double near = std::max(near_of(dtype), weight.defined() ? near_of(weight_dtype) : 0.0);
      EXPECT_TRUE(at::allclose(ours[i].to(at::kCPU, at::kDouble), wanted[i], near, near)) << i;
    }
    if (x_wants) {
      EXPECT_EQ(ours[1].scalar_type(), dtype);
    }
    if (weight.defined() && weight_wants) {
      EXPECT_EQ(ours.back().scalar_type(), weight_dtype);
    }
  }
}

TEST(RmsNorm, WithoutAGradientThereIsNone) {
  for (const Case& each : cases()) {
    const at::Tensor x = at::randn({3, 8}).to(each.device, each.dtype).set_requires_grad(true),
                     weight = at::randn({8}).to(each.device, each.weight_dtype).set_requires_grad(true);
    test::expect_no_gradient(rms_norm(x, weight, 1e-3), {x, weight});
    test::expect_no_gradient(rms_norm(x, at::Tensor(), 1e-3), {x});
  }
}

TEST(RmsNorm, RejectsWhatDoesNotFit) {
  const at::Tensor x = at::randn({3, 8});
  EXPECT_TRUE(test::has_text(test::message_of<ValueError>([&] { rms_norm(x, at::ones({7}), 1e-3); }),
                             "rms_norm: weight: got [7] of Float"));
  EXPECT_THROW(rms_norm(x, at::ones({8}, at::kLong), 1e-3), ValueError);
  EXPECT_THROW(rms_norm(at::ones({3, 8}, at::kLong), at::ones({8}), 1e-3), ValueError);
  EXPECT_THROW(rms_norm(at::Tensor(), at::ones({8}), 1e-3), ValueError);
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
