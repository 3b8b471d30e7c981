#include "penstock/models/blocks/auxiliary_loss.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/models/blocks/tuple_adapter.h"
#include "penstock/pipeline/backward/split_backward.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/throws.h"

namespace penstock::models {
namespace auxiliary_loss_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

// Backward of a use of the result equals backward of that use plus scale * loss.
TEST(InjectLoss, EqualsAddingTheLoss) {
  for (const double scale : {1.0, 0.125, 0.0})
    for (const bool as_tensor : {false, true}) {
      const at::Tensor x = leaf(random_tensor({2, 3}, 1)), w = leaf(random_tensor({3}, 2));
      const at::Tensor hidden = (x * w).tanh(), loss = (x.sum(0) * w.pow(2)).sum();
      const at::Tensor result = as_tensor ? inject_loss(hidden, loss, at::full({}, scale, at::kDouble))
                                          : inject_loss(hidden, loss, scale);
      EXPECT_TRUE(at::equal(result, hidden));
      EXPECT_EQ(result.data_ptr(), hidden.data_ptr());  // a view, not a copy
      const Tensors actual = torch::autograd::grad({result.pow(2).sum()}, {x, w}, {}, true);
      const Tensors expected = torch::autograd::grad({hidden.pow(2).sum() + scale * loss}, {x, w});
      for (std::size_t i = 0; i < 2; ++i) EXPECT_LT(apart(actual[i], expected[i]), 1e-14);
    }
}

TEST(InjectLoss, WorksWhereOneSideHasNoGradient) {
  const at::Tensor fixed = random_tensor({2, 3}, 1), w = leaf(random_tensor({3}, 2));
  // The hidden states need none, the loss does.
  const at::Tensor result = inject_loss(fixed, w.sum(), 0.5);
  result.sum().backward();
  EXPECT_TRUE(at::equal(w.grad(), at::full({3}, 0.5, at::kDouble)));
  // A loss without a gradient changes nothing.
  EXPECT_TRUE(inject_loss(w, at::zeros({}, at::kDouble), 0.5).is_same(w));
}

TEST(InjectLoss, TheScaleIsNotChangedByGradients) {
  const at::Tensor scale = at::full({}, 0.5, at::kDouble), loss = leaf(at::zeros({}, at::kDouble)),
                   hidden = leaf(random_tensor({2}, 1));
  for (int i = 0; i < 3; ++i) inject_loss(hidden, loss, scale).sum().backward();  // .grad() accumulates
  EXPECT_EQ(loss.grad().item<double>(), 1.5);
  EXPECT_EQ(scale.item<double>(), 0.5);
}

// float16 hidden states, a float32 loss, a float64 scale.
TEST(InjectLoss, DtypesMayDiffer) {
  const at::Tensor hidden = leaf(random_tensor({2}, 1, at::kBFloat16)),
                   loss = leaf(at::zeros({}, at::kFloat));
  inject_loss(hidden, loss, at::full({}, 0.25, at::kDouble)).sum().backward();
  EXPECT_EQ(loss.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(loss.grad().item<double>(), 0.25);
  EXPECT_EQ(hidden.grad().scalar_type(), at::kBFloat16);
}

TEST(InjectLoss, CapturedEqualsEager) {
  const auto make = [] {
    torch::nn::Linear router(3, 1), body(3, 3);
    const at::NoGradGuard no_grad;
    router.ptr()->weight.copy_(random_tensor({1, 3}, 1, at::kFloat));
    body.ptr()->weight.copy_(random_tensor({3, 3}, 2, at::kFloat));
    router.ptr()->bias.fill_(0.1);
    body.ptr()->bias.fill_(0.2);
    return std::make_shared<CalledModule>(
        std::vector<std::shared_ptr<torch::nn::Module>>{router.ptr(), body.ptr()},
        [router, body](const Tensors& in) mutable {
          const at::Tensor loss = router->forward(in[0]).pow(2).mean();
          const at::Tensor hidden = body->forward(in[0]);
          return Tensors{in[1].defined() ? inject_loss(hidden, loss, in[1]) : inject_loss(hidden, loss, 0.5)};
        });
  };
  const at::Tensor x = leaf(random_tensor({4, 3}, 3, at::kFloat));
  expect_captured(make, {x, at::Tensor()});
  expect_captured(make, {x, at::full({}, 0.25)});
  // A replay uses the scale it is given.
  const auto original = make();
  const auto fast = graph::compile(original);
  for (const double scale : {0.25, 3.0}) {
    original->zero_grad();
    const at::Tensor in = leaf(x);
    fast->forward(Tensors{in, at::full({}, scale)})[0].sum().backward();
    const at::Tensor got = original->parameters()[0].grad().clone();
    original->zero_grad();
    original->forward(Tensors{in, at::full({}, scale)})[0].sum().backward();
    EXPECT_TRUE(at::equal(got, original->parameters()[0].grad())) << scale;
  }
  EXPECT_EQ(fast->captures(), 1u);
}

// The two halves of a backward, input gradients first, give what one pass gives.
TEST(InjectLoss, SplitBackwardEqualsOnePass) {
  const at::Tensor router = leaf(random_tensor({5, 2}, 1)), body = leaf(random_tensor({5, 5}, 2)),
                   gradient = random_tensor({3, 5}, 3);
  Tensors whole;
  for (const bool split : {false, true}) {
    const at::Tensor x = leaf(random_tensor({3, 5}, 4));
    router.mutable_grad() = at::Tensor();
    body.mutable_grad() = at::Tensor();
    const at::Tensor loss = at::matmul(x, router).softmax(-1).pow(2).sum();
    const at::Tensor output = inject_loss(at::matmul(x, body).tanh(), loss, 0.25);
    Tensors all;
    OutputEdges edges = OutputEdges::of({output});
    if (split) {
      auto [inputs, weights] = stage_backward_input(std::move(edges), {gradient}, {x});
      all = inputs;
      weights.run();
    } else {
      all = stage_backward(std::move(edges), {gradient}, {x});
    }
    all.push_back(router.grad());
    all.push_back(body.grad());
    if (!split) {
      whole = all;
      continue;
    }
    ASSERT_EQ(all.size(), whole.size());
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i], whole[i])) << i;
    EXPECT_GT(router.grad().abs().max().item<double>(), 1e-3);
  }
}

