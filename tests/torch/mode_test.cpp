#include "penstock/mode.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <thread>

#include "penstock/errors.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock {
namespace mode_test {

using sample::Boxed;

class Counter : public Mode {
 public:
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    ++calls[op.operator_name().name];
    order.push_back(op.operator_name().name);
    op.callBoxed(stack);
  }
  std::map<std::string, int> calls;
  std::vector<std::string> order;
};

TEST(ModeStack, SeesFactoriesForwardAndBackward) {
  Counter counter;
  {
    const ModeGuard guard(counter);
    EXPECT_EQ(current_mode(), &counter);
    const at::Tensor x = torch::ones({2, 3}).set_requires_grad(true);
    torch::linear(x, torch::zeros({4, 3})).sum().backward();
  }
  EXPECT_EQ(counter.calls["aten::ones"] + counter.calls["aten::fill_"] + counter.calls["aten::empty"] > 0,
            true);
  EXPECT_GE(counter.calls["aten::mm"], 2) << "one forward, at least one backward";
  EXPECT_EQ(counter.calls.count("aten::linear"), 0u) << "composite operators arrive as their parts";
  const auto seen = counter.order.size();
  torch::ones({2}) + 1;
  EXPECT_EQ(counter.order.size(), seen) << "inactive outside of the scope";
  EXPECT_EQ(current_mode(), nullptr);
}

TEST(ModeStack, InferenceModeShowsPartsToo) {
  Counter counter;
  const c10::InferenceMode inference;
  const ModeGuard guard(counter);
  torch::linear(torch::ones({2, 3}), torch::zeros({4, 3}));
  EXPECT_EQ(counter.calls.count("aten::linear"), 0u);
  EXPECT_GE(counter.calls["aten::mm"] + counter.calls["aten::addmm"] + counter.calls["aten::matmul"], 1);
}

// Adds one to every result of mul, through the modes below.
class AddsOne final : public Mode {
 public:
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    depth_inside = mode_depth();
    op.callBoxed(stack);
    if (op.operator_name().name == "aten::mul") stack->back() = stack->back().toTensor() + 1;
  }
  int depth_inside = -1;
};

TEST(ModeStack, NestedModesRunInnermostFirst) {
  Counter outer;
  AddsOne inner;
  const ModeGuard first(outer);
  {
    const ModeGuard second(inner);
    EXPECT_EQ(mode_depth(), 2);
    EXPECT_EQ(find_mode<Counter>(), &outer);
    const at::Tensor y = torch::full({1}, 3.0) * 2;
    EXPECT_EQ(inner.depth_inside, 1) << "a handler runs with its own mode disabled";
    const NoModesGuard off;
    EXPECT_EQ(mode_depth(), 0);
    EXPECT_EQ(y.item<float>(), 7);
  }
  EXPECT_EQ(outer.calls["aten::add"], 1) << "operators called by a handler are seen by the mode below";
  EXPECT_EQ(mode_depth(), 1);
}

TEST(ModeStack, OneModeTwice) {
  Counter counter;
  const ModeGuard first(counter), second(counter);
  torch::ones({1}).neg();
  EXPECT_EQ(counter.calls["aten::neg"], 2);
}

TEST(ModeStack, ComesBeforeWrappers) {
  Counter counter;
  const ModeGuard guard(counter);
  const at::Tensor x = Boxed::make(torch::ones({2}));
  const auto before = counter.calls["aten::neg"];
  const at::Tensor y = x.neg();
  EXPECT_EQ(counter.calls["aten::neg"], before + 1) << "the inner call of the wrapper is not seen";
  EXPECT_TRUE(is_wrapper(y));
}

class Throws final : public Mode {
 public:
  void dispatch(const c10::OperatorHandle&, Stack*) override { throw ValueError("on purpose"); }
};

TEST(ModeStack, AThrowLeavesModesAndGuardsIntact) {
  Counter counter;
  Throws throws;
  const auto before = c10::impl::tls_local_dispatch_key_set();
  {
    const ModeGuard first(counter);
    {
      const ModeGuard second(throws);
      EXPECT_THROW(torch::ones({1}), ValueError);
      EXPECT_EQ(current_mode(), &throws);
      EXPECT_THROW(torch::ones({1}), ValueError) << "still active";
    }
    EXPECT_EQ(current_mode(), &counter);
    torch::ones({1}).neg();
    EXPECT_EQ(counter.calls["aten::neg"], 1);
  }
  const auto after = c10::impl::tls_local_dispatch_key_set();
  EXPECT_EQ(before.included_, after.included_);
  EXPECT_EQ(before.excluded_, after.excluded_);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
}

TEST(ModeStack, AHandlerThatLeavesTheWrongNumberOfValues) {
  struct Forgets final : Mode {
    void dispatch(const c10::OperatorHandle&, Stack*) override {}
  } forgets;
  const at::Tensor x = torch::ones({1});
  const ModeGuard guard(forgets);
  EXPECT_THROW(x + x, TypeError);
}

TEST(ModeStack, ThreadsHaveTheirOwn) {
  Counter counter;
  const ModeGuard guard(counter);
  std::thread([&] {
    EXPECT_EQ(current_mode(), nullptr);
    torch::ones({1}).neg();
  }).join();
  EXPECT_EQ(counter.calls.count("aten::neg"), 0u);
}

TEST(ModeStack, ThreadLocalStateCarriesThem) {
  Counter counter;
  const ModeGuard guard(counter);
  const at::ThreadLocalState state;
  std::thread([&] {
    const at::ThreadLocalStateGuard carried(state);
    EXPECT_EQ(current_mode(), &counter);
    torch::ones({1}).neg();
  }).join();
  EXPECT_EQ(counter.calls["aten::neg"], 1);
}

struct OtherInfo final : c10::DebugInfoBase {};

TEST(ModeStack, OtherDebugInfoStaysVisibleInsideAHandler) {
  struct Looks final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      saw_other = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO) != nullptr;
      depth = mode_depth();
      op.callBoxed(stack);
    }
    bool saw_other = false;
    int depth = -1;
  } looks;
  Counter below;
  const ModeGuard first(below);
  const ModeGuard second(looks);
  const c10::DebugInfoGuard other(c10::DebugInfoKind::TEST_INFO, std::make_shared<OtherInfo>());
  torch::ones({1}).neg();
  EXPECT_TRUE(looks.saw_other);
  EXPECT_EQ(looks.depth, 1);
  EXPECT_EQ(below.calls["aten::neg"], 1);
}

TEST(ModeStack, InPlaceAndOutArePassedThrough) {
  Counter counter;
  const ModeGuard guard(counter);
  at::Tensor x = torch::ones({3}), out = torch::zeros({3});
  EXPECT_TRUE(x.add_(1).is_same(x));
  at::add_out(out, x, x);
  const NoModesGuard off;
  EXPECT_TRUE(at::equal(out, torch::full({3}, 4.0)));
}

}  // namespace mode_test
}  // namespace penstock
