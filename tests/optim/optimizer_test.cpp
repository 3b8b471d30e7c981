// AdamW and SGD against torch::optim, and on distributed parameters against one process; state by name;
// invalid input.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/gradients.h"
#include "penstock/optimizer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::optim {
namespace optimizer_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;

const std::vector<std::vector<std::int64_t>> kShapes{{7, 5}, {13}, {3, 4, 5}, {6, 3}, {}, {1, 1}};

at::Tensor numbers(at::IntArrayRef shape, int seed, at::ScalarType dtype = at::kFloat) {
  const std::int64_t count = c10::multiply_integers(shape);
  return (at::arange(count, at::kDouble) * 1.7 + seed * 0.37).sin().add(0.1).reshape(shape).to(dtype);
}

std::vector<NamedParameter> make(at::ScalarType dtype = at::kFloat) {
  std::vector<NamedParameter> result;
  for (std::size_t i = 0; i < kShapes.size(); ++i)
    result.push_back(
        {"p" + std::to_string(i), numbers(kShapes[i], static_cast<int>(i), dtype).set_requires_grad(true)});
  return result;
}

// Parameter 3 has a gradient only in every third step.
void set_gradients(const std::vector<NamedParameter>& parameters, int step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor p = parameters[i].tensor;
    p.mutable_grad() =
        i == 3 && step % 3
            ? at::Tensor()
            : numbers(p.sizes(), 100 * step + static_cast<int>(i), p.scalar_type()) * (1 + step % 4);
  }
}

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> result;
  for (const NamedParameter& parameter : parameters) result.push_back(parameter.tensor);
  return result;
}

// 20 steps of both; the learning rate changes in between.
void compare(Optimizer& ours, torch::optim::Optimizer& theirs, const std::vector<NamedParameter>& own,
             const std::vector<NamedParameter>& other, double rtol) {
  for (int step = 0; step < 20; ++step) {
    if (step == 10) {
      ours.set_lr(0.005);
      for (auto& group : theirs.param_groups())
        if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(&group.options()))
          adamw->lr(0.005);
        else
          dynamic_cast<torch::optim::SGDOptions&>(group.options()).lr(0.005);
    }
    set_gradients(own, step);
    set_gradients(other, step);
    ours.step();
    theirs.step();
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    EXPECT_FALSE(
        at::equal(own[i].tensor, numbers(kShapes[i], static_cast<int>(i), own[i].tensor.scalar_type())))
        << own[i].name << " did not move";
    if (rtol == 0)
      EXPECT_TRUE(at::equal(own[i].tensor, other[i].tensor)) << own[i].name << "\n"
                                                             << own[i].tensor << other[i].tensor;
    else
      EXPECT_TRUE(at::allclose(own[i].tensor, other[i].tensor, rtol, rtol))
          << own[i].name << " " << (own[i].tensor - other[i].tensor).abs().max();
  }
}

TEST(AdamW, BitsOfTorchByForeachOperators) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto own = make(dtype), other = make(dtype);
    AdamW ours(own, {.lr = 0.02, .weight_decay = 0.1, .kernels = Kernels::Foreach});
    torch::optim::AdamW theirs(tensors_of(other), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    compare(ours, theirs, own, other, 0);
  }
}

TEST(AdamW, NearTorchByOneKernel) {
  const auto own = make(), other = make();
  AdamW ours(own, {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1});
  torch::optim::AdamW theirs(tensors_of(other),
                             torch::optim::AdamWOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1));
  compare(ours, theirs, own, other, 2e-6);
}

TEST(AdamW, GroupsHaveTheirOwnRateAndDecay) {
  const auto own = make(), other = make();
  AdamW ours({{.parameters = {own[0], own[1], own[2]}, .lr_scale = 0.5},
              {.parameters = {own[3], own[4], own[5]}, .weight_decay = 0.0}},
             {.lr = 0.02, .weight_decay = 0.1, .kernels = Kernels::Foreach});
  const auto there = tensors_of(other);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(
      std::vector<at::Tensor>{there[0], there[1], there[2]},
      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.01).weight_decay(0.1)));
  groups.emplace_back(
      std::vector<at::Tensor>{there[3], there[4], there[5]},
      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.02).weight_decay(0.0)));
  torch::optim::AdamW theirs(groups);
  for (int step = 0; step < 5; ++step) {
    set_gradients(own, step);
    set_gradients(other, step);
    ours.step();
    theirs.step();
  }
  for (std::size_t i = 0; i < own.size(); ++i) EXPECT_TRUE(at::equal(own[i].tensor, other[i].tensor)) << i;
}

