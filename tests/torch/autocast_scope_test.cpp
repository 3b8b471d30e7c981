// Autocast within a scope: the cache of cast weights, which is the process's, has no effect on our gradients.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>

#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock {
namespace autocast_scope_test {

// The gradient of a weight that two products use. In 16 bits the sum of its two parts has other bits.
at::Tensor gradient_of_two_uses(const std::function<void()>& between) {
  at::manual_seed(3);
  const at::Tensor weight = at::randn({32, 32}).set_requires_grad(true);
  const at::Tensor x = at::randn({8, 32}), y = at::randn({8, 32});
  at::Tensor sum;
  {
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    sum = at::linear(x, weight).to(at::kFloat).sum();
    between();
    sum = sum + at::linear(y, weight).to(at::kFloat).square().sum();
  }
  sum.backward();
  return weight.grad();
}

TEST(AutocastScope, GradientsDoNotDependOnWhoClearsTheCache) {
  const at::Tensor alone = gradient_of_two_uses([] {});
  EXPECT_TRUE(at::equal(gradient_of_two_uses([] { at::autocast::clear_cache(); }), alone));
  EXPECT_TRUE(at::equal(gradient_of_two_uses([] {
                          std::thread([] { const AutocastScope scope(at::kCPU, at::kBFloat16); }).join();
                        }),
                        alone));
}

TEST(AutocastScope, GradientsOfSeveralUsesAreAddedInFloat32) {
  at::manual_seed(5);
  const at::Tensor weight = at::randn({16, 16}).set_requires_grad(true), x = at::randn({4, 16});
  const auto backward_of_uses = [&](int uses) {
    weight.mutable_grad() = at::Tensor();
    {
      const AutocastScope scope(at::kCPU, at::kBFloat16);
      at::Tensor sum = at::zeros({});
      for (int i = 0; i < uses; ++i) sum = sum + at::linear(x * (i + 1), weight).to(at::kFloat).sum();
      sum.backward();
    }
    return weight.grad().clone();
  };
  at::Tensor expected = at::zeros({16, 16});
  for (int i = 2; i >= 0; --i) {  // the engine runs the last use first
    weight.mutable_grad() = at::Tensor();
    {
      const AutocastScope scope(at::kCPU, at::kBFloat16);
      at::linear(x * (i + 1), weight).to(at::kFloat).sum().backward();
    }
    expected = expected + weight.grad();
  }
  EXPECT_TRUE(at::equal(backward_of_uses(3), expected));
}

TEST(AutocastScope, RestoresWhatItFound) {
  ASSERT_TRUE(at::autocast::is_autocast_cache_enabled());
  {
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    EXPECT_FALSE(autocast_state().cached);
    const AutocastScope nothing(at::kCPU, std::nullopt);
  }
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_EQ(autocast_state(), AutocastState{});
}

TEST(AutocastStateScope, CarriesTheCacheToAnotherThread) {
  AutocastState seen;
  {
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    seen = autocast_state();
  }
  std::thread([&] {
    const AutocastStateScope scope(seen);
    EXPECT_EQ(autocast_state(), seen);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  }).join();
}

}  // namespace autocast_scope_test
}  // namespace penstock
