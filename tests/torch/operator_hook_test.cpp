// Hooks before autograd: when they are called, and which arguments are refused.
#include "penstock/torch/dispatch/operator_hook.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock {
namespace operator_hook_test {

using sample::Boxed;
using test::has_text;
using test::message_of;

at::Tensor inner_of(const at::Tensor& wrapper) { return payload_as<Boxed>(wrapper)->inner; }

TEST(OperatorHook, MarkedTensorsCallIt) {
  static std::atomic<int> calls = 0;
  register_operator_hook("aten::linear", [](const c10::OperatorHandle& op, Stack* stack) {
    const NoHooksGuard off;
    ++calls;
    (*stack)[stack->size() - 3] = (*stack)[stack->size() - 3].toTensor() * 2;
    op.callBoxed(stack);
  });
  const at::Tensor x = torch::rand({2, 3}), weight = torch::rand({4, 3});
  at::Tensor input = Boxed::make(x), marked = Boxed::make(weight);
  EXPECT_TRUE(at::equal(inner_of(at::linear(input, marked)), at::linear(x, weight)));
  EXPECT_EQ(calls, 0) << "nothing is marked yet";
  mark_hooked(marked);
  EXPECT_TRUE(at::equal(inner_of(at::linear(input, marked)), at::linear(x * 2, weight)));
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(inner_of(at::linear(input, Boxed::make(weight))), at::linear(x, weight)));
  EXPECT_EQ(calls, 1) << "another tensor";
  EXPECT_TRUE(at::equal(inner_of(marked + 1), weight + 1)) << "an operator without a hook";
  at::linear(input, marked.view({4, 3}));
  EXPECT_EQ(calls, 2) << "a view";
  {
    const NoHooksGuard off;
    EXPECT_TRUE(at::equal(inner_of(at::linear(input, marked)), at::linear(x, weight)));
  }
  EXPECT_EQ(calls, 2);
  // The operators of a hook are differentiated.
  input.set_requires_grad(true);
  at::linear(input, marked).sum().backward();
  EXPECT_TRUE(at::allclose(inner_of(input.grad()), 2 * weight.sum(0).expand({2, 3})));
}

TEST(OperatorHook, ErrorsSayWhatIsWrong) {
  const auto nothing = [](const c10::OperatorHandle& op, Stack* stack) {
    const NoHooksGuard off;
    op.callBoxed(stack);
  };
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { register_operator_hook("aten::no_such_operator", nothing); }),
               "aten::no_such_operator, expected one that exists"));
  EXPECT_THROW(register_operator_hook("aten::add", nothing), ValueError)
      << "it has no overload without a name";
  register_operator_hook("aten::sub.Tensor", nothing);
  EXPECT_TRUE(has_text(message_of<StateError>([&] { register_operator_hook("aten::sub.Tensor", nothing); }),
                       "aten::sub.Tensor already has a hook"));
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { mark_hooked(torch::ones({2})); }), "expected a wrapper"));
  EXPECT_THROW(mark_hooked(at::Tensor()), TypeError);
}

}  // namespace operator_hook_test
}  // namespace penstock
