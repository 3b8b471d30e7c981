// Tensor subclasses as inputs, results, parameters and gradients of captured functions: bitwise equal to the
// plain run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph/tools/graph_file.h"
#include "penstock/graph/tools/graph_report.h"
#include "tests/graph/registered_wrappers.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace subclass_capture_test {

using sample::Boxed;
using sample::Two;
using test::has_text;
using test::message_of;
using test::same_tensor;

at::Tensor numbers(at::IntArrayRef sizes, int seed) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn(sizes, generator);
}

at::Tensor nested(int seed, bool requires_grad) {
  at::Tensor made = Two::make(Boxed::make(numbers({3, 4}, seed)), Boxed::make(numbers({3, 4}, seed + 1)));
  made.set_requires_grad(requires_grad);
  return made;
}

class SubclassCapture : public ::testing::Test {
 protected:
  void SetUp() override { test::register_sample_kinds(); }
};

TEST_F(SubclassCapture, NestedInputsResultsAndGradients) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor(), y = in[1].toTensor(), w = in[2].toTensor();
    const at::Tensor z = (x * y + w).sin().matmul(w.t());
    return {z, z.detach().relu() + 1, 7};
  };
  Compiled compiled(function);
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> eager{nested(step, true), nested(step + 10, false),
                                  numbers({3, 4}, step + 20).requires_grad_()};
    std::vector<at::Tensor> captured{nested(step, true), nested(step + 10, false),
                                     numbers({3, 4}, step + 20).requires_grad_()};
    const Values expected = function({eager[0], eager[1], eager[2]}),
                 actual = compiled({captured[0], captured[1], captured[2]});
    EXPECT_TRUE(same_tensor(actual[0].toTensor(), expected[0].toTensor()));
    EXPECT_TRUE(same_tensor(actual[1].toTensor(), expected[1].toTensor()));
    EXPECT_EQ(actual[2].toInt(), 7);
    EXPECT_TRUE(actual[0].toTensor().requires_grad());
    EXPECT_FALSE(actual[1].toTensor().requires_grad());
    expected[0].toTensor().pow(2).sum().backward();
    actual[0].toTensor().pow(2).sum().backward();
    EXPECT_TRUE(same_tensor(captured[0].grad(), eager[0].grad()));
    // A gradient may be a subclass where the input is not.
    EXPECT_TRUE(is_subclass(captured[2].grad()));
    EXPECT_TRUE(same_tensor(captured[2].grad(), eager[2].grad()));
  }
  ASSERT_EQ(compiled.captures(), 1u);
  const JointGraph& joint = compiled.joint(0);
  ASSERT_TRUE(joint.subclasses);
  EXPECT_EQ(joint.primals, 5u);
  EXPECT_EQ(joint.graph.inputs[0].name, "primals_1.a.inner");
  EXPECT_EQ(joint.graph.inputs[3].name, "primals_2.b.inner");
  EXPECT_EQ(joint.forward_outputs, 5u);  // two tensors, twice, and a number
  EXPECT_EQ(joint.tangents.size(), 2u);
  const SubclassLayout& layout = *joint.subclasses;
  ASSERT_EQ(layout.inputs.size(), 3u);
  EXPECT_EQ(layout.inputs[1].first_flat(), 2u);
  EXPECT_FALSE(layout.inputs[2].is_subclass());
  ASSERT_EQ(layout.forward_outputs.size(), 3u);
  EXPECT_EQ(layout.forward_outputs[1].first_flat(), 2u);
  ASSERT_EQ(layout.tangents.size(), 1u);
  ASSERT_EQ(layout.input_gradients.size(), 3u);
  EXPECT_TRUE(layout.input_gradients[2].is_subclass());
  EXPECT_EQ(layout.input_gradients[2].first_flat(), 3u);
  // The graph contains no subclass: every value is plain and none is a constant.
  EXPECT_TRUE(joint.graph.constants.empty());
}

