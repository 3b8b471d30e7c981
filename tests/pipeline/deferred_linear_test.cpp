// Linear layers with deferred weight gradients, compared with torch::nn::Linear: same initial values, same
// bits after a backward.
#include "penstock/deferred_linear.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <sstream>
#include <thread>

#include "penstock/errors.h"
#include "penstock/pipeline/backward/split_backward.h"
#include "penstock/torch/compat/cpu_bfloat16.h"
#include "tests/pipeline/split_backward_check.h"

namespace penstock {
namespace deferred_linear_test {

using namespace test;

TEST(DeferredLinear, StartsAsLinear) {
  for (const bool bias : {true, false}) {
    torch::manual_seed(5);
    const torch::nn::Linear plain(torch::nn::LinearOptions(6, 4).bias(bias));
    torch::manual_seed(5);
    const DeferredLinear deferred(torch::nn::LinearOptions(6, 4).bias(bias));
    ASSERT_EQ(plain->named_parameters().keys(), deferred->named_parameters().keys());
    for (const auto& entry : plain->named_parameters())
      EXPECT_TRUE(same(entry.value(), deferred->named_parameters()[entry.key()]));
    std::ostringstream text;
    text << *deferred;
    EXPECT_EQ(text.str(), std::string("penstock::DeferredLinear(in_features=6, out_features=4, bias=") +
                              (bias ? "true)" : "false)"));
  }
  const auto copy = std::dynamic_pointer_cast<DeferredLinearImpl>(DeferredLinear(3, 2)->clone());
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->weight.sizes().vec(), (std::vector<std::int64_t>{2, 3}));
}

struct Result {
  at::Tensor output, input_grad, weight_grad, bias_grad;
};

// Two backwards, so that the second adds. `shape` makes the input of the layer from a leaf, `grad_of` the
// gradient of its output.
Result run(bool deferred, const at::Tensor& leaf, const at::Tensor& weight, const at::Tensor& bias,
           const std::function<at::Tensor(at::Tensor)>& shape,
           const std::function<at::Tensor(at::Tensor)>& grad_of) {
  Result result;
  weight.mutable_grad() = at::Tensor();
  if (bias.defined()) bias.mutable_grad() = at::Tensor();
  const at::Tensor x = leaf.detach().clone().requires_grad_(leaf.requires_grad());
  for (int i = 0; i < 2; ++i) {
    WeightQueue queue;
    std::optional<WeightQueueGuard> guard;
    if (deferred) guard.emplace(queue);
    result.output = deferred_linear(shape(x), weight, bias);
    guard.reset();
    torch::autograd::backward({result.output}, {grad_of(result.output.detach())});
    EXPECT_EQ(queue.size(), deferred ? 1u : 0u);
    EXPECT_TRUE(!deferred || i > 0 || !weight.grad().defined());
    queue.run();
    EXPECT_TRUE(queue.empty());
  }
  result.input_grad = x.grad();
  result.weight_grad = weight.grad();
  if (bias.defined()) result.bias_grad = bias.grad();
  return result;
}

TEST(DeferredLinear, SameBitsAsLinear) {
  ensure_cpu_bfloat16();
  torch::manual_seed(6);
  const auto as_is = [](const at::Tensor& t) { return t; };
  const std::vector<std::function<at::Tensor(at::Tensor)>> shapes{
      as_is, [](const at::Tensor& t) { return t * 1.5; },
      [](const at::Tensor& t) { return t.transpose(0, -2) * 2; },
      [](const at::Tensor& t) { return t.transpose(0, -2); }};
  const std::vector<std::function<at::Tensor(at::Tensor)>> grads{
      [](const at::Tensor& y) { return y * 0.5 + 0.1; },
      [](const at::Tensor& y) { return at::ones({1}, y.options()).expand_as(y); },
      [](const at::Tensor& y) { return (y.transpose(0, -1).contiguous() * 0.3 + 0.2).transpose(0, -1); }};
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const bool with_bias : {true, false})
      for (const bool needs_grad : {true, false})
        for (const std::vector<std::int64_t>& sizes : std::vector<std::vector<std::int64_t>>{
                 {37}, {5, 37}, {3, 7, 37}, {2, 3, 4, 37}, {0, 37}, {300, 37}}) {
          const at::Tensor w = weight({21, 37}, type), bias = with_bias ? weight({21}, type) : at::Tensor();
          const at::Tensor x = torch::randn(sizes).to(type).requires_grad_(needs_grad);
          for (std::size_t s = 0; s < shapes.size(); ++s)
            for (std::size_t g = 0; g < grads.size(); ++g) {
              if (sizes.size() == 1 && s > 1) continue;
              const Result plain = run(false, x, w, bias, shapes[s], grads[g]),
                           ours = run(true, x, w, bias, shapes[s], grads[g]);
              const std::string what = c10::str(type, " ", at::IntArrayRef(sizes), with_bias ? " bias" : "",
                                                needs_grad ? " grad" : "", " shape ", s, " grad ", g);
              EXPECT_TRUE(same(plain.output, ours.output)) << what;
              EXPECT_TRUE(same(plain.input_grad, ours.input_grad)) << what;
              EXPECT_TRUE(same(plain.weight_grad, ours.weight_grad)) << what;
              EXPECT_TRUE(same(plain.bias_grad, ours.bias_grad)) << what;
            }
        }
}

