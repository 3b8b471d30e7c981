// Softmax, losses, normalizations, embeddings, attention and convolutions on distributed tensors, against one
// process.
//
// Calls have many inputs, and their placements many combinations: a few of them, always the same, are tried
// on each mesh. PENSTOCK_RULE_COMBINATIONS=100 tries more.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <limits>
#include <string>

#include "penstock/errors.h"
#include "penstock/world.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_nn_test {

namespace F = torch::nn::functional;

std::size_t most(std::size_t usual) {
  const char* wanted = std::getenv("PENSTOCK_RULE_COMBINATIONS");
  return wanted ? std::stoul(wanted) : usual;
}

TEST(SoftmaxRules, EveryDim) {
  check_rules({
      {.name = "softmax",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::softmax(in[0], 1), at::softmax(in[0], 0)};
           }},
      {.name = "log_softmax",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::log_softmax(in[0], -1), at::log_softmax(in[0], 0)};
           }},
      {.name = "softmax of a batch",
       .inputs = {sample({2, 3, 4})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::softmax(in[0], 1), at::log_softmax(in[0], 2)};
           },
       .most = most(6)},
      {.name = "softmax of large values",
       .inputs = {sample({4, 3}) * 400},
       .body =
           [](const Tensors& in) {
             return Tensors{at::softmax(in[0], 1), at::log_softmax(in[0], 0)};
           },
       .partial = false,
       .most = most(6)},
      {.name = "softmax of bfloat16",
       .inputs = {sample({4, 5}).to(at::kBFloat16)},
       .body = [](const Tensors& in) { return Tensors{at::softmax(in[0], 1)}; },
       .partial = false,
       .rtol = 2e-2,
       .atol = 1e-2,
       .most = most(6)},
  });
}

// Masked attention has minus infinities, and shards that hold nothing else.
TEST(SoftmaxRules, MinusInfinity) {
  check_rules({
      {.name = "softmax with a mask",
       .inputs = {sample({4, 4})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::softmax(
                 in[0].masked_fill(in[0].detach() > 0, -std::numeric_limits<double>::infinity()), 0)};
           },
       .most = most(6)},
  });
}

at::Tensor targets_with_ignored(at::IntArrayRef shape, std::int64_t classes, std::int64_t ignored) {
  at::Tensor targets = sample_index(shape, classes, 3);
  targets.view({-1}).select(0, 1).fill_(ignored);
  return targets;
}

TEST(LossRules, LikelihoodOfClasses) {
  std::vector<RuleCase> cases;
  for (const std::int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum})
    cases.push_back({.name = "nll_loss, reduction " + std::to_string(reduction),
                     .inputs = {sample({5, 4}), targets_with_ignored({5}, 4, -100), sample_positive({4}, 2)},
                     .body =
                         [=](const Tensors& in) {
                           return Tensors{at::nll_loss(in[0], in[1], in[2].detach(), reduction),
                                          at::nll_loss(in[0], in[1], {}, reduction)};
                         },
                     .most = most(7)});
  cases.push_back(
      {.name = "nll_loss with ignore_index among the classes",
       .inputs = {sample({5, 4}), targets_with_ignored({5}, 4, 2)},
       .body =
           [](const Tensors& in) { return Tensors{at::nll_loss(in[0], in[1], {}, at::Reduction::Mean, 2)}; },
       .most = most(6)});
  for (const std::int64_t reduction : {at::Reduction::None, at::Reduction::Mean})
    cases.push_back(
        {.name = "nll_loss2d, reduction " + std::to_string(reduction),
         .inputs = {sample({2, 3, 2, 3}), targets_with_ignored({2, 2, 3}, 3, 1), sample_positive({3}, 2)},
         .body =
             [=](const Tensors& in) {
               return Tensors{at::nll_loss_nd(in[0], in[1], in[2].detach(), reduction, 1)};
             },
         .most = most(8)});
  cases.push_back({.name = "nll_loss of one row",
                   .inputs = {sample({5}), at::full({}, 3, at::kLong)},
                   .body = [](const Tensors& in) { return Tensors{at::nll_loss(in[0], in[1])}; },
                   .most = most(6)});
  check_rules(cases);
}