TEST(InjectLoss, BadInputSaysWhatIsWanted) {
  const at::Tensor hidden = at::zeros({2});
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { inject_loss(hidden, at::zeros({1}), 1.0); }), "Float [1]"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { inject_loss(hidden, at::Tensor(), 1.0); }), "no tensor"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { inject_loss(hidden, at::zeros({}, at::kLong), 1.0); }),
                       "Long []"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { inject_loss(hidden, at::zeros({}), at::zeros({2})); }),
                       "inject_loss: scale"));
}

TEST(LossWeights, MeansByNameAndWeights) {
  const auto number = [](double value) { return at::full({}, value, at::kDouble); };
  const std::vector<NamedLoss> losses{
      {"balance", number(1)}, {"router_z", number(10)}, {"balance", number(4)}, {"depth_router", number(3)}};
  const auto means = mean_by_name(losses);
  ASSERT_EQ(means.size(), 3u);
  EXPECT_EQ(means[0].name, "balance");
  EXPECT_EQ(means[0].value.item<double>(), 2.5);
  EXPECT_EQ(means[1].value.item<double>(), 10);
  EXPECT_EQ(means[2].name, "depth_router");
  LossWeights weights;
  EXPECT_NEAR(weighted_sum(losses, weights).item<double>(), 0.01 * 2.5 + 0.001 * 10 + 3, 1e-15);
  weights.set("balance", 0);
  weights.set("mine", 2);
  EXPECT_NEAR(weighted_sum({{"balance", number(5)}, {"mine", number(7)}}, weights).item<double>(), 14, 1e-15);
  EXPECT_FALSE(weighted_sum({}, weights).defined());
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         weighted_sum({{"other", number(1)}}, weights);
                       }),
                       "auxiliary loss: got 'other', expected one with a weight: balance"));
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { weights.set("balance", -1); }), "model.loss_weights.balance"));
  EXPECT_THROW(weights.set("balance", NAN), ConfigError);
}

TEST(LossWeights, InjectedLossesAreWeighted) {
  const at::Tensor a = leaf(at::zeros({}, at::kDouble)), b = leaf(at::zeros({}, at::kDouble)),
                   hidden = leaf(random_tensor({2}, 1));
  const std::vector<NamedLoss> losses{{"balance", a * 3}, {"balance", a}, {"depth_router", b}};
  inject_losses(hidden, losses, {}, 0.5).sum().backward();
  EXPECT_NEAR(a.grad().item<double>(), 0.5 * 0.01 * 2, 1e-15);
  EXPECT_NEAR(b.grad().item<double>(), 0.5, 1e-15);
  inject_losses(hidden, losses, {}, at::full({}, 1.5, at::kDouble)).sum().backward();
  EXPECT_NEAR(b.grad().item<double>(), 2.0, 1e-15);
  EXPECT_TRUE(inject_losses(hidden, {}, {}, 0.5).is_same(hidden));
}

