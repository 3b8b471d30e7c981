// What check_pass() refuses: passes that are wrong on purpose, each in one way that changes numbers without
// changing the form of the graph. And what it must not refuse.
#include "penstock/graph/passes/pass_check.h"

#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/compile_options.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/passes/pass_list.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/wrap/effect_tokens.h"
#include "penstock/graph/wrap/random_numbers.h"
#include "tests/graph/call_trace.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace pass_check_test {

using test::has_text;
using test::message_of;

// ---- operators of this test ----

void tell(const at::Tensor&, std::int64_t) {}
at::Tensor send(const at::Tensor& x) { return x + 0; }
at::Tensor send_in_shape(const at::Tensor& x) { return at::empty_like(x); }

TORCH_LIBRARY_FRAGMENT(penstock_pass_check_test, library) {
  library.def("tell(Tensor x, int number) -> ()");
  library.def("send(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock_pass_check_test, CPU, library) {
  library.impl("tell", tell);
  library.impl("send", send);
}
TORCH_LIBRARY_IMPL(penstock_pass_check_test, Meta, library) {
  library.impl("tell", tell);
  library.impl("send", send_in_shape);
}

void call_tell(const at::Tensor& x, std::int64_t number) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock_pass_check_test::tell", "")
                             .typed<decltype(tell)>();
  op.call(x, number);
}
at::Tensor call_send(const at::Tensor& x) {
  static const bool registered = [] {
    register_side_effect("penstock_pass_check_test::send");
    return true;
  }();
  static_cast<void>(registered);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock_pass_check_test::send", "")
                             .typed<decltype(send)>();
  return op.call(x);
}

// ---- graphs, and passes over them ----

JointGraph capture(const std::function<Tensors(const Tensors&)>& function) {
  const at::NoGradGuard no_grad;
  return capture_function(over_tensors(function),
                          values_of({torch::full({3}, 0.5f), torch::full({3}, 0.25f)}))
      .joint;
}

// The places of the nodes of an operator.
std::vector<std::size_t> places_of(const Graph& graph, const std::string& op) {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    if (graph.nodes[i].op.operator_name().name == op) places.push_back(i);
  return places;
}

using WrongPass = std::function<void(Graph&)>;

std::string refusal(const Graph& graph, const WrongPass& pass) {
  Graph after = graph;
  pass(after);
  const std::string message = message_of<InvariantError>([&] { check_pass(graph, after, "wrong"); });
  EXPECT_TRUE(has_text(message, "the pass 'wrong' has broken the graph"));
  return message;
}

void expect_refused(const Graph& graph, const WrongPass& pass, const std::string& why) {
  EXPECT_TRUE(has_text(refusal(graph, pass), why)) << to_text(graph);
}

Tensors two_draws(const Tensors& in) {
  return {torch::bernoulli(in[0]) - torch::bernoulli(in[1]), in[0].sin(), in[1].cos()};
}

TEST(PassCheck, DrawsThatChangePlacesAreRefused) {
  const Graph graph = capture(two_draws).graph;
  const auto draws = places_of(graph, "aten::bernoulli");
  ASSERT_EQ(draws.size(), 2u) << to_text(graph);
  check_pass(graph, graph, "none");
  expect_refused(
      graph, [&](Graph& after) { std::swap(after.nodes[draws[0]], after.nodes[draws[1]]); },
      "at another place");
  // The nodes stay, what they return is exchanged.
  expect_refused(
      graph, [&](Graph& after) { std::swap(after.nodes[draws[0]].results, after.nodes[draws[1]].results); },
      "at another place");
  // Each draws in the other's place, from what the other drew from.
  expect_refused(
      graph,
      [&](Graph& after) { std::swap(after.nodes[draws[0]].arguments, after.nodes[draws[1]].arguments); },
      "at another place");
}

TEST(PassCheck, OtherDrawsAreRefused) {
  const Graph graph = capture(two_draws).graph;
  const auto draws = places_of(graph, "aten::bernoulli");
  ASSERT_EQ(draws.size(), 2u);
  const auto at = [](Graph& after, std::size_t place) {
    return after.nodes.begin() + static_cast<std::ptrdiff_t>(place);
  };
  expect_refused(
      graph,
      [&](Graph& after) {
        // Used as if it had been drawn.
        const ValueId gone = after.nodes[draws[1]].results[0].value(),
                      other = after.nodes[draws[0]].results[0].value();
        after.nodes.erase(at(after, draws[1]));
        for (Node& node : after.nodes)
          for (Operand& operand : node.arguments)
            for (ValueId& value : operand.values)
              if (value == gone) value = other;
      },
      "is missing");
  expect_refused(
      graph,
      [&](Graph& after) {
        Node again = after.nodes[draws[0]];
        again.results[0] = Operand::of(after.new_value(after[again.results[0].value()].geometry));
        after.nodes.insert(at(after, draws[0]), std::move(again));
      },
      "was added");
  const Graph halves = capture([](const Tensors& in) { return Tensors{torch::bernoulli(in[0], 0.5)}; }).graph;
  const std::size_t half = places_of(halves, "aten::bernoulli").at(0);
  expect_refused(
      halves, [&](Graph& after) { after.nodes[half].arguments[1].constant = c10::IValue(0.25); },
      "number 0 is");
  expect_refused(
      graph, [&](Graph& after) { after.nodes[draws[1]].phase = Phase::Backward; }, "number 1 is");
}

