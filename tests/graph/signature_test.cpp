// Signatures of graphs compared with what the graphs compute, and equality of the metadata they are made
// from.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <concepts>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/tools/signature.h"
#include "tests/graph/call_trace.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace signature_test {

using test::has_text;
using test::message_of;
using OverTensors = std::function<Tensors(const Tensors&)>;

// A function over the state of a module, parameters first, and the user's inputs.
struct Captured {
  Captured(const OverTensors& function, const Tensors& inputs, ModuleState module_state = {},
           std::vector<std::string> names = {}, bool keep = false)
      : state(std::move(module_state)) {
    Convention convention;
    convention.names = names.empty() ? state.names : std::move(names);
    for (std::size_t i = convention.names.size(); i < inputs.size(); ++i)
      convention.names.push_back("args[" + std::to_string(i - state.names.size()) + "]");
    meta = analyze(over_tensors(function), values_of(inputs),
                   {.keep_input_mutations = keep, .convention = convention});
    joint = capture_joint(over_tensors(function), values_of(inputs), meta, convention);
    joint.graph = functionalize(std::move(joint.graph), joint.forward_outputs);
  }
  GraphSignature signature(SignatureOptions options = {}) const {
    options.state = &state;
    return make_signature(joint, meta, options);
  }
  std::string refusal(const SignatureOptions& options = {}) const {
    return message_of<ValueError>([&] { signature(options); });
  }
  // The index of a graph output, by its name in the signature.
  std::size_t place_of(const GraphOutput& name) const {
    std::vector<std::string> seen;
    for (std::size_t i = 0; i < joint.graph.outputs.size(); ++i) {
      const std::string text = to_text(joint.graph.outputs[i]);
      const auto before = std::count(seen.begin(), seen.end(), text);
      seen.push_back(text);
      if (name.text == (before == 0 ? text : text + "." + std::to_string(before))) return i;
    }
    ADD_FAILURE() << name.text << " is no output of the graph";
    return 0;
  }

  ModuleState state;
  ViewAndMutationMeta meta;
  JointGraph joint;
};

ModuleState state_of(std::vector<std::string> parameters, const std::vector<std::string>& buffers) {
  ModuleState state;
  state.parameters = parameters.size();
  state.names = std::move(parameters);
  state.names.insert(state.names.end(), buffers.begin(), buffers.end());
  return state;
}

// y = sin(x * w + v + b), where b follows the mean of x and c counts.
const OverTensors kStep = [](const Tensors& in) {
  const at::Tensor &w = in[0], &v = in[1], &b = in[2], &x = in[3], &c = in[4];
  c.add_(1);
  b.mul_(0.5).add_(x.detach().mean(0));
  const at::Tensor y = (x * w + v + b).sin();
  return Tensors{y * c, y.sum()};
};
Tensors step_inputs() {
  return {leaf({3}), leaf({3}), leaf({3}, false), leaf({2, 3}), torch::full({1}, 4.f)};
}