TEST(SGD, BitsOfTorchByForeachOperatorsAndNearByOneKernel) {
  struct Case {
    double momentum;
    bool nesterov;
    double decay;
  };
  for (const Case& c : {Case{0, false, 0}, Case{0, false, 0.1}, Case{0.9, false, 0.1}, Case{0.9, true, 0},
                        Case{0.5, true, 0.1}})
    for (const Kernels kernels : {Kernels::Foreach, Kernels::Auto}) {
      const auto own = make(), other = make();
      SGD ours(own, {.lr = 0.02,
                     .momentum = c.momentum,
                     .nesterov = c.nesterov,
                     .weight_decay = c.decay,
                     .kernels = kernels});
      torch::optim::SGD theirs(
          tensors_of(other),
          torch::optim::SGDOptions(0.02).momentum(c.momentum).nesterov(c.nesterov).weight_decay(c.decay));
      compare(ours, theirs, own, other, kernels == Kernels::Foreach ? 0 : 1e-5);
    }
}

TEST(SGD, DecoupledDecayShrinksTheParameterAlone) {
  for (const Kernels kernels : {Kernels::Foreach, Kernels::Auto}) {
    at::Tensor p = at::full({3}, 2.0).set_requires_grad(true);
    SGD sgd({NamedParameter{"p", p}},
            {.lr = 0.5, .momentum = 0.5, .weight_decay = 0.25, .decoupled = true, .kernels = kernels});
    p.mutable_grad() = at::ones({3});
    sgd.step();  // 2 * 0.875 - 0.5
    EXPECT_TRUE(at::equal(p, at::full({3}, 1.25)));
    sgd.step();  // 1.25 * 0.875 - 0.5 * 1.5
    EXPECT_TRUE(at::equal(p, at::full({3}, 0.34375)));
  }
}

