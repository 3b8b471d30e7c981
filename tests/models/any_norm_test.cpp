#include "penstock/models/blocks/any_norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/throws.h"

namespace penstock::models {
namespace any_norm_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

DynamicTanh random_tanh(std::int64_t width, at::ScalarType dtype = at::kDouble) {
  DynamicTanh norm(width);
  norm->to(dtype);
  const at::NoGradGuard no_grad;
  std::uint64_t seed = 0;
  for (const at::Tensor& parameter : norm->parameters())
    parameter.copy_(random_tensor(parameter.sizes(), ++seed, dtype));
  return norm;
}

TEST(DynamicTanh, EqualsTheFormulaWithItsGradients) {
  std::uint64_t seed = 10;
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{1, 1, 5}, {2, 3, 5}, {4, 5}, {5}, {2, 0, 5}}) {
    DynamicTanh norm = random_tanh(5);
    const at::Tensor x = leaf(random_tensor(sizes, ++seed));
    const at::Tensor e = (2 * norm->alpha * x).exp();
    expect_gradients({norm->forward(x)}, {norm->weight * (e - 1) / (e + 1) + norm->bias},
                     {x, norm->weight, norm->bias, norm->alpha});
  }
  DynamicTanh norm = random_tanh(5);
  const at::Tensor x = random_tensor({2, 3, 5}, 4);
  EXPECT_TRUE(at::equal(norm->forward(scattered(x)), norm->forward(x)));
}

TEST(DynamicTanh, SixteenBitsAreRoundedOnce) {
  DynamicTanh norm = random_tanh(8, at::kFloat);
  const at::Tensor x = random_tensor({3, 4, 8}, 1, at::kBFloat16);
  const at::Tensor y = norm->forward(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(y, norm->forward(x.to(at::kFloat)).to(at::kBFloat16)));
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  EXPECT_TRUE(at::equal(norm->forward(x), y));
  EXPECT_EQ(norm->forward(x.to(at::kFloat)).scalar_type(), at::kFloat);
}

TEST(AnyNorm, IsTheNormOfItsKind) {
  const at::Tensor x = random_tensor({2, 3, 6}, 1);
  const AnyNorm rms = make_norm("rms_norm", 6, 1e-3), bounded = make_norm("dynamic_tanh", 6, 1e-3);
  for (const AnyNorm& norm : {rms, bounded}) norm.module()->to(at::kDouble);
  EXPECT_LT(apart(rms.forward(x), x / (x.pow(2).mean(-1, true) + 1e-3).sqrt()), 1e-14);
  EXPECT_LT(apart(bounded.forward(x), at::tanh(0.5 * x)), 1e-14);
  for (const NormKind kind : {NormKind::RmsNorm, NormKind::DynamicTanh}) {
    const NormOptions options{.kind = kind, .width = 6};
    const AnyNorm norm(options);
    expect_shapes(*norm.module(), options.shapes(""));
    EXPECT_EQ(norm_kind_from(to_text(kind)), kind);
    {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : norm.module()->parameters()) parameter.fill_(7);
    }
    norm.initialize("blocks.0.norm", {});
    EXPECT_TRUE(at::equal(norm.forward(x.to(at::kFloat)), AnyNorm(options).forward(x.to(at::kFloat))));
  }
  EXPECT_EQ((NormOptions{.kind = NormKind::DynamicTanh, .width = 6}.parameter_count()), 13);
}

TEST(AnyNorm, CapturedEqualsEager) {
  for (const char* kind : {"rms_norm", "dynamic_tanh"}) {
    const auto make = [=] {
      const AnyNorm norm = make_norm(kind, 6, 1e-5);
      return std::make_shared<CalledModule>(
          std::vector<std::shared_ptr<torch::nn::Module>>{norm.module()},
          [norm](const Tensors& in) { return Tensors{norm.forward(in[0])}; });
    };
    expect_captured(make, {leaf(random_tensor({2, 3, 6}, 1, at::kFloat))});
  }
}

TEST(AnyNorm, BadInputSaysWhatIsWanted) {
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { make_norm("batch", 6, 1e-5); }),
                       "model.norm: got 'batch', expected rms_norm or dynamic_tanh"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { make_norm("rms_norm", 0, 1e-5); }), "model.width"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { make_norm("rms_norm", 4, 0); }), "model.norm_epsilon"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] {
                         DynamicTanh(6)->forward(at::zeros({2, 5}));
                       }),
                       "got Float [2, 5], expected [..., 6]"));
  DynamicTanh norm = random_tanh(6);
  const at::Tensor x = random_tensor({2, 6}, 2);
  expect_copies(norm, [&](DynamicTanhImpl& each) { return each.forward(x); });
}

}  // namespace any_norm_test
}  // namespace penstock::models
