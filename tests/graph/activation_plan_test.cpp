// Graphs split under an activation budget: the bits of the plain function at any budget, rules for modules,
// messages.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/partition/activation_plan.h"
#include "penstock/graph/partition/node_modules.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/torch/kernels/attention_mask.h"
#include "penstock/torch/kernels/fused_attention.h"
#include "tests/graph/budget_model.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace activation_plan_test {
namespace {

using penstock::test::has_text;
using penstock::test::message_of;
using namespace budget_model;

std::int64_t bytes_with(const ActivationPlan& plan, Activation::Fate fate, const std::string& module) {
  std::int64_t bytes = 0;
  for (const Activation& each : plan.activations)
    if (each.fate == fate && each.module.starts_with(module)) bytes += each.bytes;
  return bytes;
}

struct Outcome {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;
  at::Tensor drawn_afterwards;
};

template <class Step>
Outcome outcome_of(Model& model, const Step& step) {
  for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  const at::Tensor x = input_of_model();
  torch::manual_seed(11);
  Outcome outcome;
  outcome.loss = step(x);
  outcome.loss.backward();
  for (const at::Tensor& parameter : model->parameters()) outcome.gradients.push_back(parameter.grad());
  outcome.drawn_afterwards = torch::rand({4});
  return outcome;
}

void expect_same_step(const Outcome& actual, const Outcome& expected) {
  EXPECT_TRUE(torch::equal(actual.loss, expected.loss));
  ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
  for (std::size_t i = 0; i < expected.gradients.size(); ++i)
    EXPECT_TRUE(torch::equal(actual.gradients[i], expected.gradients[i])) << "parameter " << i;
  EXPECT_TRUE(torch::equal(actual.drawn_afterwards, expected.drawn_afterwards));
}

}  // namespace

// ---- what is saved ----

TEST(ActivationPlan, AModelHasTheSameBitsAtEveryBudget) {
  Model model(2);
  const Outcome plain = outcome_of(model, [&](const at::Tensor& x) { return model->forward(x); });
  for (const bool explicit_states : {true, false})
    for (const char* budget : {"1", "0.9", "0.5", "0.3", "0"}) {
      SCOPED_TRACE(std::string(budget) + (explicit_states ? ", explicit states" : ""));
      auto fast = compile(model, with_budget(budget, {}, explicit_states));
      for (int run = 0; run < 2; ++run)
        expect_same_step(outcome_of(model, [&](const at::Tensor& x) { return fast->forward(x); }), plain);
    }
}

TEST(ActivationPlan, KeepsTheBudgetAndIsNearlyOptimal) {
  const JointGraph joint = joint_of_model(6);
  const ActivationPlan all = plan_activations(joint, {.budget = "1"});
  EXPECT_EQ(all.cost, 0);
  EXPECT_EQ(all.bytes, all.all_bytes);
  EXPECT_EQ(all.halves.saved, partition_default(joint).saved);
  std::int64_t before = 0;
  for (const double fraction : {0.9, 0.7, 0.5, 0.3, 0.2}) {
    SCOPED_TRACE(fraction);
    const ActivationPlan plan = plan_activations(joint, {.budget = std::to_string(fraction)});
    EXPECT_LE(static_cast<double>(plan.bytes), fraction * static_cast<double>(all.bytes));
    EXPECT_GT(plan.bytes, plan.least_bytes);
    EXPECT_LE(plan.gap, 0.04);  // of the cost, as far as the bounds prove it
    EXPECT_GE(plan.cost, before);
    EXPECT_LT(plan.cost, plan.forward_cost);
    before = plan.cost;
    std::int64_t saved = 0, repeated = 0;
    for (const Activation& each : plan.activations)
      (each.fate == Activation::Fate::Saved ? saved : repeated) += each.bytes;
    EXPECT_EQ(saved, plan.bytes);
    EXPECT_GT(repeated, 0);
  }
  const ActivationPlan none = plan_activations(joint, {.budget = "0"});
  EXPECT_EQ(none.bytes, none.least_bytes);
  EXPECT_EQ(plan_activations(joint, {.budget = std::to_string(all.bytes) + " B"}).cost, 0);
  EXPECT_GT(plan_activations(joint, {.budget = std::to_string(all.bytes - 1) + " B"}).cost, 0);
}

