#include "penstock/random.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "penstock/errors.h"
#include "tests/torch/random_cases.h"

namespace penstock {
namespace keyed_init_test {

using test::part_of;
using test::same_bits;
using test::test_key;

TEST(KeyedInit, FansOfTheGlobalShape) {
  EXPECT_EQ(fans_of({30, 20}).in, 20);
  EXPECT_EQ(fans_of({30, 20}).out, 30);
  EXPECT_EQ(fans_of({30, 20, 3, 5}).in, 300);
  EXPECT_EQ(fans_of({30, 20, 3, 5}).out, 450);
  EXPECT_THROW(fans_of({30}), ValueError);
}

// Every initializer: its deviation or bound for the whole weight, and the same values in a shard.
TEST(KeyedInit, ScaleAndShards) {
  const test::Sizes shape = {256, 128, 3};
  const double fan_in = 384, fan_out = 768;
  struct Case {
    const char* name;
    double deviation;
    bool uniform;
    std::function<void(const at::Tensor&, const GlobalBox&)> fill;
  };
  const std::vector<Case> cases = {
      {"kaiming uniform", std::sqrt(2 / fan_in), true,
       [](const at::Tensor& t, const GlobalBox& b) { keyed_kaiming_uniform_(t, test_key(), {}, b); }},
      {"kaiming normal, out", 0.5 / std::sqrt(fan_out), false,
       [](const at::Tensor& t, const GlobalBox& b) {
         keyed_kaiming_normal_(t, test_key(), {.gain = 0.5, .mode = FanMode::Out}, b);
       }},
      {"xavier uniform", 3 * std::sqrt(2 / (fan_in + fan_out)), true,
       [](const at::Tensor& t, const GlobalBox& b) { keyed_xavier_uniform_(t, test_key(), 3, b); }},
      {"xavier normal", std::sqrt(2 / (fan_in + fan_out)), false,
       [](const at::Tensor& t, const GlobalBox& b) { keyed_xavier_normal_(t, test_key(), 1, b); }},
      {"linear weight", 1 / std::sqrt(3 * fan_in), true,
       [](const at::Tensor& t, const GlobalBox& b) { keyed_linear_weight_(t, test_key(), b); }},
      {"linear bias", 1 / std::sqrt(3 * 384.0), true,
       [](const at::Tensor& t, const GlobalBox& b) { keyed_linear_bias_(t, test_key(), 384, b); }},
  };
  for (const auto& one : cases) {
    at::Tensor whole = at::empty(shape).requires_grad_();  // a parameter: written without a graph
    one.fill(whole, {});
    EXPECT_FALSE(whole.grad_fn());
    EXPECT_NEAR(whole.std().item<double>() / one.deviation, 1, 0.01) << one.name;
    EXPECT_NEAR(whole.mean().item<double>() / one.deviation, 0, 0.02) << one.name;
    const double largest = whole.abs().max().item<double>() / one.deviation;
    if (one.uniform) {
      EXPECT_LE(largest, std::sqrt(3.0) * (1 + 1e-6)) << one.name;
      EXPECT_GT(largest, 1.73) << one.name;
    } else {
      EXPECT_GT(largest, 3.5) << one.name;
    }
    at::Tensor shard = at::empty({100, 30, 3});
    one.fill(shard, {shape, {64, 90, 0}});
    EXPECT_TRUE(same_bits(shard, part_of(whole, {64, 90, 0}, {100, 30, 3}))) << one.name;
  }
}

// torch::nn::init with the same fans has the same bounds.
TEST(KeyedInit, AgreesWithLibTorchOnScale) {
  at::Tensor ours = at::empty({300, 500}), theirs = at::empty({300, 500});
  keyed_kaiming_uniform_(ours, test_key(),
                         {.gain = torch::nn::init::calculate_gain(torch::kLeakyReLU, std::sqrt(5.0))});
  torch::nn::init::kaiming_uniform_(theirs, std::sqrt(5.0));
  EXPECT_NEAR(ours.abs().max().item<double>(), theirs.abs().max().item<double>(), 1e-5);
  keyed_xavier_uniform_(ours, test_key());
  torch::nn::init::xavier_uniform_(theirs);
  EXPECT_NEAR(ours.abs().max().item<double>(), theirs.abs().max().item<double>(), 1e-5);
}

TEST(KeyedInit, RefusesInvalidArguments) {
  at::Tensor weight = at::empty({4, 3});
  EXPECT_THROW(keyed_kaiming_uniform_(weight, test_key(), {.gain = std::nan("")}), ValueError);
  EXPECT_THROW(keyed_xavier_normal_(weight, test_key(), -1), ValueError);
  EXPECT_THROW(keyed_xavier_normal_(at::empty({4}), test_key()), ValueError);
  EXPECT_THROW(keyed_linear_bias_(at::empty({4}), test_key(), -3), ValueError);
  at::Tensor nothing = at::empty({4, 0});
  keyed_kaiming_uniform_(nothing, test_key());  // no elements: nothing to do
  EXPECT_EQ(nothing.numel(), 0);
}

}  // namespace keyed_init_test
}  // namespace penstock
