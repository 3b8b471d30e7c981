// Tensor subclasses: every module of the zoo computes the same bits through wrappers as without them.
#include "penstock/tensor_subclass.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <thread>

#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/torch/module_zoo.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock {
namespace wrapper_test {

using sample::Boxed;
using sample::Two;
using test::has_text;
using test::message_of;
using zoo::Tensors;

struct Outcome {
  Tensors outputs, input_grads, parameter_grads, buffers;
};

// One forward and backward; gradients of inputs and parameters.
Outcome run_case(zoo::Case& made, Tensors inputs) {
  Outcome run;
  for (at::Tensor& input : inputs)
    if (input.is_floating_point()) input.requires_grad_(true);
  torch::manual_seed(5);
  run.outputs = made.forward(inputs);
  const at::Tensor loss = zoo::loss_of(run.outputs);
  if (loss.defined()) loss.backward();
  for (const at::Tensor& input : inputs) run.input_grads.push_back(input.grad());
  if (made.module) {
    for (const at::Tensor& parameter : made.module->parameters())
      run.parameter_grads.push_back(parameter.grad());
    for (const at::Tensor& buffer : made.module->buffers()) run.buffers.push_back(buffer);
  }
  return run;
}

// Parameters and buffers become wrappers in place.
template <class Wrap>
void wrap_module(zoo::Case& made, Wrap&& wrap) {
  if (!made.module) return;
  for (const at::Tensor& parameter : made.module->parameters())
    replace_data(parameter, wrap(parameter.detach()));
  for (const at::Tensor& buffer : made.module->buffers()) replace_data(buffer, wrap(buffer.detach()));
}

::testing::AssertionResult same_bits(const at::Tensor& expected, const at::Tensor& actual) {
  if (expected.defined() != actual.defined())
    return ::testing::AssertionFailure() << "one of them is undefined";
  if (!expected.defined()) return ::testing::AssertionSuccess();
  if (is_wrapper(actual)) return ::testing::AssertionFailure() << "still a wrapper";
  const at::NoGradGuard no_grad;
  if (expected.sizes() != actual.sizes() || expected.strides() != actual.strides() ||
      expected.scalar_type() != actual.scalar_type())
    return ::testing::AssertionFailure()
           << "expected " << expected.toString() << expected.sizes() << expected.strides() << ", got "
           << actual.toString() << actual.sizes() << actual.strides();
  const auto a = expected.detach().contiguous(), b = actual.detach().contiguous();
  if (std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) != 0)
    return ::testing::AssertionFailure()
           << "values differ by up to " << (expected - actual).abs().max().item();
  return ::testing::AssertionSuccess();
}

class ZooTest : public ::testing::TestWithParam<zoo::Entry> {};

TEST_P(ZooTest, BoxedComputesTheSameBits) {
  zoo::Case plain = GetParam().make();
  const Outcome expected = run_case(plain, plain.inputs);

  zoo::Case boxed = GetParam().make();
  wrap_module(boxed, [](const at::Tensor& tensor) { return Boxed::make(tensor); });
  Tensors inputs;
  for (const at::Tensor& input : boxed.inputs) inputs.push_back(Boxed::make(input));
  const Outcome actual = run_case(boxed, inputs);

  const auto compare = [](const Tensors& expected, const Tensors& actual, const char* what) {
    ASSERT_EQ(expected.size(), actual.size()) << what;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(expected[i].defined(), actual[i].defined()) << what << " " << i;
      if (!expected[i].defined()) continue;
      auto* payload = payload_as<Boxed>(actual[i]);
      ASSERT_TRUE(payload) << what << " " << i << " is not a wrapper";
      EXPECT_EQ(geometry_of(actual[i]), geometry_of(payload->inner)) << what << " " << i;
      EXPECT_TRUE(same_bits(expected[i], payload->inner)) << what << " " << i;
    }
  };
  compare(expected.outputs, actual.outputs, "output");
  compare(expected.input_grads, actual.input_grads, "gradient of input");
  compare(expected.parameter_grads, actual.parameter_grads, "gradient of parameter");
  compare(expected.buffers, actual.buffers, "buffer");
}

