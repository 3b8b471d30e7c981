// Operator by operator: a shape-only run has the geometry, aliasing and gradients of the real run.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <iostream>
#include <mutex>
#include <set>
#include <sstream>

#include "penstock/base/describe.h"
#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"
#include "tests/has_text.h"
#include "tests/torch/operator_zoo.h"

namespace penstock {
namespace fake_operator_test {

using Tensors = std::vector<at::Tensor>;

// Names of the operators that were called.
class Counter final : public Mode {
 public:
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    {
      const std::lock_guard lock(mutex_);
      names.insert(op.operator_name().name);
    }
    op.callBoxed(stack);
  }
  std::set<std::string> names;

 private:
  std::mutex mutex_;
};

// Everything about a tensor except its values, and which of the tensors before it share its memory.
std::string describe(const at::Tensor& tensor, const Tensors& before) {
  if (!tensor.defined()) return "undefined";
  const WrapperGeometry geometry = geometry_of(tensor);
  std::ostringstream out;
  out << geometry.dtype << at::IntArrayRef(geometry.sizes) << " strides " << at::IntArrayRef(geometry.strides)
      << " offset " << geometry.storage_offset << " on " << geometry.device
      << (tensor.requires_grad() ? " grad" : "") << (tensor.is_view() ? " view" : "") << " shares";
  for (std::size_t i = 0; i < before.size(); ++i)
    if (before[i].defined() && tensor.is_alias_of(before[i])) out << " " << i;
  return out.str();
}

enum class Gradient { Dense, Expanded };

std::vector<std::string> run_call(const zoo::OperatorCall& call, Tensors inputs, Gradient gradient,
                                  bool fake) {
  std::vector<std::string> facts;
  if (call.differentiable)
    for (at::Tensor& input : inputs)
      if (input.is_floating_point()) input.requires_grad_(true);
  Tensors all = inputs;
  const Tensors outputs = call.run(inputs);
  for (const at::Tensor& output : outputs) {
    if (output.defined() && fake) {
      EXPECT_TRUE(is_fake(output));
    }
    facts.push_back("output " + std::to_string(facts.size()) + ": " + describe(output, all));
    all.push_back(output);
  }
  if (!call.differentiable) {  // in place: the inputs may have changed
    for (std::size_t i = 0; i < inputs.size(); ++i)
      facts.push_back("input " + std::to_string(i) + ": " + describe(inputs[i], {}));
    return facts;
  }
  Tensors roots, grads;
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad()) {
      roots.push_back(output);
      grads.push_back(gradient == Gradient::Dense
                          ? at::ones(output.sizes(), output.options().requires_grad(false))
                          : at::ones({}, output.options().requires_grad(false)).expand(output.sizes()));
    }
  // One by one, so that differences are not hidden in a sum.
  for (std::size_t i = 0; i < roots.size(); ++i) {
    Tensors leaves;
    for (const at::Tensor& input : inputs)
      if (input.requires_grad()) leaves.push_back(input);
    const Tensors found = torch::autograd::grad({roots[i]}, leaves, {grads[i]}, /*retain_graph=*/true, false,
                                                /*allow_unused=*/true);
    for (std::size_t j = 0; j < found.size(); ++j)
      if (found[j].defined())
        facts.push_back("gradient of root " + std::to_string(i) + " for input " + std::to_string(j) + ": " +
                        describe(found[j], {}));
  }
  return facts;
}

void expect_same(const std::vector<std::string>& expected, const std::vector<std::string>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(expected[i], actual[i]);
}

Tensors faked(const Tensors& real) {
  Tensors fake;
  for (const at::Tensor& tensor : real) fake.push_back(to_fake(tensor));
  return fake;
}

class FakeOperator : public ::testing::TestWithParam<zoo::OperatorCall> {};

TEST_P(FakeOperator, EqualsTheRealOneExceptForValues) {
  const zoo::OperatorCall& call = GetParam();
  for (const Gradient gradient : {Gradient::Dense, Gradient::Expanded}) {
    SCOPED_TRACE(gradient == Gradient::Dense ? "dense gradient" : "expanded gradient");
    std::vector<std::string> expected;
    try {
      expected = run_call(call, call.inputs(), gradient, false);
    } catch (const c10::Error& error) {
      if (!call.may_be_refused) throw;
      GTEST_SKIP() << "this LibTorch cannot run it on real tensors: " << error.what_without_backtrace();
    }
    const Tensors inputs = faked(call.inputs());
    FakeMode mode;
    const ModeGuard guard(mode);
    expect_same(expected, run_call(call, inputs, gradient, true));
  }
}