// Every name refers to the tensor that the signature says.
TEST(Signature, NamesMatchWhatTheGraphComputes) {
  torch::manual_seed(1);
  const Tensors inputs = step_inputs();
  const Captured captured(kStep, cloned(inputs), state_of({"up.weight", "up.bias"}, {"mean"}));
  SignatureOptions options;
  options.loss_index = 1;
  options.in_spec = "(*, *)";
  options.out_spec = "(*, *)";
  const GraphSignature signature = captured.signature(options);

  EXPECT_EQ(signature.parameters, (std::vector{Qualified("up.weight"), Qualified("up.bias")}));
  EXPECT_EQ(signature.buffers, std::vector{Qualified("mean")});
  EXPECT_EQ(signature.user_inputs, (std::vector{GraphInput("args[0]"), GraphInput("args[1]")}));
  EXPECT_EQ(signature.inputs_to_parameters,
            (std::map<GraphInput, Qualified>{{GraphInput("up.weight"), Qualified("up.weight")},
                                             {GraphInput("up.bias"), Qualified("up.bias")}}));
  EXPECT_EQ(signature.inputs_to_buffers,
            (std::map<GraphInput, Qualified>{{GraphInput("mean"), Qualified("mean")}}));
  EXPECT_TRUE(signature.parameters_to_mutate.empty());
  EXPECT_EQ(signature.states, StateSignature());  // none: explicit_state_test.cpp
  EXPECT_EQ(signature.in_spec, "(*, *)");
  EXPECT_EQ(signature.out_spec, "(*, *)");

  // Inputs in the order: parameters, buffers, user inputs, tangents.
  std::vector<std::string> names;
  for (const Placeholder& input : captured.joint.graph.inputs) names.push_back(input.name);
  EXPECT_EQ(names, (std::vector<std::string>{"up.weight", "up.bias", "mean", "args[0]", "args[1]",
                                             "tangents_1", "tangents_2"}));

  // The plain run.
  Tensors leaves = cloned(inputs);
  for (std::size_t i = 0; i < leaves.size(); ++i)
    leaves[i] = leaves[i].detach().set_requires_grad(inputs[i].requires_grad());
  const Tensors results = kStep(leaves);
  const Tensors tangents{torch::randn({2, 3}), torch::randn({})};
  torch::autograd::backward(results, tangents);

  Tensors given;
  for (const at::Tensor& input : inputs) given.push_back(input.detach());
  given.insert(given.end(), tangents.begin(), tangents.end());
  const std::vector<c10::IValue> outputs = Executor(captured.joint.graph)(given);
  const auto output = [&](const GraphOutput& name) { return outputs[captured.place_of(name)].toTensor(); };

  // Outputs in the order: mutated inputs, results, gradients.
  ASSERT_EQ(signature.buffers_to_mutate.size(), 1u);
  EXPECT_EQ(signature.buffers_to_mutate.begin()->second, Qualified("mean"));
  EXPECT_EQ(captured.place_of(signature.buffers_to_mutate.begin()->first), 0u);
  EXPECT_TRUE(torch::equal(output(signature.buffers_to_mutate.begin()->first), leaves[2]));
  ASSERT_EQ(signature.user_inputs_to_mutate.size(), 1u);
  EXPECT_EQ(signature.user_inputs_to_mutate.begin()->second, GraphInput("args[1]"));
  EXPECT_EQ(captured.place_of(signature.user_inputs_to_mutate.begin()->first), 1u);
  EXPECT_TRUE(torch::equal(output(signature.user_inputs_to_mutate.begin()->first), leaves[4]));
  ASSERT_EQ(signature.user_outputs.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(captured.place_of(signature.user_outputs[i]), 2 + i);
    EXPECT_TRUE(torch::allclose(output(signature.user_outputs[i]), results[i])) << i;
  }
  ASSERT_TRUE(signature.backward);
  EXPECT_EQ(signature.backward->loss_output, signature.user_outputs[1]);
  ASSERT_EQ(signature.backward->gradients_to_parameters.size(), 2u);
  for (const auto& [gradient, parameter] : signature.backward->gradients_to_parameters) {
    EXPECT_TRUE(torch::allclose(output(gradient), leaves[parameter == Qualified("up.weight") ? 0 : 1].grad(),
                                1e-4, 1e-5))
        << parameter.text;
    EXPECT_GE(captured.place_of(gradient), 4u);
  }
  ASSERT_EQ(signature.backward->gradients_to_user_inputs.size(), 1u);
  EXPECT_EQ(signature.backward->gradients_to_user_inputs.begin()->second, GraphInput("args[0]"));
  EXPECT_TRUE(torch::allclose(output(signature.backward->gradients_to_user_inputs.begin()->first),
                              leaves[3].grad(), 1e-4, 1e-5));
}

TEST(Signature, KindsOfNamesAreTypesOfTheirOwn) {
  static_assert(!std::is_convertible_v<GraphInput, GraphOutput> &&
                !std::is_constructible_v<GraphOutput, GraphInput>);
  static_assert(!std::is_convertible_v<Qualified, GraphInput> &&
                !std::is_constructible_v<GraphInput, Qualified>);
  static_assert(!std::equality_comparable_with<GraphInput, GraphOutput> &&
                !std::equality_comparable_with<GraphInput, Qualified>);
  static_assert(!std::is_convertible_v<std::string, GraphInput>);
  EXPECT_EQ(GraphInput("a"), GraphInput("a"));
  EXPECT_LT(GraphInput("a"), GraphInput("b"));
}

// Inference has no gradients, and the loss defaults to the first result that requires one.
TEST(Signature, TheLossAndNoLoss) {
  const Tensors inputs = step_inputs();
  const Captured trained(kStep, cloned(inputs), state_of({"w", "v"}, {"b"}));
  EXPECT_EQ(trained.signature().backward->loss_output, trained.signature().user_outputs[0]);
  SignatureOptions options;
  options.loss_index = 2;
  EXPECT_TRUE(has_text(trained.refusal(options), "the result that is the loss"));
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(Captured(kStep, cloned(inputs), state_of({"w", "v"}, {"b"})).signature().backward);
}