TEST_P(ZooTest, TwoHoldsTwoIndependentRuns) {
  zoo::Case first = GetParam().make(), second = GetParam().make(), both = GetParam().make();
  if (first.random) return;  // the two inner calls would draw different numbers
  for (at::Tensor& input : second.inputs)
    if (input.is_floating_point()) input = input * 0.5;
  const Outcome a = run_case(first, first.inputs), b = run_case(second, second.inputs);

  wrap_module(both, [](const at::Tensor& tensor) { return Two::make(tensor, tensor.clone()); });
  Tensors inputs;
  for (std::size_t i = 0; i < both.inputs.size(); ++i)
    inputs.push_back(Two::make(both.inputs[i], second.inputs[i].detach()));
  const Outcome actual = run_case(both, inputs);

  const auto compare = [](const Tensors& a, const Tensors& b, const Tensors& actual, const char* what) {
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(a[i].defined(), actual[i].defined()) << what << " " << i;
      if (!a[i].defined()) continue;
      auto* payload = payload_as<Two>(actual[i]);
      ASSERT_TRUE(payload) << what << " " << i;
      EXPECT_TRUE(same_bits(a[i], payload->a)) << what << " " << i;
      EXPECT_TRUE(same_bits(b[i], payload->b)) << what << " " << i;
    }
  };
  compare(a.outputs, b.outputs, actual.outputs, "output");
  compare(a.input_grads, b.input_grads, actual.input_grads, "gradient of input");
  compare(a.parameter_grads, b.parameter_grads, actual.parameter_grads, "gradient of parameter");
  compare(a.buffers, b.buffers, actual.buffers, "buffer");
}

TEST_P(ZooTest, InferenceModeDecomposes) {
  zoo::Case plain = GetParam().make(), boxed = GetParam().make();
  if (plain.name == "DoubleBackward") return;  // asks for gradients, which InferenceMode refuses
  wrap_module(boxed, [](const at::Tensor& tensor) { return Boxed::make(tensor); });
  const c10::InferenceMode inference;
  Tensors expected_inputs, inputs;
  for (const at::Tensor& input : plain.inputs) expected_inputs.push_back(input.clone());
  for (const at::Tensor& input : boxed.inputs) inputs.push_back(Boxed::make(input.clone()));
  torch::manual_seed(5);
  const Tensors expected = plain.forward(expected_inputs);
  torch::manual_seed(5);
  const Tensors actual = boxed.forward(inputs);
  ASSERT_EQ(expected.size(), actual.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    auto* payload = payload_as<Boxed>(actual[i]);
    ASSERT_TRUE(payload);
    EXPECT_TRUE(same_bits(expected[i], payload->inner)) << i;
  }
}