TEST(DeferredLinear, TiedWeightsHooksAndInPlaceOperators) {
  torch::manual_seed(7);
  const at::Tensor w = weight({8, 8}), b = weight({8}), x = torch::randn({4, 8});
  int on_output = 0, on_weight = 0;
  w.register_hook([&](const at::Tensor& grad) {
    ++on_weight;
    return grad * 2;
  });
  const auto forward = [&](const at::Tensor& input) {
    at::Tensor h = deferred_linear(input, w, b);
    h.register_hook([&](const at::Tensor& grad) {
      ++on_output;
      return grad * 3;
    });
    h.relu_();
    for (int i = 0; i < 4; ++i) h = deferred_linear(h, w, b).tanh();
    return h;
  };
  std::vector<Tensors> results;
  for (const bool deferred : {false, true}) {
    w.mutable_grad() = b.mutable_grad() = at::Tensor();
    on_output = on_weight = 0;
    const at::Tensor input = x.clone().requires_grad_(true);
    for (int i = 0; i < 2; ++i) {
      WeightQueue queue;
      std::optional<WeightQueueGuard> guard;
      if (deferred) guard.emplace(queue);
      forward(input).sum().backward();
      queue.run();
    }
    EXPECT_EQ(on_output, 2);
    EXPECT_EQ(on_weight, 2);
    results.push_back({input.grad(), w.grad(), b.grad()});
  }
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same(results[0][i], results[1][i])) << i;
}

TEST(DeferredLinear, WithSplitBackward) {
  torch::manual_seed(8);
  const at::Tensor w = weight({8, 8}), b = weight({8}), v = weight({8, 8}), x = torch::randn({4, 8});
  const auto forward = [&](const at::Tensor& input) {
    return deferred_linear(deferred_linear(input, w, b).tanh().mm(v), w, b);
  };
  const at::Tensor plain = x.clone().requires_grad_(true);
  forward(plain).sum().backward();
  const Tensors wanted{w.grad().clone(), b.grad().clone(), v.grad().clone()};
  w.mutable_grad() = b.mutable_grad() = v.mutable_grad() = at::Tensor();

  const at::Tensor input = x.clone().requires_grad_(true);
  WeightQueue queue;
  at::Tensor y;
  {
    const WeightQueueGuard guard(queue);
    y = forward(input);
  }
  InputBackward half = stage_backward_input(OutputEdges::of({y}), {torch::ones_like(y)}, {input});
  EXPECT_TRUE(same(half.input_grads[0], plain.grad()));
  EXPECT_EQ(queue.size(), 2u);
  EXPECT_FALSE(w.grad().defined() || v.grad().defined());
  half.weights.run();
  queue.run();
  EXPECT_TRUE(same(w.grad(), wanted[0]) && same(b.grad(), wanted[1]) && same(v.grad(), wanted[2]));
}