// Bits do not depend on where a tensor begins, how long it is or how many threads there are.
TEST(OneKernel, BitsDoNotDependOnTheSplit) {
  const at::Tensor whole = numbers({100'003}, 1), gradient = numbers({100'003}, 2);
  const auto run = [&](const std::vector<std::int64_t>& cuts, bool adamw) {
    std::vector<NamedParameter> parameters;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      at::Tensor p = whole.slice(0, cuts[i], cuts[i + 1]).clone().set_requires_grad(true);
      p.mutable_grad() = gradient.slice(0, cuts[i], cuts[i + 1]);
      parameters.push_back({std::to_string(i), p});
    }
    std::unique_ptr<Optimizer> optimizer;
    if (adamw)
      optimizer = std::make_unique<AdamW>(parameters);
    else
      optimizer = std::make_unique<SGD>(parameters,
                                        SGDOptions{.momentum = 0.9, .nesterov = true, .weight_decay = 0.1});
    for (int step = 0; step < 3; ++step) optimizer->step();
    return at::cat(tensors_of(parameters)).detach();
  };
  for (const bool adamw : {true, false}) {
    const at::Tensor expected = run({0, 100'003}, adamw);
    EXPECT_TRUE(at::equal(run({0, 1, 4, 50'000, 50'001, 99'999, 100'003}, adamw), expected));
    const int threads = at::get_num_threads();
    at::set_num_threads(2);
    EXPECT_TRUE(at::equal(run({0, 100'003}, adamw), expected));
    at::set_num_threads(threads);
  }
}

TEST(Optimizer, OddLayoutsOfMemory) {
  const auto run = [](bool odd, Kernels kernels) {
    at::Tensor p = numbers({4, 6}, 0), q = numbers({4, 3}, 1),
               empty = at::zeros({0, 3}).set_requires_grad(true);
    if (odd) p = p.t().contiguous().t(), q = at::zeros({4, 6}).slice(1, 0, 6, 2).copy_(q);
    p.set_requires_grad(true), q.set_requires_grad(true);
    AdamW adamw({NamedParameter{"p", p}, {"q", q}, {"empty", empty}}, {.kernels = kernels});
    for (int step = 0; step < 3; ++step) {
      p.mutable_grad() =
          odd ? numbers({4, 1}, step).expand({4, 6}) : numbers({4, 1}, step).expand({4, 6}).contiguous();
      q.mutable_grad() = numbers({4, 3}, step);
      empty.mutable_grad() = at::zeros({0, 3});
      adamw.step();
    }
    return at::cat({p.reshape({-1}), q.reshape({-1})}).detach();
  };
  const at::Tensor expected = run(false, Kernels::Foreach);
  for (const bool odd : {false, true})
    for (const Kernels kernels : {Kernels::Foreach, Kernels::Auto})
      EXPECT_TRUE(at::allclose(run(odd, kernels), expected, 1e-6, 1e-7)) << odd;
}

TEST(Optimizer, ABackwardThatStillNeedsTheOldValueNoticesTheStep) {
  for (const Kernels kernels : {Kernels::Foreach, Kernels::Auto}) {
    at::Tensor p = numbers({4}, 0).set_requires_grad(true);
    const at::Tensor loss = (p * p).sum();
    AdamW adamw({NamedParameter{"p", p}}, {.kernels = kernels});
    p.mutable_grad() = at::ones({4});
    adamw.step();
    EXPECT_THROW(loss.backward(), c10::Error);
  }
}

TEST(Optimizer, TiedParametersAreSteppedOnce) {
  at::Tensor p = numbers({4, 2}, 0).set_requires_grad(true),
             alone = numbers({4, 2}, 0).set_requires_grad(true);
  AdamW tied({NamedParameter{"embed.weight", p}, {"head.weight", p}}),
      single({NamedParameter{"embed.weight", alone}});
  p.mutable_grad() = numbers({4, 2}, 1);
  alone.mutable_grad() = numbers({4, 2}, 1);
  tied.step();
  single.step();
  EXPECT_TRUE(at::equal(p, alone));
  ASSERT_EQ(tied.parameters().size(), 1u);
  EXPECT_EQ(tied.state().steps, (std::vector<NamedSteps>{{"optimizer.embed.weight.step", 1}}));
}

TEST(Optimizer, DecayGroups) {
  const auto p = [](std::string name, at::IntArrayRef shape) {
    return NamedParameter{std::move(name), at::zeros(shape)};
  };
  const auto groups = decay_groups({p("embed.weight", {4, 2}), p("blocks.0.attention_norm.weight", {2}),
                                    p("blocks.0.attention.query.weight", {2, 2}), p("x.bias", {2, 2}),
                                    p("y.layernorm.weight", {2, 2}), p("biased", {2, 2}), p("scale", {})});
  ASSERT_EQ(groups.size(), 2u);
  const auto names = [](const ParameterGroup& group) {
    std::string text;
    for (const NamedParameter& parameter : group.parameters) text += parameter.name + " ";
    return text;
  };
  EXPECT_EQ(names(groups[0]), "embed.weight blocks.0.attention.query.weight biased ");
  EXPECT_EQ(names(groups[1]), "blocks.0.attention_norm.weight x.bias y.layernorm.weight scale ");
  EXPECT_FALSE(groups[0].weight_decay);
  EXPECT_EQ(groups[1].weight_decay, 0.0);
  EXPECT_EQ(decay_groups({p("w", {2, 2})}).size(), 1u);
}

TEST(Optimizer, ZeroGrad) {
  at::Tensor p = at::ones({2}).set_requires_grad(true);
  AdamW adamw({NamedParameter{"p", p}});
  p.mutable_grad() = at::ones({2});
  adamw.zero_grad(false);
  EXPECT_TRUE(at::equal(p.grad(), at::zeros({2})));
  adamw.zero_grad();
  EXPECT_FALSE(p.grad().defined());
  adamw.step();
  EXPECT_TRUE(at::equal(p, at::ones({2})));
  EXPECT_TRUE(adamw.state().tensors.empty());
}

// State saved after 5 steps continues for 5 more with the same bits, by load_state and by reading into the
// tensors.
TEST(OptimizerState, ContinuesBitwise) {
  for (const bool adamw : {true, false}) {
    const auto maker = [adamw](const std::vector<NamedParameter>& parameters) -> std::unique_ptr<Optimizer> {
      if (adamw) return std::make_unique<AdamW>(parameters);
      return std::make_unique<SGD>(parameters, SGDOptions{.momentum = 0.9});
    };
    const auto straight = make();
    const auto first = maker(straight);
    OptimizerState saved;
    std::vector<at::Tensor> values;
    for (int step = 0; step < 10; ++step) {
      if (step == 5) {
        saved = first->state();
        for (NamedTensor& entry : saved.tensors) entry.tensor = entry.tensor.clone();
        for (const NamedParameter& parameter : straight) values.push_back(parameter.tensor.detach().clone());
      }
      set_gradients(straight, step);
      first->step();
    }
    ASSERT_EQ(saved.tensors.size(), kShapes.size() * (adamw ? 2 : 1));
    EXPECT_EQ(saved.tensors[0].name, adamw ? "optimizer.p0.exp_avg" : "optimizer.p0.momentum");
    EXPECT_EQ(saved.steps[3], (NamedSteps{"optimizer.p3.step", 2}));
    for (const bool in_place : {false, true}) {
      const auto again = make();
      {
        const at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < again.size(); ++i) at::Tensor(again[i].tensor).copy_(values[i]);
      }
      const auto second = maker(again);
      if (in_place) {
        second->ensure_state();
        const OptimizerState there = second->state();
        ASSERT_EQ(there.tensors.size(), saved.tensors.size());
        for (std::size_t i = 0; i < there.tensors.size(); ++i) {
          EXPECT_EQ(there.tensors[i].name, saved.tensors[i].name);
          at::Tensor(there.tensors[i].tensor).copy_(saved.tensors[i].tensor);
        }
        second->set_steps(saved.steps);
      } else {
        second->load_state(saved);
      }
      for (int step = 5; step < 10; ++step) {
        set_gradients(again, step);
        second->step();
      }
      for (std::size_t i = 0; i < again.size(); ++i)
        EXPECT_TRUE(at::equal(again[i].tensor, straight[i].tensor))
            << i << (in_place ? " in place" : " loaded");
      EXPECT_EQ(second->state().steps, first->state().steps);
    }
  }
}

TEST(OptimizerState, DamagedStateChangesNothing) {
  const auto parameters = make();
  AdamW adamw(parameters);
  set_gradients(parameters, 0);
  adamw.step();
  const at::Tensor before = adamw.state().tensors[0].tensor.clone();
  const auto refused = [&](auto change) {
    OptimizerState state = adamw.state();
    for (NamedTensor& entry : state.tensors) entry.tensor = entry.tensor + 1;
    change(state);
    const std::string text = message_of<ValueError>([&] { adamw.load_state(state); });
    EXPECT_TRUE(at::equal(adamw.state().tensors[0].tensor, before));
    return text;
  };
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.tensors[3].name = "optimizer.other.exp_avg"; }),
                       "optimizer.other.exp_avg"));
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.tensors[3].name = "optimizer.p1.step"; }),
                       "optimizer.p1.step"));
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.tensors[3].name = "optimizer.p1.momentum"; }),
                       "exp_avg|exp_avg_sq"));
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.tensors[3].tensor = at::zeros({14}); }),
                       "[14], expected [13]"));
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.tensors[3].tensor = at::Tensor(); }), "undefined"));
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.tensors.erase(s.tensors.begin() + 3); }),
                       "optimizer.p1.exp_avg_sq"));
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.tensors.push_back(s.tensors[3]); }), "twice"));
  EXPECT_TRUE(
      has_text(refused([](OptimizerState& s) { s.steps.erase(s.steps.begin()); }), "optimizer.p0.step"));
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.steps[0].steps = -1; }), "-1"));
  EXPECT_TRUE(has_text(refused([](OptimizerState& s) { s.steps[0].name = "optimizer.p0.exp_avg"; }),
                       "optimizer.p0.exp_avg"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         adamw.set_steps({{"optimizer.p0.step", 3}, {"optimizer.p9.step", 3}});
                       }),
                       "p9"));
  EXPECT_EQ(adamw.state().steps[0].steps, 1);
  adamw.load_state({});
  EXPECT_TRUE(adamw.state().tensors.empty());
}