INSTANTIATE_TEST_SUITE_P(All, FakeOperator, ::testing::ValuesIn(zoo::operator_calls()),
                         [](const auto& info) { return info.param.name; });

TEST(FakeOperators, ManyOperatorsRunInShapeOnly) {
  Counter counter;
  std::size_t results = 0;
  for (const zoo::OperatorCall& call : zoo::operator_calls()) {
    SCOPED_TRACE(call.name);
    Tensors inputs = faked(call.inputs());
    FakeMode mode;
    const ModeGuard below(mode);
    const ModeGuard guard(counter);
    results += call.run(inputs).size();
  }
  std::cout << counter.names.size() << " distinct operators in " << results << " results\n";
  EXPECT_GE(counter.names.size(), 150u);
}

// ---- optimizers ----

struct Model : torch::nn::Module {
  Model() {
    first = register_module("first", torch::nn::Linear(4, 8));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    second = register_module("second", torch::nn::Linear(8, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return second(norm(first(x)).relu()); }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

template <class Optimizer, class Options>
void optimizer_steps(const Options& options, std::size_t state_tensors) {
  const auto run = [&](bool fake) {
    torch::manual_seed(2);
    Model model;
    if (fake)
      for (const at::Tensor& parameter : model.parameters())
        replace_data(parameter, to_fake(parameter.detach()));
    Optimizer optimizer(model.parameters(), options);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      model.forward(fake ? make_fake({3, 4}) : torch::randn({3, 4})).pow(2).mean().backward();
      optimizer.step();
    }
    std::vector<std::string> facts;
    for (const at::Tensor& parameter : model.parameters()) {
      EXPECT_EQ(is_fake(parameter), fake);
      facts.push_back(describe(parameter, {}) + " with gradient " + describe(parameter.grad(), {}));
    }
    EXPECT_EQ(optimizer.state().size(), state_tensors);
    return facts;
  };
  expect_same(run(false), run(true));
}

TEST(FakeOptimizer, Sgd) {
  optimizer_steps<torch::optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01), 6);
}
TEST(FakeOptimizer, Adam) {
  optimizer_steps<torch::optim::Adam>(torch::optim::AdamOptions(0.1).amsgrad(true), 6);
}
TEST(FakeOptimizer, AdamW) { optimizer_steps<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1), 6); }
TEST(FakeOptimizer, RmsProp) {
  optimizer_steps<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1).momentum(0.9), 6);
}
TEST(FakeOptimizer, Adagrad) { optimizer_steps<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1), 6); }

TEST(FakeOptimizer, ClippingGradients) {
  const at::Tensor weight = make_fake({3, 4}, at::TensorOptions().requires_grad(true));
  weight.pow(2).sum().backward();
  const at::Tensor norm = at::norm(at::stack({at::norm(weight.grad())}));
  weight.grad().mul_((1.0 / (norm + 1e-6)).clamp_max(1.0));
  EXPECT_TRUE(is_fake(weight.grad()));
  EXPECT_EQ(norm.dim(), 0);
}

// Fused optimizers write lists and return nothing.
TEST(FakeOptimizer, FusedAdamW) {
  if (!zoo::has_operator("aten::_fused_adamw_", "")) GTEST_SKIP() << "this LibTorch has no fused AdamW";
  const auto list = [] { return c10::List<at::Tensor>({make_fake({3, 4}), make_fake({4})}); };
  std::vector<c10::IValue> stack = {list(),
                                    list(),
                                    list(),
                                    list(),
                                    c10::List<at::Tensor>(),
                                    c10::List<at::Tensor>({make_fake({}), make_fake({})}),
                                    0.1,
                                    0.9,
                                    0.99,
                                    0.01,
                                    1e-8,
                                    false,
                                    false,
                                    c10::IValue(),
                                    c10::IValue()};
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_fused_adamw_", "");
  if (op.schema().arguments().size() != stack.size()) GTEST_SKIP() << "its arguments differ in this LibTorch";
  op.callBoxed(&stack);
  EXPECT_TRUE(stack.empty());
}

// ---- devices ----

// LibTorch without CUDA throws (Fake.CudaGradientsNeedCuda).
bool cuda_can_require_grad() {
  try {
    make_fake({1}, at::device(at::kCUDA).requires_grad(true));
    return true;
  } catch (const StateError&) {
    return false;
  }
}

