// Graphs split under an activation budget: the bits of the plain function at any budget, rules for modules,
// messages, and the predicted memory against the measured one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/partition/activation_plan.h"
#include "penstock/graph/partition/node_modules.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/graph/run/step_memory.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/pass_program.h"
#include "tests/graph/program_paths.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace activation_plan_test {
namespace {

using penstock::test::has_text;
using penstock::test::message_of;

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 200;
}

// ---- a small model ----

constexpr std::int64_t kWidth = 32, kHeads = 4, kRows = 4, kLength = 48;

struct FeedImpl : torch::nn::Module {
  FeedImpl()
      : up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Feed);

struct AttentionImpl : torch::nn::Module {
  AttentionImpl()
      : query(register_module("query", torch::nn::Linear(kWidth, kWidth))),
        key(register_module("key", torch::nn::Linear(kWidth, kWidth))),
        value(register_module("value", torch::nn::Linear(kWidth, kWidth))),
        output(register_module("output", torch::nn::Linear(kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](torch::nn::Linear& of) {
      return of(x).view({x.size(0), x.size(1), kHeads, -1}).transpose(1, 2);
    };
    const at::Tensor scores = torch::matmul(heads(query), heads(key).transpose(-2, -1)) * 0.25;
    const at::Tensor mixed =
        torch::matmul(torch::dropout(torch::softmax(scores, -1), 0.1, true), heads(value));
    return output(mixed.transpose(1, 2).reshape(x.sizes()));
  }
  torch::nn::Linear query, key, value, output;
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : first(register_module("first", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        attention(register_module("attention", Attention())),
        second(register_module("second", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        feed(register_module("feed", Feed())) {}
  at::Tensor forward(at::Tensor x) {
    x = x + attention->forward(first(x));
    return x + torch::dropout(feed->forward(second(x)), 0.1, true);
  }
  torch::nn::LayerNorm first;
  Attention attention;
  torch::nn::LayerNorm second;
  Feed feed;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int layers) {
    torch::manual_seed(3);
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < layers; ++i) blocks->push_back(Block());
    head = register_module("head", torch::nn::Linear(kWidth, 8));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::log_softmax(head(x), -1).select(-1, 2).neg().mean();
  }
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

at::Tensor input_of_model() {
  torch::manual_seed(5);
  return torch::randn({kRows, kLength, kWidth});
}

CompileOptions with_budget(const std::string& budget, std::vector<std::string> policy = {},
                           bool explicit_states = true) {
  return {.activations = {.budget = budget, .policy = std::move(policy)},
          .explicit_random_states = explicit_states};
}

// The joint graph of the model, with its random states as arguments or not.
JointGraph joint_of_model(int layers, bool explicit_states = true) {
  Model model(layers);
  auto fast = compile(model, with_budget("1", {}, explicit_states));
  fast->forward(input_of_model());
  return compiled_entry(*fast, 0).joint(0);
}

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
    EXPECT_LE(plan.gap, 0.02);
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
    bool draws_again = false, keeps = false;
    for (const Activation& each : plan.activations)
      if (has_text(each.op, "dropout") || has_text(each.op, "bernoulli")) {
        draws_again |= each.fate == Activation::Fate::Recomputed;
        keeps |= each.fate == Activation::Fate::Saved && each.reason == Activation::Reason::RunsOnce;
      }
    EXPECT_EQ(draws_again, explicit_states);
    EXPECT_EQ(keeps, !explicit_states);
  }
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
  EXPECT_TRUE(has("addmm", "blocks.0.attention.query"));
  EXPECT_TRUE(has("softmax", "blocks.0.attention"));
  EXPECT_TRUE(has("gelu", "blocks.1.feed"));
  EXPECT_TRUE(has("native_layer_norm", "blocks.1.second"));
  EXPECT_TRUE(has("addmm", "head"));
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
    if (each.module.starts_with("blocks.0.feed")) EXPECT_EQ(each.reason, Activation::Reason::Policy);
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
    auto fast = compile(model, with_budget("0.6", policy));
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
  EXPECT_TRUE(has_text(refusal, "must run once")) << refusal;
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

// ---- memory ----

// Of a step of the compiled model, without its parameters and inputs; their gradients are part of it.
std::int64_t measured_peak(Model& model, const CompileOptions& options) {
  auto fast = compile(model, options);
  const at::Tensor x = input_of_model();
  std::int64_t peak = 0;
  for (int run = 0; run < 3; ++run) {
    for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    const std::int64_t before = cpu_memory().live;
    reset_cpu_peak();
    fast->forward(x).backward();
    peak = cpu_memory().peak - before;
  }
  return peak;
}

TEST(StepMemory, ThePredictedPeakIsTheMeasuredOne) {
  count_cpu_memory();
  Model model(4);
  const JointGraph joint = joint_of_model(4);
  std::int64_t largest = 0, smallest = 0;
  for (const char* budget : {"1", "0.7", "0.4", "0.2", "0"}) {
    SCOPED_TRACE(budget);
    const StepMemory step = memory_of_step(joint, plan_activations(joint, {.budget = budget}));
    // As it runs: with its passes, which the joint graph has gone through.
    const auto measured = static_cast<double>(measured_peak(model, with_budget(budget)));
    const auto predicted = static_cast<double>(step.peak_bytes());
    EXPECT_NEAR(predicted / measured, 1, 0.05) << predicted << " predicted, " << measured << " measured";
    if (std::string(budget) == "1") largest = step.peak_bytes();
    if (std::string(budget) == "0.2") smallest = step.peak_bytes();
  }
  EXPECT_LT(smallest, largest * 2 / 3);
}

TEST(StepMemory, TensorsAddUpToWhatIsLive) {
  const JointGraph joint = joint_of_model(2);
  for (const char* budget : {"1", "0.4"}) {
    const ActivationPlan plan = plan_activations(joint, {.budget = budget});
    const StepMemory step = memory_of_step(joint, plan);
    ASSERT_EQ(step.live.size(), step.nodes.size());
    std::vector<std::int64_t> sum(step.live.size(), 0);
    std::int64_t saved = 0;
    bool has_recomputed = false;
    for (const StepTensor& tensor : step.tensors) {
      for (std::size_t i = tensor.first; i <= tensor.last; ++i) sum[i] += tensor.bytes;
      saved += tensor.kind == StepTensor::Kind::Saved ? tensor.bytes : 0;
      has_recomputed |= tensor.kind == StepTensor::Kind::Recomputed;
    }
    // Results that are dropped at once are not listed; gradients of results exist from the loss on.
    std::size_t different = 0;
    for (std::size_t i = 0; i < sum.size(); ++i) {
      EXPECT_LE(sum[i], step.live[i]) << i;
      different += sum[i] != step.live[i] ? 1 : 0;
    }
    EXPECT_LT(different * 5, sum.size());
    EXPECT_EQ(saved, plan.bytes);
    EXPECT_EQ(has_recomputed, plan.cost > 0);
  }
}

// ---- random programs ----

std::string random_budget(unsigned seed) {
  constexpr const char* kBudgets[] = {"0", "0", "0.1", "0.25", "0.4", "0.5", "0.7", "0.9", "200 B", "1"};
  return kBudgets[seed * 7919U % 10U];
}

// A call at a budget, or at the least one if that cannot be met.
CallOfProgram call_at(const Function& function, CompileOptions options, std::size_t* recomputing = nullptr) {
  const auto compiled = std::make_shared<std::optional<Compiled>>();
  return [=](const Values& inputs) mutable {
    if (!*compiled) compiled->emplace(function, options);
    try {
      (*compiled)->prepare(inputs);
    } catch (const ValueError& error) {
      if (!has_text(error.what(), "the activation budget")) throw;
      options.activations.budget = "0";
      compiled->emplace(function, options);
    }
    Values results = (**compiled)(inputs);
    if (recomputing && (*compiled)->captures() > 0) {
      const std::size_t last = (*compiled)->captures() - 1;
      const JointGraph& joint = (*compiled)->joint(last);
      if (!joint.tangents.empty() && options.activations.decide() &&
          plan_activations(joint, options.activations).cost > 0)
        ++*recomputing;
    }
    return results;
  };
}

TEST(RandomBudgets, OverAnyProgram) {
  const auto next = std::make_shared<unsigned>(0);
  const PathUnderTest path{"random budgets",
                           [next](const Function& function, const CompileOptions& given) -> CallOfProgram {
                             CompileOptions options = given;
                             options.partitioner = Partitioner::Default;
                             options.activations.budget = random_budget(*next);
                             options.explicit_random_states = *next % 2 == 0;
                             ++*next;
                             return call_at(function, options);
                           }};
  EXPECT_GE(compare_random_programs(path, {.first = 400000, .programs = programs()}) * 4, programs());
}

// Programs with dropout: results of the plain run, and gradients of a capture that saves everything, bit for
// bit.
TEST(RandomBudgets, ProgramsThatDraw) {
  const WarningCapture silent;
  unsigned legal = 0;
  std::size_t recomputing = 0;
  for (unsigned seed = 0; seed < programs() && !::testing::Test::HasFailure(); ++seed) {
    const Function function = over_tensors([seed](const Tensors& in) { return pass_program(seed, in); });
    torch::manual_seed(seed);
    const Tensors leaves{torch::randn({3, 4}).set_requires_grad(true),
                         torch::randn({4}).set_requires_grad(seed % 2 == 0), torch::randint(-3, 4, {2, 3})};
    const auto prepare = [](const Tensors& fresh) { return cloned(fresh); };
    CompileOptions options{.explicit_random_states = seed % 3 != 0};
    SCOPED_TRACE("program " + std::to_string(seed) + " at " + random_budget(seed));
    Trace expected, plain;
    try {
      expected = trace_of(function, leaves, prepare);
    } catch (const c10::Error&) {
      continue;
    }
    try {
      plain = trace_of(call_at(function, options), leaves, prepare);
    } catch (const NotImplemented&) {
      continue;
    } catch (const std::exception& error) {
      // A function whose own backward throws cannot be captured.
      if (!expected.refused) ADD_FAILURE() << error.what();
      continue;
    }
    ++legal;
    options.activations.budget = random_budget(seed);
    const CallOfProgram call = call_at(function, options, &recomputing);
    for (int run = 0; run < 2; ++run) {
      const Trace actual = trace_of(call, leaves, prepare);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same(actual.inputs, expected.inputs, "input");
      EXPECT_EQ(actual.refused, plain.refused);
      expect_same(actual.gradients, plain.gradients, "gradient");
    }
  }
  EXPECT_GE(legal * 2, programs());
  EXPECT_GE(recomputing, programs() / 4) << "hardly anything is recomputed";
}

}  // namespace activation_plan_test
}  // namespace penstock::graph