// Draws and effects are one sequence.
TEST(PassCheck, EffectsThatMoveAreRefused) {
  const Graph graph = capture([](const Tensors& in) {
                        const at::Tensor first = torch::bernoulli(in[0], 0.5), sent = call_send(in[0]);
                        call_tell(in[0], 1);
                        call_tell(in[1], 1);
                        call_tell(first, 2);
                        return Tensors{first + sent + call_send(in[1])};
                      }).graph;
  const auto sends = places_of(graph, "penstock_pass_check_test::send"),
             tells = places_of(graph, "penstock_pass_check_test::tell"),
             draws = places_of(graph, "aten::bernoulli");
  ASSERT_EQ(sends.size() + tells.size() + draws.size(), 6u) << to_text(graph);
  check_pass(graph, graph, "none");
  const auto swapped = [&](std::size_t one, std::size_t other) {
    return [=](Graph& after) { std::swap(after.nodes[one], after.nodes[other]); };
  };
  expect_refused(graph, swapped(draws[0], sends[0]), "in the same order");
  expect_refused(graph, swapped(tells[0], tells[1]), "in the same order");
  expect_refused(graph, swapped(tells[1], tells[2]), "in the same order");
  expect_refused(graph, swapped(sends[0], sends[1]), "in the same order");
  for (const std::size_t place : tells)
    expect_refused(
        graph,
        [&](Graph& after) { after.nodes.erase(after.nodes.begin() + static_cast<std::ptrdiff_t>(place)); },
        "expected");
  expect_refused(
      graph, [&](Graph& after) { after.nodes[tells[2]].arguments[1].constant = c10::IValue(3); },
      "in the same order");
}

// A call that writes two of its inputs returns what is written to each.
TEST(PassCheck, ExchangedOutputsAreRefused) {
  const Graph graph = capture([](const Tensors& in) {
                        in[0].mul_(2);
                        in[1].add_(1);
                        return Tensors{in[0].sin()};
                      }).graph;
  ASSERT_GE(graph.outputs.size(), 3u);
  expect_refused(
      graph, [](Graph& after) { std::swap(after.outputs[0], after.outputs[1]); }, "another order");
}

TEST(PassCheck, ChainsOfStatesThatChangeAreRefused) {
  JointGraph joint = capture(two_draws);
  make_random_states_explicit(joint);
  const Graph& graph = joint.graph;
  const auto draws = places_of(graph, "penstock_random::aten__bernoulli");
  ASSERT_EQ(draws.size(), 2u) << to_text(graph);
  check_pass(graph, graph, "none");
  const auto state_of = [](Node& node) -> ValueId& {
    return node.arguments[node.arguments.size() - 2].values[0];
  };
  // The second one draws first.
  expect_refused(
      graph,
      [&](Graph& after) {
        Node &first = after.nodes[draws[0]], &second = after.nodes[draws[1]];
        const ValueId given = state_of(first), between = state_of(second);
        const ValueId last = second.results.back().value();
        state_of(second) = given;
        state_of(first) = last;
        std::swap(first, second);
        for (Operand& output : after.outputs)
          if (output.value() == last) output.values[0] = between;
      },
      "of its draws and effects");
  // One of them does not draw from the chain any more.
  expect_refused(
      graph,
      [&](Graph& after) {
        Node &first = after.nodes[draws[0]], &second = after.nodes[draws[1]];
        state_of(second) = state_of(first);
      },
      "it has 1 draws and effects, expected 2");
}

TEST(PassCheck, ChainsOfTokensThatChangeAreRefused) {
  JointGraph joint = capture([](const Tensors& in) {
    call_tell(in[0], 1);
    call_tell(in[1], 2);
    return Tensors{in[0].sin()};
  });
  make_effects_explicit(joint);
  const Graph& graph = joint.graph;
  const auto tells = places_of(graph, "penstock_effect::penstock_pass_check_test__tell");
  ASSERT_EQ(tells.size(), 2u) << to_text(graph);
  check_pass(graph, graph, "none");
  expect_refused(
      graph,
      [&](Graph& after) { after.nodes[tells[1]].arguments.back() = after.nodes[tells[0]].arguments.back(); },
      "it has 1 draws and effects, expected 2");
}

// ---- what is allowed ----

TEST(PassCheck, ArgumentsOfDrawsMayBeSimplified) {
  const at::NoGradGuard no_grad;
  const Graph graph = capture([](const Tensors& in) {
                        const at::Tensor one = in[0] * 1, same = in[0].clone();
                        call_tell(one, 1);
                        call_tell(same, 1);
                        const at::Tensor drawn = torch::bernoulli(one, 0.5) + torch::bernoulli(same, 0.5);
                        return Tensors{drawn * in[1].cos() + in[1].cos()};
                      }).graph;
  const std::size_t before = graph.nodes.size();
  const Graph after = PassList(standard_passes(), /*verify=*/true).run(graph, {.role = PassRole::Inference});
  EXPECT_LT(after.nodes.size(), before);
  EXPECT_EQ(places_of(after, "aten::bernoulli").size(), 2u);
}

// A pass may make all nodes and values anew.
TEST(PassCheck, ValuesMayBeNumberedAnew) {
  const Graph graph = capture(two_draws).graph;
  Graph after = graph;
  after.values.insert(after.values.begin(), 5, after.values[0]);
  const auto move = [](std::vector<Operand>& operands) {
    for (Operand& operand : operands)
      for (ValueId& value : operand.values)
        if (value != kNoValue) value = ValueId{static_cast<std::int32_t>(value) + 5};
  };
  for (Placeholder& input : after.inputs) input.value = ValueId{static_cast<std::int32_t>(input.value) + 5};
  for (Node& node : after.nodes) {
    move(node.arguments);
    move(node.results);
  }
  move(after.outputs);
  check_pass(graph, after, "renumbering");
}

}  // namespace pass_check_test
}  // namespace penstock::graph
