// Attention with windows, documents, padding and a bias on a GPU: the kernels that are chosen there.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "penstock/torch/kernels/fused_attention.h"
#include "penstock/torch/kernels/window_attention.h"
#include "tests/torch/attention_reference.h"

namespace penstock {
namespace attention_gpu_test {

using test::attend_by_definition;
using test::AttentionRules;

at::Tensor random_on_gpu(std::int64_t heads, std::int64_t length, at::ScalarType dtype) {
  return at::randn({2, length, heads, 32}, at::TensorOptions(at::kCUDA).dtype(dtype))
      .transpose(1, 2)
      .requires_grad_();
}

at::Tensor wide(const at::Tensor& x) { return x.detach().to(at::kDouble).requires_grad_(); }

// Against float64 from the same rounded inputs. float32: 1e-4, because products may use TensorFloat-32 only
// if that is enabled; bfloat16: one rounding of weights and result each, of values up to 4: 2^-5.
TEST(AttentionOnAGpu, AgainstTheDefinition) {
  torch::manual_seed(1);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    for (const std::int64_t window : {0, 1, 100})
      for (int kind = 0; kind < 8; ++kind) {
        const std::int64_t length = window == 0 ? 1100 : 300;
        AttentionRules rules{.queries = length, .keys = length, .window = window};
        AttentionMask mask = AttentionMask::causal(length, length);
        const at::TensorOptions on_gpu(at::kCUDA);
        if ((kind & 1) != 0) {
          rules.documents = at::rand({2, length}, on_gpu).lt(0.02).to(at::kInt).cumsum(1, at::kInt);
          mask = mask.with_documents(rules.documents);
        }
        if ((kind & 2) != 0) {
          rules.valid =
              torch::tensor({length - 7, std::int64_t{0}}, at::TensorOptions(at::kLong)).to(at::kCUDA);
          mask = mask.with_valid(rules.valid);
        }
        at::Tensor bias;
        if ((kind & 4) != 0) {
          bias = at::randn({1, 4, length, length}, on_gpu.dtype(dtype)).requires_grad_();
          rules.bias = wide(bias);
          mask = mask.with_bias(bias);
        }
        SCOPED_TRACE(fmt::format("{} window {} kind {}", c10::toString(dtype), window, kind));
        const at::Tensor q = random_on_gpu(4, length, dtype), k = random_on_gpu(2, length, dtype),
                         v = random_on_gpu(2, length, dtype);
        std::vector<at::Tensor> exact{wide(q), wide(k), wide(v)}, inputs{q, k, v};
        if (bias.defined()) {
          exact.push_back(rules.bias);
          inputs.push_back(bias);
        }
        const double tolerance = dtype == at::kFloat ? 1e-4 : 0.03125;
        const at::Tensor expected = attend_by_definition(exact[0], exact[1], exact[2], rules);
        const at::Tensor actual = attend(q, k, v, mask, window);
        EXPECT_EQ(actual.scalar_type(), dtype);
        EXPECT_LT((actual.to(at::kDouble) - expected).abs().max().item<double>(), tolerance);
        const auto wanted = torch::autograd::grad({expected.sum()}, exact);
        const auto found = torch::autograd::grad({actual.sum()}, inputs);
        for (std::size_t i = 0; i < wanted.size(); ++i) {
          // Gradients of keys, values and a bias for all rows are sums of many rounded terms.
          const double size = std::max(1.0, wanted[i].abs().max().item<double>());
          EXPECT_LT((found[i].to(at::kDouble) - wanted[i]).abs().max().item<double>(), 2 * tolerance * size)
              << "input " << i;
        }
      }
}

// Where there is a kernel that skips keys outside of the window, it is used, also for grouped queries.
TEST(AttentionOnAGpu, WindowsUseTheirKernel) {
  const at::Tensor q = random_on_gpu(4, 300, at::kBFloat16), k = random_on_gpu(2, 300, at::kBFloat16);
  EXPECT_FALSE(has_window_kernel(q.to(at::kFloat), k.to(at::kFloat)));
  if (!has_window_kernel(q, k)) GTEST_SKIP() << "no such kernel in this LibTorch or for this GPU";
  EXPECT_TRUE(
      at::equal(attend(q, k, k, AttentionMask::causal(300, 300), 100), attend_in_window(q, k, k, 100)));
}
}  // namespace attention_gpu_test
}  // namespace penstock