TEST(ActivationPlan, RandomOperatorsWithoutStatesAreSaved) {
  for (const bool explicit_states : {true, false}) {
    const ActivationPlan plan = plan_activations(joint_of_model(1, explicit_states), {.budget = "0"});
    bool draws_again = false;
    for (const Activation& each : plan.activations)
      if (has_text(each.op, "dropout") || has_text(each.op, "bernoulli"))
        draws_again |= each.fate == Activation::Fate::Recomputed;
    EXPECT_EQ(draws_again, explicit_states);
    if (explicit_states) continue;
    for (const Node& node : plan.halves.backward.nodes)
      EXPECT_FALSE(is_random(node)) << node.op.operator_name().name;
  }
}

// By a fused operator where LibTorch has one, by products elsewhere.
TEST(ActivationPlan, AttentionWithoutDropoutIsRecomputed) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor q = in[0].toTensor().sin(), k = q.cos();
    return {attend(q, k, q, AttentionMask::causal(16, 16)).sum()};
  };
  const auto run = [](const std::function<Values(const Values&)>& call) {
    const at::Tensor x = torch::linspace(-1, 1, 2 * 2 * 16 * 8).view({2, 2, 16, 8}).set_requires_grad(true);
    const at::Tensor loss = call({x})[0].toTensor();
    loss.backward();
    return std::vector<at::Tensor>{loss.detach(), x.grad()};
  };
  Compiled all(function), least(function, with_budget("0", {}, /*explicit_states=*/false));
  const std::vector<at::Tensor> plain = run(function);
  for (Compiled* compiled : {&all, &least}) {
    const std::vector<at::Tensor> actual = run([&](const Values& in) { return (*compiled)(in); });
    for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(actual[i], plain[i])) << i;
  }
  std::size_t attentions = 0;
  for (const Activation& each : plan_activations(all.joint(0), {.budget = "0"}).activations) {
    if (!has_text(each.op, "attention") && !has_text(each.op, "softmax")) continue;
    ++attentions;
    EXPECT_EQ(each.fate, Activation::Fate::Recomputed) << to_text(each);
    EXPECT_NE(each.reason, Activation::Reason::RunsOnce) << to_text(each);
  }
  EXPECT_GT(attentions, 0u);
}

TEST(ActivationPlan, WhatIsRecomputedRunsJustBeforeItIsUsed) {
  const JointGraph joint = joint_of_model(4);
  const ActivationPlan plan = plan_activations(joint, {.budget = "0.3"});
  const std::set<std::size_t> of_forward(plan.origin.forward_nodes.begin(), plan.origin.forward_nodes.end());
  const std::vector<Node>& nodes = plan.halves.backward.nodes;
  std::size_t again = 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (!of_forward.contains(plan.origin.backward_nodes[i])) continue;
    ++again;
    // Between a recomputed node and the first node of backward proper, each node is recomputed, too, and that
    // node or one of them uses it.
    std::set<ValueId> made;
    for_each_value(nodes[i].results, [&](ValueId value) { made.insert(value); });
    bool used = false;
    for (std::size_t k = i + 1; k < nodes.size() && !used; ++k) {
      for_each_value(nodes[k].arguments, [&](ValueId value) { used |= made.contains(value); });
      if (!of_forward.contains(plan.origin.backward_nodes[k])) break;
    }
    EXPECT_TRUE(used) << "node " << i;
  }
  EXPECT_GT(again, 10u);
}

// ---- rules for modules ----

TEST(NodeModules, FollowParametersAndWhatIsBetweenThem) {
  const JointGraph joint = joint_of_model(2);
  const std::vector<std::string> modules = modules_of_nodes(joint);
  const auto has = [&](const std::string& op, const std::string& module) {
    for (std::size_t i = 0; i < modules.size(); ++i)
      if (modules[i] == module && has_text(joint.graph.nodes[i].op.operator_name().name, op)) return true;
    return false;
  };
  EXPECT_TRUE(has("mm", "blocks.0.attention.query"));
  EXPECT_TRUE(has("softmax", "blocks.0.attention"));
  EXPECT_TRUE(has("gelu", "blocks.1.feed"));
  EXPECT_TRUE(has("native_layer_norm", "blocks.1.second"));
  EXPECT_TRUE(has("mm", "head"));
}

