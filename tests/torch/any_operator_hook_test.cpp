// The hook for every operator: what it sees, in which order, and that it costs nothing for other tensors.
#include "penstock/torch/dispatch/any_operator_hook.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/torch/dispatch/operator_hook.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock {
namespace any_operator_hook_test {

using sample::Boxed;
using test::has_text;
using test::message_of;

// Names of the operators that the hook has seen, in order.
struct Seen {
  std::mutex mutex;
  std::vector<std::string> names;
};
Seen& seen() {
  static Seen instance;
  return instance;
}

void note(const c10::OperatorHandle& op, Stack* stack) {
  const NoAnyHookGuard off;
  {
    const std::lock_guard lock(seen().mutex);
    seen().names.push_back(op.schema().name());
  }
  op.callBoxed(stack);
}

std::vector<std::string> take() {
  const std::lock_guard lock(seen().mutex);
  return std::exchange(seen().names, {});
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

class AnyOperatorHook : public ::testing::Test {
 protected:
  void SetUp() override {
    set_any_operator_hook(&note);
    take();
  }
};

// Must be the first test of the program: no hook is set yet.
TEST(AnyOperatorHookFirst, MarkingWithoutAHookIsRefused) {
  EXPECT_TRUE(has_text(message_of<StateError>([] { mark_for_any_hook(at::ones({2})); }),
                       "set_any_operator_hook first"));
  EXPECT_THROW(mark_for_any_hook(at::Tensor()), TypeError);
}

TEST_F(AnyOperatorHook, OneForTheProcess) {
  set_any_operator_hook(&note);  // the same again
  EXPECT_TRUE(has_text(message_of<StateError>([] {
                         set_any_operator_hook(
                             [](const c10::OperatorHandle& op, Stack* stack) { op.callBoxed(stack); });
                       }),
                       "a process can have only one"));
}

TEST_F(AnyOperatorHook, SeesEveryOperatorOnMarkedTensorsAndNoOther) {
  const at::Tensor marked = at::ones({3, 3}), other = at::ones({3, 3});
  EXPECT_FALSE(is_marked_for_any_hook(marked));
  mark_for_any_hook(marked);
  EXPECT_TRUE(is_marked_for_any_hook(marked));
  EXPECT_FALSE(is_marked_for_any_hook(other));
  at::mm(other, other);
  EXPECT_TRUE(take().empty()) << "unmarked tensors do not call the hook";
  const at::Tensor product = at::mm(other, marked);
  EXPECT_EQ(take(), std::vector<std::string>{"aten::mm"}) << "once, without the operators it calls";
  EXPECT_FALSE(is_marked_for_any_hook(product)) << "results are not marked";
  at::cat({other, marked});
  EXPECT_EQ(take(), std::vector<std::string>{"aten::cat"}) << "also in lists";
  {
    const NoAnyHookGuard off;
    EXPECT_TRUE(at::equal(at::mm(other, marked), product));
  }
  EXPECT_TRUE(take().empty());
}

TEST_F(AnyOperatorHook, ViewsAndDetachedHandlesAreMarked) {
  const at::Tensor marked = at::arange(6, at::kFloat).view({2, 3});
  mark_for_any_hook(marked);
  EXPECT_TRUE(is_marked_for_any_hook(marked.t()));
  EXPECT_TRUE(is_marked_for_any_hook(marked[0]));
  EXPECT_TRUE(is_marked_for_any_hook(marked.detach()));
  EXPECT_FALSE(is_marked_for_any_hook(marked.clone()));
  take();
  marked.t().sum();
  EXPECT_TRUE(contains(take(), "aten::sum"));
}

// Before autograd: what the hook does is recorded, and backward calls it for saved tensors.
TEST_F(AnyOperatorHook, ComesBeforeAutogradAndSeesBackward) {
  at::Tensor weight = at::randn({4, 3}).requires_grad_(true);
  const at::Tensor x = at::randn({2, 3}).requires_grad_(true);
  mark_for_any_hook(weight);
  const at::Tensor y = at::linear(x, weight);
  EXPECT_EQ(take(), std::vector<std::string>{"aten::linear"}) << "the composite operator, not its parts";
  ASSERT_TRUE(y.requires_grad());
  y.sum().backward();
  EXPECT_FALSE(take().empty()) << "the gradient of x needs the saved weight";
  const at::Tensor ones = at::ones({2, 4});
  EXPECT_TRUE(at::allclose(weight.grad(), ones.t().mm(x.detach())));
  const NoAnyHookGuard off;
  EXPECT_TRUE(at::allclose(x.grad(), ones.mm(weight.detach())));
}

TEST_F(AnyOperatorHook, WorksOnOtherThreads) {
  const at::Tensor marked = at::ones({2, 2});
  mark_for_any_hook(marked);
  std::thread([&] { at::mm(marked, marked); }).join();
  EXPECT_EQ(take(), std::vector<std::string>{"aten::mm"});
}

// Wrappers also have hooks for single operators: this hook comes first.
TEST_F(AnyOperatorHook, ComesBeforeTheHooksOfWrappers) {
  static std::vector<std::string>* order = new std::vector<std::string>;
  register_operator_hook("aten::mm", [](const c10::OperatorHandle& op, Stack* stack) {
    const NoHooksGuard off;
    const std::lock_guard lock(seen().mutex);
    *order = seen().names;
    op.callBoxed(stack);
  });
  const at::Tensor inner = at::randn({2, 2});
  const at::Tensor boxed = Boxed::make(inner);
  mark_hooked(boxed);
  mark_for_any_hook(boxed);
  take();
  const at::Tensor product = at::mm(boxed, boxed);
  EXPECT_TRUE(at::equal(payload_as<Boxed>(product)->inner, inner.mm(inner)));
  EXPECT_EQ(*order, std::vector<std::string>{"aten::mm"})
      << "the hook for every operator was called before that of the wrapper";
}

}  // namespace any_operator_hook_test
}  // namespace penstock
