// The causal convolution against sums written out token by token in float64.
#include "penstock/torch/scan/causal_convolution.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mode.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace causal_convolution_test {

using test::has_text;
using test::message_of;

struct Case {
  at::Device device;
  at::ScalarType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all{{at::kCPU, at::kDouble}, {at::kCPU, at::kFloat}, {at::kCPU, at::kBFloat16}};
  if (torch::cuda::is_available())
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf})
      all.push_back({at::Device(at::kCUDA, 0), dtype});
  return all;
}

double tolerance(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 1.0 / 64
         : dtype == at::kHalf   ? 1.0 / 256
         : dtype == at::kFloat  ? 2e-5
                                : 1e-11;
}

at::Tensor randn(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }

// Documents of random lengths; a number may come again in a later document.
at::Tensor random_documents(std::int64_t batch, std::int64_t length, double change) {
  at::Tensor numbers = at::zeros({batch, length}, at::kLong);
  const at::Tensor changes = at::rand({batch, length}).lt(change);
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = 1; t < length; ++t)
      numbers[b][t] = (numbers[b][t - 1] + changes[b][t].to(at::kLong)).remainder(3);
  return numbers;
}

at::Tensor plain(const CausalConvolution& job) {
  const std::int64_t batch = job.x.size(0), length = job.x.size(1), taps = job.weight.size(1);
  std::vector<at::Tensor> rows;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = 0; t < length; ++t) {
      at::Tensor sum = job.bias.defined() ? job.bias : at::zeros({job.x.size(2)}, job.x.options());
      bool inside = true;
      for (std::int64_t back = 0; back < taps && back <= t && inside; ++back) {
        sum = sum + job.weight.select(1, taps - 1 - back) * job.x[b][t - back];
        if (job.documents.defined() && t - back > 0)
          inside = job.documents[b][t - back].item<std::int64_t>() ==
                   job.documents[b][t - back - 1].item<std::int64_t>();
      }
      rows.push_back(job.silu ? sum * at::sigmoid(sum) : sum);
    }
  return at::stack(rows).view(job.x.sizes());
}

void expect_near(const at::Tensor& value, const at::Tensor& wanted, double near, const std::string& what) {
  ASSERT_TRUE(value.defined()) << what;
  ASSERT_EQ(value.sizes(), wanted.sizes()) << what;
  const at::Tensor off = (value.to(at::kDouble).cpu() - wanted).abs().max();
  EXPECT_LE(off.item<double>(), near * (1 + wanted.abs().max().item<double>())) << what;
}

CausalConvolution as(const CausalConvolution& job, const Case& each) {
  const auto leaf = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.defined() ? tensor.detach().to(each.device).to(dtype).set_requires_grad(true)
                            : at::Tensor();
  };
  const at::ScalarType weights = each.dtype == at::kDouble ? at::kDouble : at::kFloat;
  return {.x = leaf(job.x, each.dtype),
          .weight = leaf(job.weight, weights),
          .bias = leaf(job.bias, weights),
          .documents = job.documents.defined() ? job.documents.to(each.device) : at::Tensor(),
          .silu = job.silu};
}

TEST(CausalConvolution, EqualsSumsWrittenOutWithGradients) {
  torch::manual_seed(3);
  for (int number = 0; number < 14; ++number) {
    const auto pick = [](std::int64_t low, std::int64_t high) {
      return at::randint(low, high + 1, {1}).item<std::int64_t>();
    };
    const std::int64_t batch = pick(1, 2),
                       length = number == 0   ? 1
                                : number == 1 ? 70
                                              : pick(2, 9),
                       channels = number == 1 ? 8 : pick(1, 11), taps = pick(1, 4);
    CausalConvolution job{.x = randn({batch, length, channels}), .weight = randn({channels, taps})};
    if (number % 2 == 0) job.bias = randn({channels});
    if (number % 3 != 0) job.documents = random_documents(batch, length, 0.3);
    job.silu = number % 4 < 2;
    const at::Tensor weights = randn(job.x.sizes());
    for (const Case& each : cases()) {
      const std::string what = "case " + std::to_string(number) + " " + each.device.str() + " " +
                               c10::toString(each.dtype) + ", " + std::to_string(length) + " tokens";
      const CausalConvolution own = as(job, each);
      // The reference has the rounded inputs.
      const Case exact{at::kCPU, at::kDouble};
      const CausalConvolution wanted = as(own, exact);
      const at::Tensor y = causal_convolution(own), expected = plain(wanted);
      EXPECT_EQ(y.scalar_type(), each.dtype);
      const double near = tolerance(each.dtype);
      expect_near(y, expected.detach(), near, what);
      const at::Tensor rounded = weights.to(each.dtype);
      y.backward(rounded.to(each.device));
      expected.backward(rounded.to(at::kDouble));
      expect_near(own.x.grad(), wanted.x.grad(), 2 * near, what + ", x");
      expect_near(own.weight.grad(), wanted.weight.grad(), 2 * near, what + ", weight");
      if (own.bias.defined()) expect_near(own.bias.grad(), wanted.bias.grad(), 2 * near, what + ", bias");
    }
  }
}