TEST_F(SubclassCapture, MadeInsideAndReturned) {
  Compiled compiled([](const Values& in) -> Values { return {Boxed::make(in[0].toTensor() * 2) + 1}; });
  const at::NoGradGuard no_grad;
  const at::Tensor x = numbers({3}, 1);
  EXPECT_TRUE(same_tensor(compiled({x})[0].toTensor(), Boxed::make(x * 2) + 1));
  EXPECT_TRUE(same_tensor(compiled({x + 1})[0].toTensor(), Boxed::make((x + 1) * 2) + 1));
  EXPECT_EQ(compiled.captures(), 1u);
}

// Dynamic dims are for plain tensors: a call with subclasses is captured for its sizes, or rejected.
TEST_F(SubclassCapture, HaveNoDynamicDims) {
  const WarningCapture warnings;
  const Function doubled = [](const Values& in) -> Values { return {in[0].toTensor() * 2}; };
  const Function boxed = [](const Values& in) -> Values { return {Boxed::make(in[0].toTensor() * 2)}; };
  const CompileOptions options{.dynamic = {.dims = {{0, 0, "B"}}}};
  Compiled of_input(doubled, options), of_result(boxed, options);
  for (const std::int64_t size : {3, 5}) {
    const at::Tensor x = numbers({size, 2}, 1);
    EXPECT_TRUE(same_tensor(of_input({Boxed::make(x)})[0].toTensor(), Boxed::make(x) * 2));
    EXPECT_TRUE(same_tensor(of_result({x})[0].toTensor(), Boxed::make(x * 2)));
  }
  EXPECT_EQ(of_input.captures(), 2u);
  EXPECT_EQ(of_result.captures(), 2u);
  EXPECT_TRUE(has_text(of_input.why_not_dynamic(), "input 0 is a tensor of kind"));
  EXPECT_TRUE(has_text(of_result.why_not_dynamic(), "one of its results or their gradients"));
  Compiled strict(boxed, {.recapture = false, .dynamic = options.dynamic});
  EXPECT_TRUE(has_text(message_of<StateError>([&] {
                         strict({numbers({3, 2}, 1)});
                       }),
                       "one of its results or their gradients"));
}

TEST_F(SubclassCapture, AnotherKindOrNestingCapturesAgain) {
  const Function function = [](const Values& in) -> Values { return {in[0].toTensor() * 2}; };
  Compiled compiled(function);
  const at::Tensor x = numbers({3}, 1);
  compiled({Boxed::make(x)});
  compiled({Two::make(x, x)});
  compiled({Two::make(Boxed::make(x), Boxed::make(x))});
  compiled({x});
  EXPECT_EQ(compiled.captures(), 4u);
  compiled({Boxed::make(x + 1)});
  compiled({x + 1});
  EXPECT_EQ(compiled.captures(), 4u);
  Compiled strict(function, {.recapture = false});
  strict({Boxed::make(x)});
  EXPECT_TRUE(has_text(message_of<StateError>([&] { strict({x}); }),
                       "input 0 is a plain tensor, in the capture Boxed"));
  EXPECT_TRUE(has_text(message_of<StateError>([&] { strict({Two::make(x, x)}); }),
                       "input 0 is Two two, in the capture Boxed"));
  EXPECT_TRUE(has_text(message_of<StateError>([&] { strict({Boxed::make(Boxed::make(x))}); }),
                       "input 0 is Boxed with inner Boxed, in the capture a plain tensor"));
}

TEST_F(SubclassCapture, GradientsOfAnotherKindAreErrorsThatNameTheResult) {
  Compiled compiled([](const Values& in) -> Values {
    return {in[1].toTensor().cos(), in[0].toTensor().sin()};
  });
  const at::Tensor x = Boxed::make(numbers({3}, 1)).set_requires_grad(true),
                   y = numbers({3}, 2).requires_grad_();
  const auto run = [&](const at::Tensor& of_plain, const at::Tensor& of_boxed) {
    const Values results = compiled({x, y});
    torch::autograd::backward({results[0].toTensor(), results[1].toTensor()}, {of_plain, of_boxed});
  };
  const at::Tensor ones = at::ones({3});
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { run(ones, ones); }), "the gradient of result 1"));
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { run(ones, ones); }), "a plain tensor"));
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { run(ones, ones); }), "Boxed"));
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { run(Boxed::make(ones), Boxed::make(ones)); }),
                       "the gradient of result 0"));
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { run(ones, Two::make(ones, ones)); }), "Two two"));
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { run(ones, Boxed::make(Boxed::make(ones))); }),
                       "the gradient of result 1"));
  run(ones, Boxed::make(ones));
  EXPECT_TRUE(same_tensor(x.grad(), x.detach().cos()));
}