// A value that is returned twice has two names.
TEST(Signature, OutputsThatAreOneValueAreNamedApart) {
  const at::NoGradGuard no_grad;
  const Captured captured(
      [](const Tensors& in) {
        const at::Tensor y = in[0].exp();
        in[1].copy_(y);
        return Tensors{y, y};
      },
      {torch::ones({2}), torch::ones({2})});
  const GraphSignature signature = captured.signature();
  ASSERT_EQ(signature.user_outputs.size(), 2u);
  EXPECT_EQ(signature.user_outputs[1].text, signature.user_outputs[0].text + ".1");
  EXPECT_EQ(captured.place_of(signature.user_outputs[1]), 2u);
}

TEST(Signature, CountsThatDoNotFitAreErrors) {
  const Captured captured(kStep, cloned(step_inputs()), state_of({"w", "v"}, {"b"}));
  const auto refusal = [&](const std::function<void(Captured&)>& spoil) {
    Captured spoiled = captured;
    spoil(spoiled);
    return spoiled.refusal();
  };
  EXPECT_TRUE(has_text(refusal([](Captured& c) { c.joint.graph.inputs.push_back(c.joint.graph.inputs[0]); }),
                       "8 inputs, of which 5 belong to the function and 2 are gradients"));
  EXPECT_TRUE(
      has_text(refusal([](Captured& c) { c.joint.graph.outputs.push_back(c.joint.graph.outputs[0]); }),
               "expected one gradient for each of 5 inputs"));
  EXPECT_TRUE(has_text(refusal([](Captured& c) { c.joint.graph.outputs.pop_back(); }),
                       "expected one gradient for each of 5 inputs"));
  EXPECT_TRUE(has_text(refusal([](Captured& c) { c.state.names.assign(6, "n"); }),
                       "the module has 6 parameters and buffers, the graph 5 inputs"));
  SignatureOptions options;
  options.hidden_outputs = 3;
  EXPECT_TRUE(has_text(captured.refusal(options), "hidden_outputs is 3, but there are only 2 results"));
}

TEST(Signature, WrittenParameters) {
  const OverTensors write = [](const Tensors& in) {
    const at::NoGradGuard no_grad;
    in[0].add_(1);
    in[2].mul_(2);
    in[1].mul_(3);
    return Tensors{in[2] + in[1]};
  };
  const Tensors inputs{leaf({3}), leaf({3}, false), leaf({3}, false)};
  {
    const at::NoGradGuard no_grad;
    const GraphSignature signature = Captured(write, cloned(inputs), state_of({"w"}, {"b"})).signature();
    ASSERT_EQ(signature.parameters_to_mutate.size(), 1u);
    EXPECT_EQ(signature.parameters_to_mutate.begin()->second, Qualified("w"));
    // In the order of the inputs, not of the writes.
    const Captured captured(write, cloned(inputs), state_of({"w"}, {"b"}));
    EXPECT_EQ(captured.place_of(signature.parameters_to_mutate.begin()->first), 0u);
    EXPECT_EQ(captured.place_of(signature.buffers_to_mutate.begin()->first), 1u);
    EXPECT_EQ(captured.place_of(signature.user_inputs_to_mutate.begin()->first), 2u);
  }
  const OverTensors trained = [](const Tensors& in) {
    {
      const at::NoGradGuard no_grad;
      in[0].add_(1);
    }
    return Tensors{in[0] * in[1]};
  };
  // A graph with backward: the new value of the parameter is an output, and its gradient is another one.
  const Captured captured(trained, {leaf({3}), leaf({3})}, state_of({"w"}, {}));
  const GraphSignature joint = captured.signature();
  ASSERT_EQ(joint.parameters_to_mutate.size(), 1u);
  EXPECT_EQ(joint.parameters_to_mutate.begin()->second, Qualified("w"));
  EXPECT_EQ(captured.place_of(joint.parameters_to_mutate.begin()->first), 0u);
  ASSERT_TRUE(joint.backward.has_value());
  ASSERT_EQ(joint.backward->gradients_to_parameters.size(), 1u);
  EXPECT_EQ(joint.backward->gradients_to_parameters.begin()->second, Qualified("w"));
  EXPECT_NE(joint.backward->gradients_to_parameters.begin()->first,
            joint.parameters_to_mutate.begin()->first);
  SignatureOptions checked{.state = &captured.state};
  checked.joint_checks = true;
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { make_signature(captured.joint, captured.meta, checked); }),
               "parameter w, which requires a gradient, is written in a graph with backward"));
}

