// Gradients of the stages of a traced pipeline equal those of the module itself, also where autograd forgets
// without an operator (data, detach_, requires_grad_) and where requires_grad changes after the trace, or it
// is refused; so are hooks that the forward sets.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/torch/experts/grouped_product.h"
#include "penstock/trace_pipeline.h"
#include "tests/has_text.h"
#include "tests/pipeline/traced_models.h"
#include "tests/throws.h"

namespace penstock {
namespace traced_gradients_test {

using test::has_text;
using test::linear;
using test::message_of;
using test::Stages;
using test::values;

at::Tensor leaf(int seed) { return values({3, 4}, seed).requires_grad_(true); }

// Two layers, and something in between.
struct Between : torch::nn::Module {
  using Compute = std::function<at::Tensor(const at::Tensor& h, Between& net)>;
  explicit Between(Compute function) : compute(std::move(function)) {
    a = register_module("a", linear(0));
    b = register_module("b", linear(1));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = a->forward(x);
    const ModuleScope scope(*a);
    return b->forward(compute(h, *this));
  }
  Compute compute;
  torch::nn::Linear a{nullptr}, b{nullptr};
};

// Undefined for what the result does not depend on.
std::vector<at::Tensor> gradients_of(const at::Tensor& y, const torch::nn::Module& net, const at::Tensor& x) {
  std::vector<at::Tensor> inputs = net.parameters();
  inputs.push_back(x);
  return torch::autograd::grad({y.square().sum()}, inputs, {}, c10::nullopt, false, /*allow_unused=*/true);
}

// The stages have the parameters of the module itself.
template <class Net>
void expect_same_gradients(const std::shared_ptr<Net>& net, const Stages& stages, const at::Tensor& x) {
  const at::Tensor expected = net->forward(x), actual = stages(x);
  EXPECT_TRUE(actual.equal(expected));
  const auto wanted = gradients_of(expected, *net, x), found = gradients_of(actual, *net, x);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(found[i].defined(), wanted[i].defined()) << "gradient " << i;
    if (wanted[i].defined()) {
      EXPECT_TRUE(at::allclose(found[i], wanted[i])) << "gradient " << i;
    }
  }
}

// -------------------------------------------------------------------------------------------------------
// history that is lost without an operator

TEST(TracedHistory, WhatAutogradForgetsStagesDoNotDifferentiate) {
  const std::vector<std::pair<const char*, Between::Compute>> forgetful = {
      {"straight-through", [](const at::Tensor& h, Between&) { return h + (h.round() - h).data(); }},
      {"detach_",
       [](const at::Tensor& h, Between&) {
         const at::Tensor gate = h.sigmoid();
         gate.detach_();
         return h * gate;
       }},
      {"the data of a parameter",
       [](const at::Tensor& h, Between& net) { return torch::linear(h, net.b->weight.data()); }},
      {"a leaf of its own",
       [](const at::Tensor& h, Between&) {
         const at::Tensor own = h.data();
         own.requires_grad_(true);
         return own * own;
       }},
      {"a parameter that is frozen for a while",
       [](const at::Tensor& h, Between& net) {
         net.b->weight.requires_grad_(false);
         const at::Tensor y = torch::linear(h, net.b->weight);
         net.b->weight.requires_grad_(true);
         return y.tanh();
       }},
      {"a write to the data",
       [](const at::Tensor& h, Between&) {
         const at::Tensor y = h * 1.5;
         y.data().mul_(2);
         return y + h;
       }},
      {"a new history after detach_",
       [](const at::Tensor& h, Between& net) {
         at::Tensor y = h.sin();
         y.detach_();
         y.mul_(net.b->weight.sum());
         return y + h;
       }},
  };
  const at::Tensor x = leaf(1);
  for (const auto& [what, compute] : forgetful) {
    SCOPED_TRACE(what);
    const auto net = std::make_shared<Between>(compute);
    const Stages stages(trace_pipeline(StageModule(net), Tree::tuple({x}), {}, PipeSplit::into(1)));
    expect_same_gradients(net, stages, x);
  }
}

// What comes from another stage has its history there.
struct Gated : torch::nn::Module {
  Gated() {
    a = register_module("a", linear(0));
    b = register_module("b", linear(1));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = a->forward(x), gate = h.tanh();
    gate.detach_();
    return b->forward(h) * gate;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

TEST(TracedHistory, ABorderBetweenATensorAndItsUse) {
  const auto net = std::make_shared<Gated>();
  const at::Tensor x = leaf(1);
  const Stages stages(trace_pipeline(StageModule(net), Tree::tuple({x}), {}, PipeSplit::at({{"b"}})));
  expect_same_gradients(net, stages, x);
}

// An ordinary detach(), and what never had a history, need no further operator.
TEST(TracedHistory, OnlyLostHistoryIsRecorded) {
  const auto net = std::make_shared<Between>([](const at::Tensor& h, Between&) {
    const at::Tensor mask = torch::zeros_like(h).data(), kept = h.detach();
    return h * (mask + kept);
  });
  const Pipe pipe = trace_pipeline(StageModule(net), Tree::tuple({leaf(1)}), {}, PipeSplit::into(1));
  const std::string text = pipe.stage_text(0);
  const std::size_t first = text.find("aten::detach");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(text.find("aten::detach", first + 1), std::string::npos) << text;
}

TEST(TracedHistory, TheHistoryOfAnotherTensorIsRefused) {
  const auto net = std::make_shared<Between>([](const at::Tensor& h, Between&) {
    h.set_data(h.round());
    return h * 2;
  });
  const std::string said = message_of<NotImplemented>(
      [&] { trace_pipeline(StageModule(net), Tree::tuple({leaf(1)}), {}, PipeSplit::into(1)); });
  EXPECT_TRUE(has_text(said, "set_data")) << said;
  EXPECT_TRUE(has_text(said, "in module 'a'")) << said;
}

// -------------------------------------------------------------------------------------------------------
// nodes that are no autograd functions

// grouped_product() makes its node itself.
TEST(TracedNodes, MadeByHandKeepTheirGradients) {
  const auto net = std::make_shared<Between>([](const at::Tensor& h, Between& layers) {
    const at::Tensor ends = at::full({1}, h.size(0), at::kInt);
    return h + grouped_product(h, layers.b->weight.t().unsqueeze(0).contiguous(), ends);
  });
  const at::Tensor x = leaf(4);
  const Stages stages(trace_pipeline(StageModule(net), Tree::tuple({x}), {}, PipeSplit::into(1)));
  expect_same_gradients(net, stages, x);
}

// -------------------------------------------------------------------------------------------------------
// requires_grad that changes after the trace

// y = x * weight with a derivative of its own.
struct ScaleFunction : torch::autograd::Function<ScaleFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1] * 1.5, (gradients[0] * saved[0]).sum(0)};
  }
};