// A result that is not used has no gradient: zeros of the expected kind.
TEST_F(SubclassCapture, ResultsWithoutGradient) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    return {x.sin(), x.cos()};
  };
  Compiled compiled(function);
  const at::Tensor a = nested(1, true), b = nested(1, true);
  compiled({a})[0].toTensor().sum().backward();
  function({b})[0].toTensor().sum().backward();
  EXPECT_TRUE(same_tensor(a.grad(), b.grad()));
}

// One plain tensor would be inside of two gradients, and each addition to one would reach the other.
TEST_F(SubclassCapture, GradientsOfOneValueAreSeparate) {
  Compiled compiled(
      [](const Values& in) -> Values { return {(in[0].toTensor() + in[1].toTensor()) * in[2].toTensor()}; });
  const at::Tensor a = Boxed::make(numbers({3}, 1)).set_requires_grad(true),
                   b = Boxed::make(numbers({3}, 2)).set_requires_grad(true), factor = numbers({3}, 3);
  for (int call = 0; call < 2; ++call) compiled({a, b, factor})[0].toTensor().sum().backward();
  EXPECT_TRUE(same_tensor(a.grad(), Boxed::make(factor * 2)));
  EXPECT_TRUE(same_tensor(b.grad(), Boxed::make(factor * 2)));
}

TEST_F(SubclassCapture, WritesReachTheInput) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    const at::Tensor before = x * 3;
    x.mul_(2).add_(1);
    return {before + x, x};
  };
  Compiled compiled(function);
  for (int step = 0; step < 2; ++step) {
    const at::Tensor a = nested(step, false), b = nested(step, false);
    const at::Tensor memory = plain_parts(a)[1];
    const Values actual = compiled({a}), expected = function({b});
    EXPECT_TRUE(same_tensor(a, b));
    EXPECT_TRUE(plain_parts(a)[1].is_same(memory));  // written in place, not replaced
    EXPECT_TRUE(actual[1].toTensor().is_same(a));
    EXPECT_TRUE(same_tensor(actual[0].toTensor(), expected[0].toTensor()));
  }
  EXPECT_EQ(compiled.captures(), 1u);
  // With gradients: the written value is the result of a computation.
  const at::Tensor a = nested(5, true), b = nested(5, true);
  const at::Tensor one = a * 1, other = b * 1;
  const at::Tensor actual = compiled({one})[0].toTensor(), expected = function({other})[0].toTensor();
  (actual.sum() + one.sin().sum()).backward();
  (expected.sum() + other.sin().sum()).backward();
  EXPECT_TRUE(same_tensor(one.detach(), other.detach()));
  EXPECT_TRUE(same_tensor(a.grad(), b.grad()));
}

TEST_F(SubclassCapture, WritesThatCannotBeDoneNameTheInput) {
  Compiled transposes([](const Values& in) -> Values { return {in[0].toTensor().t_() * 2}; });
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { transposes({nested(1, false)}); }),
                       "input 0, Two two, changes its shape"));
  Compiled shared([](const Values& in) -> Values {
    in[0].toTensor().add_(1);
    return {in[1].toTensor() * 2};
  });
  const at::Tensor plain = numbers({3}, 1);
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                         shared({Boxed::make(plain), plain});
                       }),
                       "input 0 (Boxed) is written and shares memory with input 1"));
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                         shared({plain, Boxed::make(plain)});
                       }),
                       "input 0 (a plain tensor) is written and shares memory with input 1"));
}