TEST(FakeCuda, ATransformerBlockForwardAndBackward) {
  if (!cuda_can_require_grad()) return;
  const auto cuda = at::device(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor x = make_fake({2, 5, 16}, cuda.requires_grad(true)),
                   weight = make_fake({48, 16}, cuda.requires_grad(true)),
                   gain = make_fake({16}, cuda.requires_grad(true));
  const at::Tensor normed = at::layer_norm(x, {16}, gain, gain);
  const auto parts = at::linear(normed, weight).view({2, 5, 3, 4, 4}).permute({2, 0, 3, 1, 4}).unbind(0);
  at::Tensor attended;
  if (zoo::has_operator("aten::scaled_dot_product_attention", ""))
    attended =
        zoo::call_by_name("aten::scaled_dot_product_attention", "",
                          {parts[0], parts[1], parts[2], c10::IValue(), 0.0, true, c10::IValue(), false});
  else
    attended = std::get<0>([&] {
      std::vector<c10::IValue> stack = {parts[0], parts[1], parts[2], c10::IValue(), 0.0, false, true};
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("aten::_scaled_dot_product_attention", "")
          .callBoxed(&stack);
      return std::tuple(stack[0].toTensor());
    }());
  EXPECT_EQ(attended.sizes(), at::IntArrayRef({2, 4, 5, 4}));
  EXPECT_EQ(attended.device(), at::Device(at::kCUDA, 0));
  at::dropout(attended, 0.1, true).sum().backward();
  for (const at::Tensor& leaf : {x, weight, gain}) {
    EXPECT_EQ(leaf.grad().sizes(), leaf.sizes());
    EXPECT_EQ(leaf.grad().device(), leaf.device());
    EXPECT_EQ(leaf.grad().scalar_type(), at::kBFloat16);
  }
}

TEST(FakeCuda, StatisticsAreKeptInFloat) {
  const at::Tensor x = make_fake({3, 8}, at::device(at::kCUDA).dtype(at::kHalf));
  const auto [y, mean, deviation] = at::native_layer_norm(x, {8}, {}, {}, 1e-5);
  EXPECT_EQ(y.scalar_type(), at::kHalf);
  EXPECT_EQ(mean.scalar_type(), at::kFloat);
  EXPECT_EQ(deviation.sizes(), at::IntArrayRef({3, 1}));
}

TEST(FakeCuda, RecurrentCells) {
  if (!cuda_can_require_grad()) return;
  const auto cuda = at::device(at::kCUDA).requires_grad(true);
  const at::Tensor x = make_fake({2, 4}, cuda), h = make_fake({2, 3}, cuda), w = make_fake({12, 4}, cuda),
                   u = make_fake({12, 3}, cuda);
  const auto [hidden, cell] = at::lstm_cell(x, {h, h}, w, u);
  (hidden.sum() + cell.sum()).backward();
  EXPECT_EQ(w.grad().sizes(), w.sizes());
  EXPECT_EQ(at::gru_cell(x, h, make_fake({9, 4}, cuda), make_fake({9, 3}, cuda)).sizes(), h.sizes());
}

// ---- refusals ----

TEST(FakeOperators, MasksAreRefusedWithARemedy) {
  const at::Tensor x = make_fake({4, 4});
  try {
    x.index({make_fake({4, 4}, at::kBool)});
    FAIL() << "a mask was accepted";
  } catch (const DataDependentError& error) {
    EXPECT_TRUE(test::has_text(error.what(), "masked_fill")) << error.what();
  }
}

TEST(FakeOperators, AWrongNumberOfArgumentsIsRefused) {
  EXPECT_THROW(register_shape_function("aten::_fft_c2c", [](const at::Tensor& self) { return self; }),
               TypeError);
}

TEST(FakeOperators, ShapesThatDoNotFitAreErrors) {
  const at::Tensor x = make_fake({2, 4, 7, 7});
  EXPECT_THROW(at::conv2d(x, make_fake({6, 3, 3, 3})), c10::Error);
  EXPECT_THROW(at::conv2d(x, make_fake({6, 4, 9, 9})), c10::Error);
  EXPECT_THROW(at::layer_norm(x, {8}), c10::Error);
  EXPECT_THROW(at::dot(make_fake({3}), make_fake({4})), c10::Error);
  EXPECT_THROW(at::binary_cross_entropy(make_fake({3}), make_fake({4})), c10::Error);
  EXPECT_THROW(make_fake({3}).logical_and_(make_fake({2, 3})), c10::Error);
}

TEST(FakeOperators, AStorageOffsetIsKept) {
  const at::Tensor real = torch::ones({4, 4}).select(0, 2);
  const at::Tensor fake = to_fake(real);
  EXPECT_EQ(geometry_of(fake), geometry_of(real));
  EXPECT_EQ(geometry_of(fake.slice(0, 1, 3)), geometry_of(real.slice(0, 1, 3)));
}

}  // namespace fake_operator_test
}  // namespace penstock