TEST_P(ZooTest, WrappersNest) {
  zoo::Case first = GetParam().make(), nested = GetParam().make();
  if (first.random) return;
  const Outcome expected = run_case(first, first.inputs);
  wrap_module(nested,
              [](const at::Tensor& tensor) { return Two::make(Boxed::make(tensor), tensor.clone()); });
  Tensors inputs;
  for (const at::Tensor& input : nested.inputs)
    inputs.push_back(Two::make(Boxed::make(input), input.clone()));
  const Outcome actual = run_case(nested, inputs);
  for (std::size_t i = 0; i < expected.input_grads.size(); ++i) {
    if (!expected.input_grads[i].defined()) continue;
    auto* two = payload_as<Two>(actual.input_grads[i]);
    ASSERT_TRUE(two);
    auto* boxed = payload_as<Boxed>(two->a);
    ASSERT_TRUE(boxed);
    EXPECT_TRUE(same_bits(expected.input_grads[i], boxed->inner));
    EXPECT_TRUE(same_bits(expected.input_grads[i], two->b));
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, ZooTest, ::testing::ValuesIn(zoo::all()),
                         [](const auto& info) { return info.param.name; });

// ---- single behaviours ----

at::Tensor boxed_leaf(at::IntArrayRef sizes) {
  return Boxed::make(torch::randn(sizes)).set_requires_grad(true);
}

const at::Tensor& inner(const at::Tensor& tensor) { return payload_as<Boxed>(tensor)->inner; }

TEST(Wrapper, GradIsAWrapperAndAccumulates) {
  const at::Tensor x = boxed_leaf({3});
  (x * 2).sum().backward();
  (x * 3).sum().backward();
  ASSERT_TRUE(payload_as<Boxed>(x.grad()));
  EXPECT_TRUE(at::equal(inner(x.grad()), torch::full({3}, 5.0)));
}

TEST(Wrapper, ViewsShareStorageAndWritesShowThrough) {
  const at::Tensor x = Boxed::make(torch::zeros({4, 4}));
  const at::Tensor row = x.select(0, 1);
  EXPECT_TRUE(row.is_alias_of(x));
  EXPECT_TRUE(x.detach().is_alias_of(x));
  row.add_(1);
  EXPECT_EQ(inner(x).sum().item<float>(), 4);
  for (const at::Tensor& part : x.split(2, 1)) EXPECT_TRUE(part.is_alias_of(x));
  EXPECT_FALSE(x.clone().is_alias_of(x));
}

TEST(Wrapper, InPlaceShapeChangesReachTheOutside) {
  const at::Tensor x = Boxed::make(torch::zeros({2, 3}));
  x.transpose_(0, 1);
  EXPECT_EQ(x.sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(x.strides(), at::IntArrayRef({1, 3}));
  x.unsqueeze_(0);
  EXPECT_EQ(x.dim(), 3);
}

TEST(Wrapper, HooksSeeWrappers) {
  const at::Tensor x = boxed_leaf({3});
  const at::Tensor y = x * 2;
  int seen = 0;
  y.register_hook([&](const at::Tensor& grad) {
    seen += is_wrapper(grad);
    return grad * 10;
  });
  y.sum().backward();
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(at::equal(inner(x.grad()), torch::full({3}, 20.0)));
}

TEST(Wrapper, VersionCounterStillGuardsSavedTensors) {
  const at::Tensor x = boxed_leaf({3});
  const at::Tensor y = x.exp();
  y.detach().mul_(2);  // changes what exp saved for its backward
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(Wrapper, SetDataBetweenWrappers) {
  const at::Tensor x = boxed_leaf({3});
  const at::Tensor other = Boxed::make(torch::ones({2, 2}));
  x.set_data(other);
  EXPECT_EQ(x.sizes(), at::IntArrayRef({2, 2}));
  EXPECT_EQ(payload_of(x), payload_of(other));
  (x * 3).sum().backward();
  EXPECT_TRUE(at::equal(inner(x.grad()), torch::full({2, 2}, 3.0)));
}

TEST(Wrapper, APlainParameterBecomesAWrapperAndPlainAgain) {
  torch::nn::Linear linear(4, 3);
  const at::Tensor before = linear->weight.detach().clone();
  const at::Tensor handle = linear->parameters()[0];
  replace_data(linear->weight, Boxed::make(linear->weight.detach()));
  EXPECT_TRUE(payload_as<Boxed>(handle)) << "every handle sees the change";
  EXPECT_TRUE(handle.requires_grad() && handle.is_leaf());
  linear->forward(torch::ones({2, 4})).sum().backward();
  ASSERT_TRUE(payload_as<Boxed>(handle.grad()));
  EXPECT_TRUE(payload_as<Boxed>(handle.detach()));
  replace_data(linear->weight, Boxed::make(before * 2));
  EXPECT_TRUE(at::equal(inner(handle), before * 2));

  replace_data(linear->weight, before);
  EXPECT_FALSE(is_wrapper(handle));
  handle.mutable_grad() = at::Tensor();
  linear->forward(torch::ones({2, 4})).sum().backward();
  EXPECT_FALSE(is_wrapper(handle.grad()));
  EXPECT_TRUE(at::equal(handle.grad(), torch::full({3, 4}, 2.0)));
  EXPECT_TRUE(at::equal(handle.detach(), before));
  EXPECT_TRUE(handle.is_leaf());
}

TEST(Wrapper, ReplaceDataChangesTheShapeThatBackwardExpects) {
  at::Tensor x = torch::ones({3}).set_requires_grad(true);
  (x * 2).sum().backward();
  x.mutable_grad() = at::Tensor();
  const auto kept = (x * 2).sum();  // a live graph keeps the old accumulator alive
  replace_data(x, torch::ones({5}));
  (x * 4).sum().backward();
  EXPECT_EQ(x.grad().sizes(), at::IntArrayRef({5}));
}

TEST(Wrapper, ReplaceDataRefusesWhatItCannotChange) {
  const at::Tensor leaf = torch::ones({2}).set_requires_grad(true);
  EXPECT_THROW(replace_data(leaf * 2, torch::ones({2})), StateError);
  EXPECT_THROW(replace_data(at::Tensor(), torch::ones({2})), TypeError);
  EXPECT_THROW(replace_data(torch::ones({2}), at::Tensor()), TypeError);
  EXPECT_THROW(replace_data(torch::ones({2}).to_sparse(), Boxed::make(torch::ones({2}))), TypeError);
}

TEST(Wrapper, AdoptedParameterIsFreedWithItsPayload) {
  const at::Tensor inner_tensor = torch::ones({4});
  {
    at::Tensor x = torch::zeros({4}).set_requires_grad(true);
    replace_data(x, Boxed::make(inner_tensor));
    EXPECT_GT(inner_tensor.use_count(), 1);
  }
  EXPECT_EQ(inner_tensor.use_count(), 1);
}

template <class Optimizer, class Options>
void train_both(Options options) {
  const auto train = [&](bool wrap) {
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
    if (wrap)
      for (const at::Tensor& parameter : model->parameters())
        replace_data(parameter, Boxed::make(parameter.detach()));
    Optimizer optimizer(model->parameters(), options);
    const at::Tensor x = torch::randn({16, 4}), target = torch::randn({16, 1});
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      torch::mse_loss(model->forward(x), target).backward();
      optimizer.step();
    }
    Tensors values;
    for (const at::Tensor& parameter : model->parameters())
      values.push_back(wrap ? inner(parameter) : parameter.detach());
    return values;
  };
  const Tensors expected = train(false), actual = train(true);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(expected[i], actual[i])) << i;
}

TEST(Wrapper, Sgd) {
  train_both<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
}
TEST(Wrapper, AdamW) { train_both<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01)); }
TEST(Wrapper, Adam) { train_both<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true)); }
TEST(Wrapper, RmsProp) {
  train_both<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).momentum(0.5));
}