TEST_F(SubclassCapture, ResultsShareMemoryWithInputs) {
  Compiled compiled([](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    return {x.t(), x, payload_as<Boxed>(x)->inner, x.sin()};
  });
  for (const bool with_grad : {false, true}) {
    const at::Tensor x = Boxed::make(numbers({2, 3}, 1)).set_requires_grad(with_grad);
    const Values results = compiled({x});
    const at::Tensor inner = payload_as<Boxed>(x)->inner;
    EXPECT_TRUE(payload_as<Boxed>(results[0].toTensor())->inner.is_alias_of(inner));
    EXPECT_TRUE(same_tensor(results[0].toTensor().detach(), x.detach().t()));
    EXPECT_TRUE(results[1].toTensor().is_same(x));
    EXPECT_TRUE(results[2].toTensor().is_alias_of(inner));
    EXPECT_FALSE(results[2].toTensor().is_same(inner));
    if (!with_grad) continue;
    results[0].toTensor().sum().backward();
    EXPECT_TRUE(same_tensor(x.grad(), Boxed::make(at::ones({2, 3}))));
  }
}

// The views of a mutated input show the write, and later writes.
TEST_F(SubclassCapture, ResultsInWrittenInputs) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor(), view = x.narrow(1, 1, 2).t();
    x.mul_(2);
    return {view, plain_parts(x)[1], view * 3};
  };
  Compiled compiled(function);
  for (int step = 0; step < 2; ++step) {
    const at::Tensor a = nested(step, false), b = nested(step, false);
    const Values actual = compiled({a}), expected = function({b});
    a.add_(1);
    b.add_(1);
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(same_tensor(actual[i].toTensor(), expected[i].toTensor())) << i;
    for (const at::Tensor& part : plain_parts(actual[0].toTensor()))
      EXPECT_TRUE(part.is_alias_of(plain_parts(a)[0]) || part.is_alias_of(plain_parts(a)[1]));
  }
  const at::Tensor a = nested(3, true), b = nested(3, true);
  const at::Tensor one = a * 1, other = b * 1;
  const at::Tensor actual = compiled({one})[0].toTensor(), expected = function({other})[0].toTensor();
  (actual.sin().sum() + one.pow(2).sum()).backward();
  (expected.sin().sum() + other.pow(2).sum()).backward();
  EXPECT_TRUE(same_tensor(a.grad(), b.grad()));
}

TEST_F(SubclassCapture, TheSameTensorTwice) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor(), y = in[1].toTensor();
    return {x * y.sin()};
  };
  Compiled compiled(function);
  const at::Tensor a = nested(1, true), b = nested(1, true);
  const at::Tensor actual = compiled({a, a})[0].toTensor(), expected = function({b, b})[0].toTensor();
  EXPECT_TRUE(same_tensor(actual.detach(), expected.detach()));
  actual.sum().backward();
  expected.sum().backward();
  EXPECT_TRUE(same_tensor(a.grad(), b.grad()));
  Compiled writes([](const Values& in) -> Values {
    in[0].toTensor().add_(1);
    return {in[1].toTensor() * 2};
  });
  const at::Tensor c = nested(2, false), d = nested(2, false);
  const at::Tensor doubled = writes({c, c})[0].toTensor();
  EXPECT_TRUE(same_tensor(c, d + 1));
  EXPECT_TRUE(same_tensor(doubled, (d + 1) * 2));
}

TEST_F(SubclassCapture, WritingWhatIsSavedIsAnError) {
  Compiled compiled([](const Values& in) -> Values { return {in[0].toTensor().sin() * in[1].toTensor()}; });
  const at::Tensor x = nested(1, true), y = nested(2, false);
  const at::Tensor result = compiled({x, y})[0].toTensor();
  y.add_(1);
  EXPECT_TRUE(
      has_text(message_of<c10::Error>([&] { result.sum().backward(); }), "modified by an inplace operation"));
  const at::Tensor again = compiled({x, y})[0].toTensor();
  again.sum().backward();
  EXPECT_THROW(again.sum().backward(), c10::Error);  // its saved tensors are freed
}