TEST(DeferredLinear, GuardsNestAndBelongToTheirThread) {
  const at::Tensor w = weight({3, 3}), x = torch::randn({2, 3}).requires_grad_(true);
  WeightQueue outer, inner;
  at::Tensor a, b, c, d, e;
  {
    const WeightQueueGuard first(outer);
    a = deferred_linear(x, w, {});
    {
      const WeightQueueGuard second(inner);
      b = deferred_linear(x, w, {});
    }
    c = deferred_linear(x, w, {});
    std::thread([&] { d = deferred_linear(x, w, {}); }).join();
    e = deferred_linear(x, w.detach(), {});
  }
  std::thread([&] { torch::autograd::backward({a, b, c}, {a.detach(), b.detach(), c.detach()}); }).join();
  EXPECT_EQ(outer.size(), 2u);
  EXPECT_EQ(inner.size(), 1u);
  EXPECT_FALSE(w.grad().defined());
  d.sum().backward();
  EXPECT_TRUE(w.grad().defined());
  e.sum().backward();
  EXPECT_EQ(outer.size(), 2u);
  const torch::NoGradGuard off;
  const WeightQueueGuard guard(outer);
  EXPECT_FALSE(deferred_linear(x, w, {}).requires_grad());
}

TEST(DeferredLinear, FrozenParts) {
  const at::Tensor w = weight({3, 3}), b = weight({3}), x = torch::randn({2, 3}).requires_grad_(true);
  WeightQueue queue;
  const WeightQueueGuard guard(queue);
  deferred_linear(x, w.detach(), b).sum().backward();
  queue.run();
  EXPECT_TRUE(b.grad().defined() && !w.grad().defined());
  deferred_linear(x.detach(), w, b.detach()).sum().backward();
  EXPECT_EQ(queue.size(), 1u);
  queue.run();
  EXPECT_TRUE(w.grad().defined());
}

// Several backwards of the same layers as one product; a layer with another input dtype stays separate.
TEST(DeferredLinear, JoinedLayers) {
  torch::manual_seed(9);
  for (const bool with_bias : {true, false}) {
    const at::Tensor first = weight({7, 5}), second = weight({3, 7}),
                     bias = with_bias ? weight({7}) : at::Tensor();
    std::vector<at::Tensor> inputs;
    for (const std::vector<std::int64_t>& sizes :
         std::vector<std::vector<std::int64_t>>{{4, 5}, {2, 3, 5}, {1, 5}, {2, 2, 2, 5}, {5}})
      inputs.push_back(torch::randn(sizes));
    std::vector<Tensors> results;
    for (const bool join : {false, true}) {
      for (const at::Tensor& each : {first, second, bias})
        if (each.defined()) each.mutable_grad() = at::Tensor();
      int hooks = 0;
      const auto hook = first.register_hook([&](const at::Tensor& grad) {
        ++hooks;
        return grad;
      });
      WeightQueue queue;
      {
        const WeightQueueGuard guard(queue);
        for (const at::Tensor& input : inputs)
          deferred_linear(deferred_linear(input, first, bias).tanh(), second, {}).pow(2).sum().backward();
      }
      EXPECT_EQ(queue.size(), 2 * inputs.size());
      if (join) queue.join_layers();
      EXPECT_EQ(queue.size(), join ? 2 : 2 * inputs.size());
      queue.run();
      EXPECT_TRUE(queue.empty());
      EXPECT_EQ(hooks, 1);
      first.remove_hook(hook);
      results.push_back({first.grad(), second.grad(), with_bias ? bias.grad() : at::Tensor()});
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      if (!results[0][i].defined()) continue;
      EXPECT_TRUE(at::allclose(results[0][i], results[1][i], 1e-5, 1e-6)) << i;
    }
  }
}

TEST(DeferredLinear, Misuse) {
  const at::Tensor w = weight({3, 3}), x = torch::randn({2, 3}).requires_grad_(true);
  at::Tensor y;
  {
    WeightQueue queue;
    const WeightQueueGuard guard(queue);
    y = deferred_linear(x, w, {}).sum();
  }
  EXPECT_THROW(y.backward(), StateError);
  WeightQueue queue;
  queue.run();
  const WeightQueueGuard guard(queue);
  const at::Tensor h = deferred_linear(x, w, {}).clone();
  h.sum().backward();
  EXPECT_THROW(h.sum().backward(), StateError);
  // The gradients of the weights would have no history.
  EXPECT_THROW(deferred_linear(x, w, {}).square().sum().backward({}, c10::nullopt, /*create_graph=*/true),
               NotImplemented);
  // An overwritten input is detected.
  at::Tensor z = x * 1;
  y = deferred_linear(z, w, {}).sum();
  z.add_(1);
  EXPECT_THROW(y.backward(), c10::Error);
}

}  // namespace deferred_linear_test
}  // namespace penstock