void set_autocast(bool on) {
#if PENSTOCK_TORCH_AT_LEAST(2, 4)
  at::autocast::set_autocast_enabled(at::kCPU, on);
#else
  at::autocast::set_cpu_enabled(on);
#endif
}

TEST(Wrapper, AutocastIsAbove) {
  const at::Tensor x = torch::randn({4, 4}), weight = torch::randn({4, 4});
  set_autocast(true);
  const at::Tensor expected = x.mm(weight);
  const at::Tensor actual = Boxed::make(x).mm(Boxed::make(weight));
  set_autocast(false);
  at::autocast::clear_cache();
  EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(same_bits(expected, inner(actual)));
}

TEST(Wrapper, ConjugateAndNegativeInnerTensors) {
  const at::Tensor z = torch::randn({3}, at::kComplexFloat);
  const at::Tensor boxed = Boxed::make(z.conj());  // lazily conjugated inside
  EXPECT_TRUE(at::equal(inner(boxed * 2), (z.conj() * 2).resolve_conj()));
  const at::Tensor real_part = torch::_neg_view(torch::ones({3}));
  EXPECT_TRUE(at::equal(inner(Boxed::make(real_part) + 1), torch::zeros({3})));
}

TEST(Wrapper, WrappedNumbersStayNumbers) {
  const at::Tensor x = Boxed::make(torch::ones({2}, at::kBFloat16));
  EXPECT_EQ((x * 2.5).scalar_type(), at::kBFloat16);
  EXPECT_EQ((Boxed::make(torch::ones({2}, at::kLong)) + 1).scalar_type(), at::kLong);
}

