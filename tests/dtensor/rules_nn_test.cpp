// Softmax, losses, normalizations, embeddings, attention and convolutions on distributed tensors, against one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace {

namespace F = torch::nn::functional;

TEST(SoftmaxRules, EveryDim) {
  check_rules({
      {.name = "softmax", .inputs = {sample({5, 3})}, .body = [](const Tensors& in) { return Tensors{at::softmax(in[0], 1), at::softmax(in[0], 0)}; }},
      {.name = "log_softmax", .inputs = {sample({5, 3})}, .body = [](const Tensors& in) { return Tensors{at::log_softmax(in[0], -1), at::log_softmax(in[0], 0)}; }},
      {.name = "softmax of a batch", .inputs = {sample({2, 3, 4})}, .body = [](const Tensors& in) { return Tensors{at::softmax(in[0], 1), at::log_softmax(in[0], 2)}; }, .most = 30},
      {.name = "softmax of large values", .inputs = {sample({4, 3}) * 400}, .body = [](const Tensors& in) { return Tensors{at::softmax(in[0], 1), at::log_softmax(in[0], 0)}; }, .partial = false},
      {.name = "softmax of bfloat16", .inputs = {sample({4, 5}).to(at::kBFloat16)}, .body = [](const Tensors& in) { return Tensors{at::softmax(in[0], 1)}; }, .partial = false, .rtol = 2e-2, .atol = 1e-2},
  });
}

// Masked attention has rows of minus infinity, and shards that hold nothing else.
TEST(SoftmaxRules, MinusInfinity) {
  check_rules({
      {.name = "softmax with a causal mask", .inputs = {sample({4, 4})},
       .body = [](const Tensors& in) { return Tensors{at::softmax(in[0].masked_fill(in[0].detach() > 0, -std::numeric_limits<double>::infinity()), 0)}; }},
  });
}

}  // namespace
}  // namespace penstock::test