TEST(Optimizer, BadInput) {
  const auto good = make();
  const double nan = std::nan("");
  const auto adamw = [&](AdamWOptions options) {
    return message_of<ValueError>([&] { AdamW(good, options); });
  };
  for (const double lr : {-1.0, nan, std::numeric_limits<double>::infinity()})
    EXPECT_TRUE(has_text(adamw({.lr = lr}), "lr"));
  EXPECT_TRUE(has_text(adamw({.beta1 = 1}), "beta1"));
  EXPECT_TRUE(has_text(adamw({.beta2 = -0.1}), "beta2"));
  EXPECT_TRUE(has_text(adamw({.eps = 0}), "eps"));
  EXPECT_TRUE(has_text(adamw({.weight_decay = -1}), "weight_decay"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { SGD(good, {.momentum = 1}); }), "momentum"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { SGD(good, {.nesterov = true}); }), "nesterov"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { AdamW({{.parameters = good, .lr_scale = -1}}); }),
                       "lr_scale of group 0"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { AdamW({{.parameters = good, .weight_decay = nan}}); }),
                       "weight_decay of group 0"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { AdamW({good[0], {"p0", good[1].tensor}}); }), "p0"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { AdamW({NamedParameter{"", good[1].tensor}}); }), "name"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         AdamW({NamedParameter{"p", at::Tensor()}});
                       }),
                       "undefined"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         AdamW({NamedParameter{"p", at::ones({2}, at::kLong)}});
                       }),
                       "Long"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         AdamW({NamedParameter{"p", good[0].tensor * 2}});
                       }),
                       "leaf"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         AdamW({{.parameters = {good[0]}}, {.parameters = {good[0]}, .weight_decay = 0.5}});
                       }),
                       "tied parameter p0"));
  AdamW fine(good);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { fine.set_lr(-1); }), "lr"));
  at::Tensor p = at::ones({3}).set_requires_grad(true);
  SGD sparse({NamedParameter{"table", p}});
  p.mutable_grad() = at::sparse_coo_tensor(at::zeros({1, 1}, at::kLong), at::ones({1}), {3});
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { sparse.step(); }), "table"));
}