TEST(Wrapper, ManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        const at::Tensor x = Boxed::make(torch::full({4}, static_cast<float>(t))).set_requires_grad(true);
        (x * x).sum().backward();
        if (!at::equal(inner(x.grad()), torch::full({4}, 2.0f * static_cast<float>(t)))) ++failures;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

TEST(Wrapper, FlattenAndUnflatten) {
  register_wrapper_kind("Two", [](const FlatWrapper& flat) {
    return Two::make(flat.tensors.at(0).second, flat.tensors.at(1).second);
  });
  EXPECT_THROW(register_wrapper_kind("Two", {}), StateError);
  const at::Tensor two = Two::make(torch::ones({2}), torch::zeros({2}));
  const FlatWrapper flat = flatten_wrapper(two);
  EXPECT_EQ(flat.kind, "Two");
  ASSERT_EQ(flat.tensors.size(), 2u);
  EXPECT_EQ(flat.tensors[1].first, "b");
  EXPECT_EQ(flat.context, c10::IValue("two"));
  EXPECT_EQ(flat.geometry, geometry_of(two));
  const at::Tensor again = unflatten_wrapper(flat);
  EXPECT_TRUE(at::equal(payload_as<Two>(again)->a, torch::ones({2})));
  EXPECT_THROW(flatten_wrapper(torch::ones({1})), TypeError);
  EXPECT_THROW(unflatten_wrapper({"Nobody", {}, {}, {}}), TypeError);
}

// ---- faulty handlers ----

struct Faulty final : Payload {
  enum class Fault { Forgets, TooMany, TooFew, WrongType, Throws, Refuses } fault;
  explicit Faulty(Fault fault) : fault(fault) {}
  std::string_view kind() const override { return "Faulty"; }
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    const std::size_t arguments = op.schema().arguments().size();
    switch (fault) {
      case Fault::Forgets:
        return;
      case Fault::TooMany:
        stack->emplace_back(1);
        return;
      case Fault::TooFew:
        torch::jit::drop(*stack, arguments);
        return;
      case Fault::WrongType:
        torch::jit::drop(*stack, arguments);
        stack->emplace_back("text");
        return;
      case Fault::Throws:
        throw ValueError("on purpose");
      case Fault::Refuses:
        refuse(op);
    }
  }
  static at::Tensor make(Fault fault) {
    return make_wrapper_like(c10::make_intrusive<Faulty>(fault), torch::ones({2}));
  }
};

TEST(FaultyHandler, EveryMistakeNamesOperatorAndSubclass) {
  using Fault = Faulty::Fault;
  for (const Fault fault :
       {Fault::Forgets, Fault::TooMany, Fault::TooFew, Fault::WrongType, Fault::Refuses}) {
    const std::string message = message_of<TypeError>([&] { Faulty::make(fault).relu(); });
    EXPECT_TRUE(has_text(message, "Faulty")) << message;
    EXPECT_TRUE(has_text(message, "aten::relu")) << message;
  }
  const std::string message = message_of<TypeError>([&] { Faulty::make(Fault::Forgets) + 1; });
  EXPECT_TRUE(has_text(message, "aten::add.")) << message;
}

// Releases its argument before it creates the result, which is then often allocated at the same address.
struct Renewed final : Payload {
  std::string_view kind() const override { return "Renewed"; }
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    auto payload = c10::make_intrusive<Renewed>();
    const WrapperGeometry geometry = geometry_of(stack->back().toTensor());
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->emplace_back(make_wrapper(std::move(payload), geometry));
  }
};

TEST(Wrapper, AResultAtTheAddressOfItsArgumentIsNotTheArgument) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::relu", "");
  const at::AutoDispatchBelowADInplaceOrView below;  // as within a handler: autograd would hold the argument
  for (int i = 0; i < 100; ++i) {
    Stack stack;  // the only holder of the argument
    stack.emplace_back(make_wrapper_like(c10::make_intrusive<Renewed>(), torch::ones({2})));
    ASSERT_NO_THROW(op.callBoxed(&stack));
  }
}

TEST(FaultyHandler, AThrowRestoresTheThreadState) {
  const auto keys = [] { return c10::impl::tls_local_dispatch_key_set(); };
  const auto before = keys();
  EXPECT_THROW(Faulty::make(Faulty::Fault::Throws).relu(), ValueError);
  EXPECT_EQ(before.excluded_, keys().excluded_);
  EXPECT_EQ(before.included_, keys().included_);
  const at::Tensor x = boxed_leaf({2});
  (x * 2).sum().backward();
  EXPECT_TRUE(is_wrapper(x.grad()));
}

TEST(FaultyHandler, APlainTensorCannotBeWrittenWithAWrapper) {
  const at::Tensor plain = torch::ones({2});
  const std::string message = message_of<TypeError>([&] { plain.add_(Boxed::make(torch::ones({2}))); });
  EXPECT_TRUE(has_text(message, "aten::add_")) << message;
  EXPECT_TRUE(has_text(message, "plain tensor")) << message;
  EXPECT_TRUE(at::equal(plain, torch::ones({2})));
}

TEST(FaultyHandler, SetDataOnAPlainTensorIsReported) {
  at::Tensor plain = torch::ones({2});
  plain.set_data(Boxed::make(torch::ones({2})));
  // LibTorch leaves the dispatch key set: the tensor is plain, without memory. Reading it must be an error,
  // not a crash.
  EXPECT_ANY_THROW(plain.data_ptr<float>());
}

}  // namespace wrapper_test
}  // namespace penstock