TEST(CausalConvolution, ReadsRowsOfALargerTensor) {
  torch::manual_seed(4);
  for (const Case& each : cases()) {
    const at::Tensor all = randn({2, 6, 20}).to(each.device).to(each.dtype);
    const at::Tensor weight =
        randn({8, 4}).to(each.device).to(each.dtype == at::kDouble ? at::kDouble : at::kFloat);
    for (const at::Tensor& part :
         {all.narrow(2, 4, 8), all.narrow(2, 3, 8), all.transpose(0, 1).narrow(2, 4, 8),
          all.narrow(2, 0, 16).slice(2, 0, 16, 2)}) {
      const at::Tensor y = causal_convolution({.x = part, .weight = weight, .silu = true});
      EXPECT_TRUE(y.is_contiguous());
      EXPECT_TRUE(at::equal(y, causal_convolution({.x = part.contiguous(), .weight = weight, .silu = true})))
          << each.device << part.strides();
    }
  }
}

// A row in pieces of any size equals the whole row bit for bit: the same sums are computed.
TEST(CausalConvolution, PiecesEqualTheWholeRow) {
  torch::manual_seed(5);
  for (const std::int64_t taps : {1, 2, 4}) {
    const at::Tensor x = at::randn({2, 11, 5}), weight = at::randn({5, taps}), bias = at::randn({5});
    const at::Tensor documents = random_documents(2, 11, 0.3);
    for (const bool with_documents : {false, true}) {
      const at::Tensor numbers = with_documents ? documents : at::Tensor();
      const at::Tensor whole =
          causal_convolution({.x = x, .weight = weight, .bias = bias, .documents = numbers, .silu = true});
      at::Tensor memory = at::zeros({2, taps - 1, 5}),
                 seen = with_documents ? documents.narrow(1, 0, 1).expand({2, taps - 1}) : at::Tensor();
      std::vector<at::Tensor> pieces;
      std::int64_t at = 0;
      for (const std::int64_t size : {1, 1, 3, 1, 5}) {
        CausalConvolution job{.x = x.narrow(1, at, size), .weight = weight, .bias = bias, .silu = true};
        if (with_documents) job.documents = documents.narrow(1, at, size);
        const ConvolutionPiece piece = causal_convolution_step(job, memory, seen);
        pieces.push_back(piece.y);
        memory = piece.memory;
        if (with_documents) seen = at::cat({seen, job.documents}, 1).narrow(1, size, taps - 1);
        at += size;
      }
      EXPECT_TRUE(at::equal(at::cat(pieces, 1), whole)) << taps << " taps, documents " << with_documents;
    }
  }
}

TEST(CausalConvolution, FakeTensorsHaveTheShapes) {
  const at::Tensor x = make_fake({2, 7, 6}, at::TensorOptions(at::kBFloat16)).set_requires_grad(true),
                   weight = make_fake({6, 4}).set_requires_grad(true),
                   bias = make_fake({6}).set_requires_grad(true);
  const at::Tensor y = causal_convolution(
      {.x = x, .weight = weight, .bias = bias, .documents = make_fake({2, 7}, at::TensorOptions(at::kLong))});
  ASSERT_TRUE(is_fake(y));
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(weight.grad().sizes(), weight.sizes());
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(bias.grad().sizes(), bias.sizes());
}

TEST(CausalConvolution, ErrorsNameTheArgument) {
  const at::Tensor x = at::zeros({2, 5, 3}), weight = at::zeros({3, 4});
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { causal_convolution({.x = x[0], .weight = weight}); }),
                       "causal_convolution: x: got 2 dims"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { causal_convolution({.x = x, .weight = weight.t()}); }),
                       "weight: got [4, 3], expected [3, taps]"));
  EXPECT_TRUE(has_text(
      message_of<ValueError>([&] { causal_convolution({.x = x, .weight = weight, .bias = at::zeros({4})}); }),
      "bias: got [4], expected [3]"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         causal_convolution({.x = x, .weight = weight, .documents = at::zeros({2, 5})});
                       }),
                       "documents: got float32, expected integers"));
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] {
                 causal_convolution({.x = x, .weight = weight, .documents = at::zeros({2, 4}, at::kLong)});
               }),
               "expected [2, 5], one number per token"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         causal_convolution_step({.x = x, .weight = weight}, at::zeros({2, 2, 3}));
                       }),
                       "memory: got [2, 2, 3], expected [2, 3, 3]"));
}

}  // namespace causal_convolution_test
}  // namespace penstock