TEST(LossRules, CrossEntropy) {
  check_rules({
      {.name = "cross_entropy",
       .inputs = {sample({5, 4}), targets_with_ignored({5}, 4, -100)},
       .body = [](const Tensors& in) { return Tensors{F::cross_entropy(in[0], in[1])}; },
       .most = most(8)},
      {.name = "cross_entropy with weights",
       .inputs = {sample({5, 4}), targets_with_ignored({5}, 4, 1), sample_positive({4}, 2)},
       .body =
           [](const Tensors& in) {
             return Tensors{F::cross_entropy(
                 in[0], in[1], F::CrossEntropyFuncOptions().weight(in[2].detach()).ignore_index(1))};
           },
       .most = most(8)},
      {.name = "cross_entropy with probabilities",
       .inputs = {sample({4, 3}), sample_positive({4, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{F::cross_entropy(in[0], in[1])}; },
       .most = most(8)},
      {.name = "cross_entropy of a sequence",
       .inputs = {sample({2, 4, 3}), targets_with_ignored({2, 3}, 4, -100)},
       .body = [](const Tensors& in) { return Tensors{F::cross_entropy(in[0], in[1])}; },
       .most = most(8)},
  });
}

TEST(LossRules, LabelSmoothing) {
  std::vector<RuleCase> cases;
  for (const std::int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum})
    cases.push_back({.name = "cross_entropy with smoothed labels, reduction " + std::to_string(reduction),
                     .inputs = {sample({5, 4}), targets_with_ignored({5}, 4, -100), sample_positive({4}, 2)},
                     .body =
                         [=](const Tensors& in) {
                           return Tensors{
                               at::cross_entropy_loss(in[0], in[1], {}, reduction, -100, 0.1),
                               at::cross_entropy_loss(in[0], in[1], in[2].detach(), reduction, -100, 0.1)};
                         },
                     .most = most(8)});
  check_rules(cases);
}

TEST(LossRules, ByElement) {
  std::vector<RuleCase> cases;
  for (const std::int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const std::string name = ", reduction " + std::to_string(reduction);
    cases.push_back({.name = "mse, l1, smooth l1 and huber" + name,
                     .inputs = {sample({5, 3}), sample({5, 3}, 1)},
                     .body =
                         [=](const Tensors& in) {
                           return Tensors{at::mse_loss(in[0], in[1], reduction),
                                          at::l1_loss(in[0], in[1], reduction),
                                          at::smooth_l1_loss(in[0], in[1], reduction, 0.75),
                                          at::huber_loss(in[0], in[1], reduction, 0.75)};
                         },
                     .most = most(4)});
    cases.push_back(
        {.name = "binary cross entropy" + name,
         .inputs = {sample({4, 3}), sample({4, 3}, 1), sample_positive({3}, 2)},
         .body =
             [=](const Tensors& in) {
               const at::Tensor target = in[1].detach().sigmoid(), weight = in[2].detach();
               return Tensors{
                   at::binary_cross_entropy(in[0].sigmoid(), target, weight.expand({4, 3}), reduction),
                   at::binary_cross_entropy(in[0].sigmoid(), target, {}, reduction),
                   at::binary_cross_entropy_with_logits(in[0], target, {}, weight, reduction),
                   at::soft_margin_loss(in[0], target, reduction)};
             },
         .most = most(4)});
  }
  check_rules(cases);
}

TEST(LossRules, HalfGradientsOfAMeanStayInRange) {
  comm::run_ranks(2, std::chrono::seconds(30), [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor x = distribute_tensor(at::full({64, 3}, 60000.0, at::kHalf), mesh, {Shard{0}});
    const at::Tensor target = distribute_tensor(at::zeros({64, 3}, at::kHalf), mesh, {Shard{0}});
    const at::Tensor one = distribute_tensor(at::ones({}, at::kHalf), mesh, {Replicate{}});
    const at::Tensor gradient = at::mse_loss_backward(one, x, target, at::Reduction::Mean);
    EXPECT_EQ(gradient.scalar_type(), at::kHalf);
    // 2 * 60000 / (64 * 3)
    EXPECT_TRUE(at::equal(full_tensor(gradient).to(at::kFloat), at::full({64, 3}, 625.0)));
  });
}

TEST(LossRules, ATargetOutsideOfTheClassesIsAnError) {
  comm::run_ranks(2, std::chrono::seconds(30), [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor logits = distribute_tensor(sample({3, 4}), mesh, {Shard{1}});
    const at::Tensor target = distribute_tensor(at::full({3}, 4, at::kLong), mesh, {Replicate{}});
    EXPECT_THROW(F::cross_entropy(logits, target), ValueError);
  });
}

TEST(NormalizationRules, LayerNorm) {
  check_rules({
      {.name = "layer_norm",
       .inputs = {sample({5, 3, 4}), sample({4}, 1), sample({4}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::layer_norm(in[0], {4}, in[1], in[2])}; },
       .atol = 1e-5,
       .most = most(8)},
      {.name = "layer_norm of two dims",
       .inputs = {sample({3, 2, 4})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::layer_norm(in[0], {2, 4})};
           },
       .atol = 1e-5,
       .most = most(8)},
      {.name = "layer_norm without bias",
       .inputs = {sample({3, 4}), sample({4}, 1)},
       .body = [](const Tensors& in) { return Tensors{at::layer_norm(in[0], {4}, in[1])}; },
       .atol = 1e-5,
       .most = most(8)},
  });
}