TEST_F(SubclassCapture, UnsupportedSubclassesAreNamed) {
  class Closed final : public Payload {
   public:
    explicit Closed(at::Tensor inner) : inner(std::move(inner)) {}
    std::string_view kind() const override { return "Closed"; }
    void dispatch(const c10::OperatorHandle& op, Stack*) override { refuse(op); }
    at::Tensor inner;
  };
  const at::Tensor x = numbers({3}, 1);
  Compiled compiled([](const Values& in) -> Values { return {in[0].toTensor() * 2}; });
  EXPECT_TRUE(has_text(
      message_of<NotImplemented>([&] { compiled({make_wrapper_like(c10::make_intrusive<Closed>(x), x)}); }),
      "tensor subclass Closed: it cannot be flattened"));
  // A subclass that is not an input.
  const at::Tensor outside = Boxed::make(x).set_requires_grad(true);
  Compiled closure([outside](const Values& in) -> Values { return {in[0].toTensor() * outside}; });
  EXPECT_TRUE(has_text(message_of<StateError>([&] { closure({Boxed::make(x)}); }),
                       "a tensor of kind Boxed and sizes [3] that requires a gradient"));
  // Without a gradient its inner tensors are constants.
  const at::Tensor constant = Boxed::make(x);
  Compiled constants([constant](const Values& in) -> Values { return {in[0].toTensor() * constant}; });
  EXPECT_TRUE(same_tensor(constants({Boxed::make(x)})[0].toTensor(), Boxed::make(x * x)));
}

TEST_F(SubclassCapture, FilesAndSignaturesRejectThem) {
  Compiled compiled([](const Values& in) -> Values { return {in[0].toTensor() * 2}; });
  compiled({Boxed::make(at::ones({3}))});
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                         encode_graph({compiled.joint(0), compiled.inner_meta(0), {}, {}});
                       }),
                       "a tensor subclass of kind Boxed cannot be saved"));
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { make_signature(compiled.joint(0), compiled.inner_meta(0)); }),
               "tensor subclasses"));
  EXPECT_TRUE(has_text(message_of<TypeError>([] {
                         capture_forward([](const Values& in) -> Values { return {in[0]}; },
                                         {Boxed::make(at::ones({3}))});
                       }),
                       "Boxed"));
}

TEST_F(SubclassCapture, ReportsNameEveryTensor) {
  Compiled compiled([](const Values& in) -> Values { return {in[0].toTensor() * in[1].toTensor()}; });
  compiled({nested(1, true), numbers({3, 4}, 1)});
  const std::string report =
      report_text({compiled.joint(0), compiled.inner_meta(0), compiled.partition(0).saved, {}});
  for (const char* part : {"primals_1.a.inner", "primals_1.b.inner", "primals_2", "tangents_2", "Two two"})
    EXPECT_TRUE(has_text(report, part));
}

// A module whose parameter became a subclass in place.
TEST_F(SubclassCapture, ParametersOfModules) {
  const auto make = [] {
    torch::manual_seed(3);
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Tanh(), torch::nn::Linear(3, 2));
    for (const at::Tensor& parameter : net->parameters())
      replace_data(parameter, Boxed::make(parameter.detach().clone()));
    return net;
  };
  torch::nn::Sequential eager = make(), inner = make();
  auto fast = compile(inner);
  torch::optim::SGD one(eager->parameters(), 0.1), other(fast->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = numbers({5, 4}, step);
    one.zero_grad();
    other.zero_grad();
    const at::Tensor expected = eager->forward(x), actual = fast->forward(x);
    EXPECT_TRUE(same_tensor(actual.detach(), expected.detach()));
    expected.pow(2).sum().backward();
    actual.pow(2).sum().backward();
    for (std::size_t i = 0; i < eager->parameters().size(); ++i)
      EXPECT_TRUE(same_tensor(inner->parameters()[i].grad(), eager->parameters()[i].grad())) << i;
    one.step();
    other.step();
  }
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u);
  EXPECT_EQ(compiled_entry(*fast, 0).joint(0).graph.inputs[0].name, "0.weight.inner");
  for (std::size_t i = 0; i < eager->parameters().size(); ++i)
    EXPECT_TRUE(same_tensor(inner->parameters()[i].detach(), eager->parameters()[i].detach())) << i;
}

}  // namespace subclass_capture_test
}  // namespace penstock::graph