// ---- distributed parameters ----

struct Layout {
  std::vector<std::int64_t> shape;
  Placements parameter, gradient;
};

TEST(DistributedOptimizer, TwoRanksAgainstOneProcess) {
  const std::vector<Layout> layouts{{{6, 5}, {Shard{0}}, {Shard{0}}},    {{5, 3}, {Shard{1}}, {Shard{1}}},
                                    {{4}, {Replicate{}}, {Partial{}}},   {{7, 2}, {Replicate{}}, {Partial{}}},
                                    {{3}, {Replicate{}}, {Replicate{}}}, {{1, 4}, {Shard{0}}, {Replicate{}}},
                                    {{5, 5}, {Shard{0}}, {Partial{}}}};
  for (const bool adamw : {true, false})
    for (const Kernels kernels : {Kernels::Auto, Kernels::Foreach}) {
      const auto maker = [&](const std::vector<NamedParameter>& parameters) -> std::unique_ptr<Optimizer> {
        if (adamw)
          return std::make_unique<AdamW>(decay_groups(parameters),
                                         AdamWOptions{.lr = 0.02, .weight_decay = 0.1, .kernels = kernels});
        return std::make_unique<SGD>(
            decay_groups(parameters),
            SGDOptions{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.1, .kernels = kernels});
      };
      std::vector<NamedParameter> alone;
      for (std::size_t i = 0; i < layouts.size(); ++i)
        alone.push_back({"p" + std::to_string(i),
                         numbers(layouts[i].shape, static_cast<int>(i)).set_requires_grad(true)});
      const auto one = maker(alone);
      for (int step = 0; step < 6; ++step) {
        for (std::size_t i = 0; i < alone.size(); ++i)
          alone[i].tensor.mutable_grad() = numbers(layouts[i].shape, 50 * step + static_cast<int>(i));
        one->step();
      }
      const OptimizerState expected = one->state();
      comm::run_ranks(2, 60s, [&](comm::World& world) {
        const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
        std::vector<NamedParameter> parameters;
        for (std::size_t i = 0; i < layouts.size(); ++i)
          parameters.push_back(
              {"p" + std::to_string(i),
               distribute_tensor(numbers(layouts[i].shape, static_cast<int>(i)), mesh, layouts[i].parameter)
                   .set_requires_grad(true)});
        const auto both = maker(parameters);
        for (int step = 0; step < 6; ++step) {
          for (std::size_t i = 0; i < parameters.size(); ++i) {
            const at::Tensor gradient = numbers(layouts[i].shape, 50 * step + static_cast<int>(i));
            // Terms that add up exactly: the whole value on one rank, in turn.
            parameters[i].tensor.mutable_grad() =
                layouts[i].gradient[0].is_partial()
                    ? from_local(gradient * (world.rank() == step % 2 ? 1 : 0), mesh, {Partial{}})
                    : distribute_tensor(gradient, mesh, layouts[i].gradient);
          }
          both->step();
          for (const NamedParameter& parameter : parameters)
            EXPECT_EQ(to_string(placements_of(parameter.tensor.grad())),
                      to_string(placements_of(parameter.tensor)));
        }
        const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
          return kernels == Kernels::Auto ? at::equal(a, b) : at::allclose(a, b, 1e-6, 1e-7);
        };
        for (std::size_t i = 0; i < parameters.size(); ++i)
          EXPECT_TRUE(same(full_tensor(parameters[i].tensor.detach()), alone[i].tensor.detach())) << i;
        OptimizerState state = both->state();
        ASSERT_EQ(state.tensors.size(), expected.tensors.size());
        EXPECT_EQ(state.steps, expected.steps);
        for (std::size_t i = 0; i < state.tensors.size(); ++i) {
          EXPECT_EQ(state.tensors[i].name, expected.tensors[i].name);
          EXPECT_TRUE(same(full_tensor(state.tensors[i].tensor), expected.tensors[i].tensor))
              << state.tensors[i].name;
        }
        // The whole state of one process is loaded into two ranks; then with other placements.
        const auto fresh = maker(parameters);
        fresh->load_state(expected);
        EXPECT_EQ(fresh->state().steps, expected.steps);
        for (std::size_t i = 0; i < state.tensors.size(); ++i) {
          const at::Tensor loaded = fresh->state().tensors[i].tensor;
          EXPECT_TRUE(at::equal(full_tensor(loaded), expected.tensors[i].tensor));
          EXPECT_EQ(to_string(placements_of(loaded)), to_string(placements_of(state.tensors[i].tensor)));
          state.tensors[i].tensor = redistribute(state.tensors[i].tensor * 2, {Replicate{}});
        }
        fresh->load_state(state);
        for (std::size_t i = 0; i < state.tensors.size(); ++i)
          EXPECT_TRUE(same(full_tensor(fresh->state().tensors[i].tensor), expected.tensors[i].tensor * 2));
      });
    }
}