struct Scaled : torch::nn::Module {
  Scaled() {
    embed = register_module("embed", linear(0));
    place = register_parameter("place", values({4}, 2));
    gain = register_parameter("gain", values({4}, 3));
    head = register_module("head", linear(1));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = embed->forward(x);
    if (with_place) h = h + place;
    return head->forward(ScaleFunction::apply(h, gain));
  }
  void freeze(bool frozen) {
    for (const at::Tensor& each : {embed->weight, embed->bias, gain}) each.requires_grad_(!frozen);
  }
  bool with_place = false;
  torch::nn::Linear embed{nullptr}, head{nullptr};
  at::Tensor place, gain;
};

Stages stages_of(const std::shared_ptr<Scaled>& net) {
  return Stages(trace_pipeline(StageModule(net), Tree::tuple({values({3, 4}, 1)}), {}, PipeSplit::into(1)));
}

TEST(TracedRequiresGrad, TurnedOnBelowAFunctionIsRefused) {
  for (const bool with_place : {false, true}) {
    SCOPED_TRACE(with_place);
    const auto net = std::make_shared<Scaled>();
    net->with_place = with_place;
    net->freeze(true);
    const Stages stages = stages_of(net);
    EXPECT_NO_THROW(stages(values({3, 4}, 1)));
    net->gain.requires_grad_(true);
    const std::string said = message_of<ValueError>([&] { stages(values({3, 4}, 1)); });
    EXPECT_TRUE(has_text(said, "'gain' requires a gradient")) << said;
    EXPECT_TRUE(has_text(said, "aten::mul")) << said;
    EXPECT_TRUE(has_text(said, "trace the model again")) << said;
    const at::NoGradGuard no_grad;
    EXPECT_NO_THROW(stages(values({3, 4}, 1))) << "nobody wants a gradient";
  }
}