TEST(ActivationPolicy, RulesDecideBeforeTheBudget) {
  const JointGraph joint = joint_of_model(2);
  const ActivationPlan mixed =
      plan_activations(joint, {.budget = "1", .policy = {"blocks.*.attention: save", "blocks: recompute"}});
  using Fate = Activation::Fate;
  EXPECT_GT(bytes_with(mixed, Fate::Saved, "blocks.0.attention"), 0);
  EXPECT_EQ(bytes_with(mixed, Fate::Recomputed, "blocks.0.attention"), 0);
  EXPECT_EQ(bytes_with(mixed, Fate::Saved, "blocks.1.feed"), 0);
  EXPECT_GT(bytes_with(mixed, Fate::Recomputed, "blocks.1.feed"), 0);
  EXPECT_EQ(bytes_with(mixed, Fate::Recomputed, "head"), 0);
  for (const Activation& each : mixed.activations) {
    if (!each.module.starts_with("blocks.0.feed")) continue;
    EXPECT_EQ(each.reason, Activation::Reason::Policy);
  }
  const ActivationPlan other = plan_activations(joint, {.budget = "0", .policy = {"blocks.1: save"}});
  EXPECT_GT(bytes_with(other, Fate::Saved, "blocks.1"), 0);
  EXPECT_EQ(bytes_with(other, Fate::Recomputed, "blocks.1"), 0);
  EXPECT_EQ(bytes_with(other, Fate::Saved, "blocks.0.feed"), 0);
  // The bits are those of the plain model.
  Model model(2);
  const Outcome plain = outcome_of(model, [&](const at::Tensor& x) { return model->forward(x); });
  for (const std::vector<std::string>& policy :
       {std::vector<std::string>{"blocks.*.attention: save", "*: recompute"},
        {"blocks.1: save"},
        {"*: recompute"}}) {
    auto fast = compile(model, with_budget("0.8", policy));
    expect_same_step(outcome_of(model, [&](const at::Tensor& x) { return fast->forward(x); }), plain);
  }
}

// ---- messages ----

TEST(ActivationPlan, ABudgetThatCannotBeMetNamesTheLeastOne) {
  const JointGraph joint = joint_of_model(2, /*explicit_states=*/false);
  const ActivationPlan least = plan_activations(joint, {.budget = "0"});
  ASSERT_GT(least.least_bytes, 0);
  const std::string refusal = message_of<ValueError>([&] { plan_activations(joint, {.budget = "1 KiB"}); });
  EXPECT_TRUE(has_text(refusal, "the activation budget, 1.0 KiB")) << refusal;
  EXPECT_TRUE(has_text(refusal, "blocks.")) << refusal;
  const std::string remedy = std::to_string(least.least_bytes) + " B";
  EXPECT_TRUE(has_text(refusal, "\"" + remedy + "\"")) << refusal;
  EXPECT_EQ(plan_activations(joint, {.budget = remedy}).bytes, least.least_bytes);
  // What a rule saves is named with the rule.
  const std::string held =
      message_of<ValueError>([&] { plan_activations(joint, {.budget = "1 KiB", .policy = {"*: save"}}); });
  EXPECT_TRUE(has_text(held, "by activation_policy")) << held;
}

TEST(ActivationPlan, WrongOptionsAreNamed) {
  const auto refusal = [](const CompileOptions& options) {
    return message_of<ValueError>([&] {
      Model model(1);
      compile(model, options)->forward(input_of_model());
    });
  };
  EXPECT_TRUE(has_text(refusal(with_budget("2")), "activations.budget: got \"2\""));
  EXPECT_TRUE(has_text(refusal(with_budget("1", {"blocks"})), "PATTERN: save"));
  EXPECT_TRUE(has_text(refusal(with_budget("1", {"block.*.feed: save"})), "did you mean \"blocks.*.feed\"?"))
      << refusal(with_budget("1", {"block.*.feed: save"}));
  CompileOptions both = with_budget("0.5");
  both.partitioner = Partitioner::MinCut;
  EXPECT_TRUE(has_text(refusal(both), "leave partitioner out"));
  // A part of a larger model need not have every module.
  CompileOptions part = with_budget("1", {"tail: save"});
  part.activations.part_of_model = true;
  Model model(1);
  EXPECT_NO_THROW(compile(model, part)->forward(input_of_model()));
}

}  // namespace activation_plan_test
}  // namespace penstock::graph