TEST(DistributedOptimizer, Mistakes) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
    at::Tensor p = distribute_tensor(numbers({4, 2}, 0), mesh, {Shard{0}}).set_requires_grad(true),
               plain = numbers({4, 2}, 0).set_requires_grad(true);
    AdamW adamw({NamedParameter{"split", p}}), alone({NamedParameter{"plain", plain}});
    // .grad() checks only size, dtype and device of the gradient.
    p.mutable_grad() = numbers({4, 2}, 1);
    EXPECT_TRUE(has_text(message_of<TypeError>([&] { adamw.step(); }), "gradient of split"));
    plain.mutable_grad() = distribute_tensor(numbers({4, 2}, 1), mesh, {Shard{0}});
    EXPECT_TRUE(has_text(message_of<TypeError>([&] { alone.step(); }), "gradient of plain"));
    EXPECT_TRUE(has_text(
        message_of<ValueError>([&] {
          AdamW({NamedParameter{"terms", from_local(numbers({4}, world.rank()), mesh, {Partial{}})}});
        }),
        "Partial"));
    plain.mutable_grad() = numbers({4, 2}, 1);
    alone.step();
    OptimizerState state = alone.state();
    state.tensors[0].tensor = distribute_tensor(state.tensors[0].tensor, mesh, {Shard{0}});
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { alone.load_state(state); }), "full_tensor"));
  });
}

}  // namespace optimizer_test
}  // namespace penstock::optim