TEST(NormalizationRules, GroupNorm) {
  check_rules({
      {.name = "group_norm",
       .inputs = {sample({3, 4, 5}), sample({4}, 1), sample({4}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::group_norm(in[0], 2, in[1], in[2])}; },
       .atol = 1e-5,
       .most = most(8)},
      {.name = "group_norm of many groups",
       .inputs = {sample({2, 12, 2, 2}), sample({12}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::group_norm(in[0], 12, in[1]), at::group_norm(in[0], 6)};
           },
       .atol = 1e-5,
       .most = most(8)},
  });
}

TEST(NormalizationRules, WeightNorm) {
  check_rules({
      {.name = "weight_norm",
       .inputs = {sample({3, 4}), sample({3, 1}, 1)},
       .body = [](const Tensors& in) { return Tensors{at::_weight_norm(in[0], in[1], 0)}; },
       .atol = 1e-5,
       .most = most(6)},
  });
}

TEST(NormalizationRules, BatchNorm) {
  const auto norm = [](const Tensors& in, bool training) {
    return at::batch_norm(in[0], in[1], in[2], in[3], in[4], training, 0.25, 1e-5, false);
  };
  check_rules({
      {.name = "batch_norm in training",
       .inputs = {sample({5, 3, 2}), sample({3}, 1), sample({3}, 2)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, false)};
           },
       .rtol = 1e-4,
       .atol = 1e-5,
       .most = most(8)},
      {.name = "batch_norm in training without parameters",
       .inputs = {sample({4, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::batch_norm(in[0], {}, {}, {}, {}, true, 0.1, 1e-5, false)};
           },
       .rtol = 1e-4,
       .atol = 1e-5,
       .most = most(6)},
      {.name = "batch_norm in training writes its statistics",
       .inputs = {sample({5, 3, 2}), sample({3}, 1), sample({3}, 2), sample({3}, 3), sample_positive({3}, 4)},
       .body =
           [=](const Tensors& in) {
             const Tensors own{in[0], in[1], in[2], in[3].detach().clone(), in[4].detach().clone()};
             const at::Tensor result = norm(own, true);
             return Tensors{result, own[3], own[4]};
           },
       .may_refuse = true,
       .rtol = 1e-4,
       .atol = 1e-5,
       .most = most(16)},
      {.name = "batch_norm in evaluation",
       .inputs = {sample({5, 3, 2}), sample({3}, 1), sample({3}, 2), sample({3}, 3), sample_positive({3}, 4)},
       .body =
           [=](const Tensors& in) {
             return Tensors{norm({in[0], in[1], in[2], in[3].detach(), in[4].detach()}, false)};
           },
       .rtol = 1e-4,
       .atol = 1e-5,
       .most = most(8)},
  });
}