TEST(Signature, UnsupportedWritesAreErrors) {
  const at::NoGradGuard no_grad;
  const OverTensors write = [](const Tensors& in) { return Tensors{in[0].mul_(2) + 1}; };
  EXPECT_TRUE(has_text(Captured(write, {torch::ones({2})}, {}, {}, /*keep=*/true).refusal(),
                       "args[0] is written inside the graph"));
  EXPECT_TRUE(has_text(
      Captured([](const Tensors& in) { return Tensors{in[0].t_() + 1}; }, {torch::ones({2, 3})}).refusal(),
      "only the shape of args[0] is changed"));
  EXPECT_TRUE(has_text(
      Captured([](const Tensors& in) { return Tensors{in[0].view({6})}; }, {torch::ones({2, 3})}).refusal(),
      "result 0 is made at run time"));
}

// Inputs are identified by position. The user's input has the name of a buffer.
TEST(Signature, AnInputNamedLikeABufferIsNotTakenForIt) {
  const at::NoGradGuard no_grad;
  const Captured captured([](const Tensors& in) { return Tensors{in[1].add_(1) * in[0]}; },
                          {torch::ones({2}), torch::ones({2})}, state_of({}, {"count"}), {"count", "count"});
  const GraphSignature signature = captured.signature();
  EXPECT_TRUE(signature.buffers_to_mutate.empty());
  ASSERT_EQ(signature.user_inputs_to_mutate.size(), 1u);
  EXPECT_EQ(signature.buffers, std::vector{Qualified("count")});
  const Captured other([](const Tensors& in) { return Tensors{in[0].add_(1) * in[1]}; },
                       {torch::ones({2}), torch::ones({2})}, state_of({}, {"count"}), {"count", "count"});
  EXPECT_EQ(other.signature().buffers_to_mutate.size(), 1u);
  EXPECT_TRUE(other.signature().user_inputs_to_mutate.empty());
}

TEST(Metadata, EqualityIsThatOfTheStatedFields) {
  const OverTensors function = [](const Tensors& in) {
    in[0].mul_(2);
    const at::Tensor y = in[0].exp();
    return Tensors{y.view({6}), y.t(), in[1].select(0, 1), in[0].sum()};
  };
  const auto analyzed = [&] {
    return analyze(over_tensors(function), values_of({leaf({2, 3}).clone(), leaf({2, 3})}));
  };
  const ViewAndMutationMeta meta = analyzed();
  ASSERT_EQ(meta, analyzed());
  ASSERT_EQ(meta.tangents.size(), 3u);
  const auto differs = [&](const char* what, const std::function<void(ViewAndMutationMeta&)>& change) {
    ViewAndMutationMeta changed = meta;
    change(changed);
    EXPECT_NE(changed, meta) << what;
    EXPECT_FALSE(changed.same_in_every_field(meta)) << what;
  };
  // Fields that equality ignores.
  const auto ignored = [&](const char* what, const std::function<void(ViewAndMutationMeta&)>& change) {
    ViewAndMutationMeta changed = meta;
    change(changed);
    EXPECT_EQ(changed, meta) << what;
    EXPECT_FALSE(changed.same_in_every_field(meta)) << what;
  };
  const auto flip = [](bool& flag) { flag = !flag; };
  differs("is_leaf", [&](auto& m) { flip(m.inputs[0].is_leaf); });
  differs("mutates_data", [&](auto& m) { flip(m.inputs[1].mutates_data); });
  differs("mutates_metadata", [&](auto& m) { flip(m.inputs[1].mutates_metadata); });
  differs("mutations_hidden_from_autograd",
          [&](auto& m) { flip(m.inputs[0].mutations_hidden_from_autograd); });
  differs("mutations_under_no_grad", [&](auto& m) { flip(m.inputs[0].mutations_under_no_grad); });
  differs("mutates_storage_metadata", [&](auto& m) { flip(m.inputs[0].mutates_storage_metadata); });
  differs("resizes_storage", [&](auto& m) { flip(m.inputs[0].resizes_storage); });
  differs("requires_grad of an input", [&](auto& m) { flip(m.inputs[0].requires_grad); });
  differs("keep_input_mutations of an input", [&](auto& m) { flip(m.inputs[0].keep_input_mutations); });
  differs("number of inputs", [&](auto& m) { m.inputs.pop_back(); });
  differs("kind of a result", [&](auto& m) { m.outputs[0].kind = OutputKind::NonAlias; });
  differs("type of a result", [&](auto& m) { m.outputs[3].type = OutputType::Int; });
  differs("base of a result", [&](auto& m) { m.outputs[2].base_index = 0; });
  differs("requires_grad of a result", [&](auto& m) { flip(m.outputs[3].requires_grad); });
  differs("layout of a result", [&](auto& m) { m.outputs[3].geometry.storage_offset = 1; });
  differs("conjugation of a result", [&](auto& m) { flip(m.outputs[3].geometry.conjugated); });
  differs("steps of a view", [&](auto& m) { m.outputs[2].view.steps.clear(); });
  differs("dynamic dims of a result", [&](auto& m) { m.outputs[3].dynamic_dims.push_back(0); });
  differs("number of results", [&](auto& m) { m.outputs.pop_back(); });
  differs("bases", [&](auto& m) { ++m.intermediate_bases; });
  differs("keep_input_mutations", [&](auto& m) { flip(m.keep_input_mutations); });
  differs("explicit random states", [&](auto& m) { flip(m.explicit_random_states); });
  differs("number of random states", [&](auto& m) { m.random_states = {"cpu"}; });
  differs("backward tokens", [&](auto& m) { m.backward_tokens = 1; });
  differs("number of tangents", [&](auto& m) { m.tangents.pop_back(); });
  differs("sizes of a tangent", [&](auto& m) { m.tangents[0].geometry.sizes[0] = 7; });
  differs("dtype of a tangent", [&](auto& m) { m.tangents[0].geometry.dtype = at::kDouble; });
  ignored("strides of a tangent", [&](auto& m) { m.tangents[0].geometry.strides[0] = 7; });
  ignored("what a tangent belongs to", [&](auto& m) { ++m.tangents[0].index; });
  ignored("grad mode afterwards", [&](auto& m) { m.grad_mode_after = false; });
  ignored("symbols of backward", [&](auto& m) { ++m.symbols_for_backward; });
  ignored("tokens", [&](auto& m) { m.tokens = {"ordered"}; });
  ignored("random states of backward", [&](auto& m) { m.backward_random_states = 1; });
}