std::string names_of(const BlockResult& result) {
  std::string names;
  for (const NamedLoss& loss : result.losses)
    names += loss.name + "=" + std::to_string(loss.value.item<int>()) + (loss.value.dim() == 0 ? " " : "? ");
  return names;
}

TEST(TupleAdapter, EveryForm) {
  const at::Tensor hidden = random_tensor({1, 2, 3}, 1), empty = at::zeros({0}), none;
  const auto number = [](int value) { return at::full({1}, static_cast<double>(value)); };
  using enum TupleSource;
  const auto read = [&](std::vector<at::Tensor> tuple, TupleSource source) {
    tuple.insert(tuple.begin(), hidden);
    const BlockResult result = from_tuple(tuple, source);
    EXPECT_TRUE(result.hidden.is_same(hidden));
    return names_of(result);
  };
  for (const TupleSource any : {Dense, Experts, Depth, DepthOverExperts}) {
    EXPECT_EQ(read({}, any), "");
    EXPECT_EQ(read({number(9)}, any), "");
    EXPECT_EQ(read({number(9), number(8), number(7)}, any), "");
    EXPECT_EQ(read({number(1), number(2), number(3), number(4), number(5)}, any), "");
  }
  EXPECT_EQ(read({number(1), number(2)}, Experts), "balance=1 router_z=2 ");
  EXPECT_EQ(read({empty, number(2)}, Experts), "router_z=2 ");
  EXPECT_EQ(read({number(1), none}, Experts), "balance=1 ");
  EXPECT_EQ(read({number(1), number(0)}, Depth), "depth_router=1 ");
  EXPECT_EQ(read({none, number(0)}, Depth), "");
  EXPECT_EQ(read({number(1), number(2)}, DepthOverExperts), "balance=1 router_z=2 ");
  EXPECT_EQ(read({number(1), empty}, DepthOverExperts), "balance=1 ");
  for (const TupleSource depth : {Depth, DepthOverExperts}) {
    EXPECT_EQ(read({number(1), number(2), number(3), number(4)}, depth),
              "balance=1 router_z=2 depth_router=3 ");
    EXPECT_EQ(read({number(1), empty, number(3), number(4)}, depth), "depth_router=3 ");
    EXPECT_EQ(read({none, number(2), number(3), none}, depth), "depth_router=3 ");
    EXPECT_EQ(read({number(1), number(2), none, none}, depth), "balance=1 router_z=2 ");
    EXPECT_EQ(read({empty, empty, empty, empty}, depth), "");
  }
}

TEST(TupleAdapter, LossesKeepTheirGradient) {
  const at::Tensor w = leaf(at::ones({1}));
  from_tuple({at::zeros({1}), w * 3, w * 2}, TupleSource::Experts).losses.at(0).value.backward();
  EXPECT_EQ(w.grad().item<double>(), 3);
}

TEST(TupleAdapter, WhatHasTwoMeaningsIsAnError) {
  const at::Tensor one = at::ones({1}), two = at::ones({2});
  const auto message = [&](const std::vector<at::Tensor>& tuple, TupleSource source) {
    return message_of<ValueError>([&] { from_tuple(tuple, source); });
  };
  EXPECT_TRUE(has_text(message({one, one, one}, TupleSource::Dense), "Experts, Depth or DepthOverExperts"));
  EXPECT_TRUE(
      has_text(message({one, one, one, one, one}, TupleSource::Dense), "state Depth or DepthOverExperts"));
  EXPECT_TRUE(has_text(message({one, one, one, one, one}, TupleSource::Experts), "5 elements"));
  EXPECT_TRUE(has_text(message({}, TupleSource::Dense), "no elements"));
  EXPECT_TRUE(has_text(message({at::Tensor(), one}, TupleSource::Dense), "undefined hidden states"));
  EXPECT_TRUE(has_text(message({one, two, one}, TupleSource::Experts), "loss 'balance': got Float [2]"));
}

}  // namespace auxiliary_loss_test
}  // namespace penstock::models