TEST(EmbeddingRules, RowsWidthAndIndices) {
  check_rules({
      {.name = "embedding",
       .inputs = {sample({5, 3}), sample_index({4, 2}, 5)},
       .body = [](const Tensors& in) { return Tensors{at::embedding(in[0], in[1])}; },
       .most = most(7)},
      {.name = "embedding with padding",
       .inputs = {sample({5, 3}), sample_index({7}, 5)},
       .body = [](const Tensors& in) { return Tensors{at::embedding(in[0], in[1], 2)}; },
       .most = most(6)},
      {.name = "embedding scaled by frequency",
       .inputs = {sample({3, 2}), sample_index({6}, 3)},
       .body = [](const Tensors& in) { return Tensors{at::embedding(in[0], in[1], -1, true)}; },
       .most = most(6)},
      {.name = "embedding of one index",
       .inputs = {sample({5, 3}), sample_index({}, 5)},
       .body = [](const Tensors& in) { return Tensors{at::embedding(in[0], in[1])}; },
       .most = most(6)},
  });
}

// queries (batch, heads, length, width) as modules make them of (batch, length, width).
at::Tensor split_heads(const at::Tensor& tensor, std::int64_t heads) {
  return tensor.view({tensor.size(0), tensor.size(1), heads, tensor.size(2) / heads}).transpose(1, 2);
}

TEST(AttentionRules, WrittenOut) {
  check_rules({
      {.name = "matmul, softmax, matmul",
       .inputs = {sample({2, 4, 3, 2}), sample({2, 4, 5, 2}, 1), sample({2, 4, 5, 2}, 2)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::softmax(in[0].matmul(in[1].transpose(-2, -1)) / 1.5, -1).matmul(in[2])};
           },
       .atol = 1e-5,
       .most = most(6)},
      {.name = "attention of a module",
       .inputs = {sample({2, 3, 8}), sample({24, 8}, 1), sample({8, 8}, 2), sample({3, 3}, 3)},
       .body =
           [](const Tensors& in) {
             const auto qkv = torch::linear(in[0], in[1]).chunk(3, -1);
             const at::Tensor scores = split_heads(qkv[0], 4)
                                           .matmul(split_heads(qkv[1], 4).transpose(-2, -1))
                                           .masked_fill(in[3].detach() > 1, -1e4);
             return Tensors{torch::linear(
                 at::softmax(scores, -1).matmul(split_heads(qkv[2], 4)).transpose(1, 2).reshape({2, 3, 8}),
                 in[2])};
           },
       .rtol = 1e-4,
       .atol = 1e-4,
       .most = most(6)},
  });
}

// The operator of this LibTorch, under the name that it has in its version.
at::Tensor fused_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& mask, bool causal) {
  auto& dispatcher = c10::Dispatcher::singleton();
  c10::optional<c10::OperatorHandle> op = dispatcher.findSchema({"aten::scaled_dot_product_attention", ""});
  if (!op) op = dispatcher.findSchema({"aten::_scaled_dot_product_attention", ""});
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op->schema().arguments()) {
    const std::string& name = argument.name();
    if (name == "query")
      stack.emplace_back(query);
    else if (name == "key")
      stack.emplace_back(key);
    else if (name == "value")
      stack.emplace_back(value);
    else if (name == "attn_mask" && mask.defined())
      stack.emplace_back(mask);
    else if (name == "is_causal")
      stack.emplace_back(causal);
    else
      stack.push_back(argument.default_value().value());
  }
  op->callBoxed(&stack);
  return stack[0].toTensor();
}