TEST(Metadata, WhatAFunctionDoesToItsInputs) {
  const auto info = [](const OverTensors& function, const at::Tensor& input, bool keep = false) {
    return analyze(over_tensors(function), values_of({input}), {.keep_input_mutations = keep}).inputs.at(0);
  };
  const at::Tensor plain = torch::ones({2, 3}), computed = leaf({2, 3}).clone();
  const InputInfo read = info([](const Tensors& in) { return Tensors{in[0] * 2}; }, leaf({2, 3}));
  EXPECT_TRUE(read.is_leaf && read.requires_grad);
  EXPECT_FALSE(read.mutates_data || read.mutates_metadata || read.mutations_under_no_grad ||
               read.resizes_storage || read.mutates_storage_metadata);
  const InputInfo written = info([](const Tensors& in) { return Tensors{in[0].mul_(2)}; }, computed);
  EXPECT_TRUE(written.mutates_data && !written.is_leaf && !written.mutations_hidden_from_autograd &&
              !written.mutations_under_no_grad);
  const InputInfo turned = info([](const Tensors& in) { return Tensors{in[0].t_()}; }, computed);
  EXPECT_TRUE(turned.mutates_metadata && !turned.mutates_data);
  const InputInfo unseen = info(
      [](const Tensors& in) {
        const at::NoGradGuard no_grad;
        return Tensors{in[0].add_(1)};
      },
      computed);
  EXPECT_TRUE(unseen.mutates_data && unseen.mutations_under_no_grad);
  EXPECT_EQ(info([](const Tensors& in) { return Tensors{in[0].add_(1)}; }, plain, true).mutation_type(),
            MutationType::MutatedInGraph);
  EXPECT_EQ(info([](const Tensors& in) { return Tensors{in[0].add_(1)}; }, plain).mutation_type(),
            MutationType::MutatedOutOfGraph);
}

// set_ and resize_ are done after the graph has run, whatever the graph may write itself.
TEST(Metadata, OtherMemoryIsGivenAfterTheGraph) {
  for (const bool keep : {false, true}) {
    InputInfo info;
    info.keep_input_mutations = keep;
    info.mutates_storage_metadata = info.mutates_metadata = true;
    info.validate(0);
    EXPECT_EQ(info.mutation_type(), MutationType::MutatedOutOfGraph);
    InputInfo resized;
    resized.keep_input_mutations = keep;
    resized.resizes_storage = true;
    resized.validate(0);
    EXPECT_EQ(resized.mutation_type(), MutationType::MutatedOutOfGraph);
  }
}

}  // namespace signature_test
}  // namespace penstock::graph