TEST(TracedRequiresGrad, ThroughOtherOperatorsToo) {
  const auto net = std::make_shared<Scaled>();
  net->freeze(true);
  const Stages stages = stages_of(net);
  net->embed->bias.requires_grad_(true);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { stages(values({3, 4}, 1)); }), "'embed.bias'"));
  net->embed->bias.requires_grad_(false);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { stages(leaf(1)); }), "args[0] requires a gradient"));
}

// What the function takes had a gradient in the trace, too: that of `place`.
TEST(TracedRequiresGrad, TurnedOnWhereTheFunctionHasADerivative) {
  const auto net = std::make_shared<Scaled>();
  net->with_place = true;
  net->embed->weight.requires_grad_(false);
  const Stages stages = stages_of(net);
  net->embed->weight.requires_grad_(true);
  expect_same_gradients(net, stages, leaf(1));
}

TEST(TracedRequiresGrad, TurnedOff) {
  const auto net = std::make_shared<Scaled>();
  const Stages stages = stages_of(net);
  net->freeze(true);
  const at::Tensor x = values({3, 4}, 1), y = stages(x);
  EXPECT_TRUE(y.equal(net->forward(x)));
  y.sum().backward();
  EXPECT_TRUE(net->head->weight.grad().defined());
  EXPECT_FALSE(net->gain.grad().defined());
}

// -------------------------------------------------------------------------------------------------------
// hooks

struct KeepGradients final : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& results,
                                            const torch::autograd::variable_list&) override {
    return results;
  }
};

at::Tensor clamped(const at::Tensor& gradient) { return gradient.clamp(-1, 1); }

void trace_between(const std::shared_ptr<Between>& net) {
  trace_pipeline(StageModule(net), Tree::tuple({leaf(1)}), {}, PipeSplit::into(1));
}

TEST(TracedHooks, ThoseOfTheForwardAreRefused) {
  const std::vector<std::pair<const char*, Between::Compute>> hooked = {
      {"of a tensor",
       [](const at::Tensor& h, Between&) {
         h.register_hook(clamped);
         return h * 2;
       }},
      {"of a tensor that is written afterwards",
       [](const at::Tensor& h, Between&) {
         at::Tensor y = h * 2;
         y.register_hook(clamped);
         return y.add_(1);
       }},
      {"retain_grad",
       [](const at::Tensor& h, Between&) {
         h.retain_grad();
         return h * 2;
       }},
      {"of a node", [](const at::Tensor& h, Between&) {
         h.grad_fn()->add_post_hook(std::make_unique<KeepGradients>());
         return h * 2;
       }}};
  for (const auto& [what, compute] : hooked) {
    SCOPED_TRACE(what);
    const auto net = std::make_shared<Between>(compute);
    const std::string said = message_of<NotImplemented>([&] { trace_between(net); });
    EXPECT_TRUE(has_text(said, "gradient hook")) << said;
    EXPECT_TRUE(has_text(said, "in module 'a'")) << said;
  }
}

// The parameter has no hook afterwards, and can get one.
TEST(TracedHooks, OfAParameter) {
  const auto net = std::make_shared<Between>([](const at::Tensor& h, Between& of) {
    of.b->weight.register_hook(clamped);
    return h;
  });
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { trace_between(net); }), "'b.weight'"));
  net->compute = [](const at::Tensor& h, Between&) { return h; };
  int calls = 0;
  net->b->weight.register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient * 0;
  });
  const at::Tensor x = leaf(1);
  const Stages stages(trace_pipeline(StageModule(net), Tree::tuple({x}), {}, PipeSplit::into(1)));
  EXPECT_EQ(calls, 0);
  stages(x).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(net->b->weight.grad().equal(at::zeros({4, 4})));
}

}  // namespace traced_gradients_test
}  // namespace penstock