TEST(AttentionRules, Fused) {
  check_rules({
      {.name = "attention",
       .inputs = {sample({3, 4, 3, 8}), sample({3, 4, 5, 8}, 1), sample({3, 4, 5, 8}, 2)},
       .body = [](const Tensors& in) { return Tensors{fused_attention(in[0], in[1], in[2], {}, false)}; },
       .atol = 1e-5,
       .most = most(6)},
      {.name = "attention with a mask",
       .inputs = {sample({2, 3, 4, 8}), sample({2, 3, 5, 8}, 1), sample({2, 3, 5, 8}, 2),
                  sample({2, 1, 4, 5}, 3)},
       .body =
           [](const Tensors& in) {
             return Tensors{fused_attention(in[0], in[1], in[2], in[3].detach(), false)};
           },
       .atol = 1e-5,
       .most = most(8)},
  });
}

TEST(ConvolutionRules, Images) {
  check_rules({
      {.name = "conv2d",
       .inputs = {sample({3, 4, 4, 4}), sample({3, 4, 2, 2}, 1), sample({3}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::conv2d(in[0], in[1], in[2])}; },
       .rtol = 1e-4,
       .atol = 1e-4,
       .most = most(7)},
      {.name = "conv2d without bias",
       .inputs = {sample({2, 3, 4, 4}), sample({5, 3, 3, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{at::conv2d(in[0], in[1], {}, 2, 1)}; },
       .rtol = 1e-4,
       .atol = 1e-4,
       .most = most(6)},
      {.name = "conv1d in groups",
       .inputs = {sample({2, 6, 5}), sample({12, 1, 2}, 1), sample({12}, 2)},
       .body =
           [](const Tensors& in) {
             return Tensors{F::conv1d(in[0], in[1], F::Conv1dFuncOptions().bias(in[2]).groups(6))};
           },
       .rtol = 1e-4,
       .atol = 1e-4,
       .most = most(7)},
      {.name = "conv1d by channel",
       .inputs = {sample({2, 8, 5}), sample({8, 1, 2}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{F::conv1d(in[0], in[1], F::Conv1dFuncOptions().groups(8))};
           },
       .rtol = 1e-4,
       .atol = 1e-4,
       .most = most(6)},
      {.name = "transposed",
       .inputs = {sample({2, 3, 3, 2}), sample({3, 5, 2, 2}, 1), sample({5}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::conv_transpose2d(in[0], in[1], in[2], 2)}; },
       .rtol = 1e-4,
       .atol = 1e-4,
       .most = most(7)},
  });
}

TEST(ConvolutionRules, PoolingAndResampling) {
  check_rules({
      {.name = "pooling",
       .inputs = {sample({2, 3, 4, 4})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::max_pool2d(in[0], 2), at::avg_pool2d(in[0], 3, 1, 1),
                            at::adaptive_avg_pool2d(in[0], {2, 3}),
                            std::get<0>(at::adaptive_max_pool2d(in[0], {2, 2}))};
           },
       .most = most(6)},
      {.name = "resampling",
       .inputs = {sample({3, 2, 2, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{
                 at::upsample_nearest2d(in[0], {4, 6}), at::upsample_bilinear2d(in[0], {3, 5}, false),
                 at::upsample_bilinear2d(in[0], {4, 4}, true), at::reflection_pad2d(in[0], {1, 1, 1, 0})};
           },
       .most = most(6)},
  });
}

}  // namespace rules_nn_test
}  // namespace penstock::test
