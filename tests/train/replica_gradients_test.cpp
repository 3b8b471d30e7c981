// Replicas with different sets of gradients, compared with one process that sees the whole batch.
#include "penstock/train/job/replica_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>

#include "penstock/errors.h"
#include "penstock/optimizer.h"
#include "penstock/torch/tree/distributed_type.h"
#include "penstock/train/job/replica_gradient_sync.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace replica_gradients_test {

using namespace std::chrono_literals;
using optim::NamedParameter;
using penstock::test::config_of;
using penstock::test::has_text;
using penstock::test::Layout;
using penstock::test::message_of;

std::vector<NamedParameter> three_alike() {
  std::vector<NamedParameter> parameters;
  for (const char* name : {"a", "b", "c"})
    parameters.push_back({name, at::zeros({2, 3}).set_requires_grad(true)});
  return parameters;
}

void set_grad(const at::Tensor& parameter, double value) {
  parameter.mutable_grad() = at::full_like(parameter.detach(), value);
}

// All sizes agree: only the names distinguish the gradients.
TEST(ReplicaGradients, AGradientThatARankLacksCountsAsZeros) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const auto parameters = three_alike();
    ReplicaGradients replicas(world.group(), {{"all", parameters}});
    set_grad(parameters[world.rank() == 0 ? 0 : 1].tensor, 4);  // rank 0 has a's, rank 1 has b's
    replicas.finish();
    for (const std::size_t i : {0, 1}) {
      ASSERT_TRUE(parameters[i].tensor.grad().defined());
      EXPECT_TRUE(parameters[i].tensor.grad().equal(at::full({2, 3}, 2.0))) << parameters[i].name;
    }
    EXPECT_FALSE(parameters[2].tensor.grad().defined());
    EXPECT_EQ(replicas.buffer_bytes(), 0);
  });
}

TEST(ReplicaGradients, NumbersOfGradientsMayDiffer) {
  comm::run_ranks(3, 20s, [](comm::World& world) {
    std::vector<NamedParameter> parameters{{"a", at::zeros({5}).set_requires_grad(true)},
                                           {"b", at::zeros({7, 2}).set_requires_grad(true)},
                                           {"d", at::zeros({3}, at::kDouble).set_requires_grad(true)}};
    ReplicaGradients replicas(world.group(),
                              {{"first", {parameters[0]}}, {"second", {parameters[1], parameters[2]}}});
    if (world.rank() == 1)
      for (const NamedParameter& parameter : parameters) set_grad(parameter.tensor, 3);
    if (world.rank() == 2) set_grad(parameters[1].tensor, 6);
    replicas.begin(1);
    EXPECT_EQ(replicas.buffer_bytes(), 4 * (14 + 1) + 8 * (3 + 1));
    replicas.finish();
    EXPECT_TRUE(parameters[0].tensor.grad().equal(at::full({5}, 1.0)));
    EXPECT_TRUE(parameters[1].tensor.grad().equal(at::full({7, 2}, 3.0)));
    EXPECT_TRUE(parameters[2].tensor.grad().equal(at::full({3}, 1.0, at::kDouble)));
  });
}

// The message on all ranks when rank 1 has changed something about its parameters.
template <class Change>
std::string refusal(const Change& change) {
  std::set<std::string> texts;
  std::mutex mutex;
  comm::run_ranks(3, 20s, [&](comm::World& world) {
    auto parameters = three_alike();
    if (world.rank() == 1) change(parameters);
    const std::string text = message_of<ValueError>([&] {
      ReplicaGradients(world.group(), {{"stage 7", parameters}});
    });
    const std::lock_guard lock(mutex);
    texts.insert(text);
  });
  EXPECT_EQ(texts.size(), 1U);
  return *texts.begin();
}

TEST(ReplicaGradients, DifferentParametersAreNamedOnEveryRank) {
  const std::string frozen = refusal([](auto& parameters) { parameters[1].tensor.set_requires_grad(false); });
  EXPECT_TRUE(has_text(frozen, "on rank 1"));
  EXPECT_TRUE(has_text(frozen, "stage 7: b: Float[2, 3], frozen"));
  EXPECT_TRUE(has_text(frozen, "stage 7: b: Float[2, 3], trainable, as on rank 0"));
  EXPECT_TRUE(has_text(refusal([](auto& parameters) {
                         parameters[2].tensor = at::zeros({3, 2}).set_requires_grad(true);
                       }),
                       "c: Float[3, 2]"));
  EXPECT_TRUE(has_text(refusal([](auto& parameters) {
                         parameters[0].tensor = at::zeros({2, 3}, at::kDouble).set_requires_grad(true);
                       }),
                       "a: Double[2, 3]"));
  EXPECT_TRUE(has_text(refusal([](auto& parameters) { std::swap(parameters[0], parameters[1]); }),
                       "entry 0 on rank 1"));
  EXPECT_TRUE(
      has_text(refusal([](auto& parameters) { parameters.pop_back(); }), "no entry (there are only 2)"));
}

TEST(ReplicaGradients, FreezingLaterIsRefusedByName) {
  comm::run_ranks(1, 20s, [](comm::World& world) {
    auto parameters = three_alike();
    parameters[2].tensor.set_requires_grad(false);
    ReplicaGradients replicas(world.group(), {{"all", parameters}});
    parameters[1].tensor.set_requires_grad(false);
    EXPECT_TRUE(has_text(message_of<StateError>([&] { replicas.finish(); }), "requires_grad of b"));
    parameters[1].tensor.set_requires_grad(true);
    parameters[2].tensor.mutable_grad() = at::ones({2, 3});
    EXPECT_TRUE(has_text(message_of<StateError>([&] { replicas.finish(); }), "gradient of c"));
    parameters[2].tensor.mutable_grad() = at::Tensor();
    replicas.begin(0);
    EXPECT_TRUE(has_text(message_of<StateError>([&] { replicas.begin(0); }), "already in flight"));
    EXPECT_NO_THROW(replicas.finish());
    EXPECT_NO_THROW(replicas.finish());
  });
}

// ------------------------------------------------------------------------------------------------------------
// stages of a real model

// Gradients of a model's stages, set by hand; `has` selects which by (replica, name, at the head).
template <class Has, class Check>
void with_model(const Layout& layout, const std::vector<std::string>& more, const Has& has,
                const Check& check) {
  const TrainConfig config = config_of(layout, more);
  comm::run_ranks(layout.pp * layout.dp * layout.tp, 60s, [&](comm::World& world) {
    const RankLayout place(world, config.layout);
    const schedule::Schedule schedule = configured_schedule(config.layout);
    ModelStages stages(place, config, schedule, at::kCPU);
    ReplicaGradientSync sync(place, stages, true);
    // The use at the head: of the last stage, or the second one of the only stage.
    const SharedParameters& shared = stages.shared();
    const auto is_head = [&](const PipelineStage& stage, const at::Tensor& tensor) {
      return shared.is_shared(tensor) && stage.is_last() &&
             (!stage.is_first() || shared.is_further_use(tensor));
    };
    for (const PipelineStage& stage : stages.stages()) {
      for (const NamedParameter& parameter : stages.parameters_of(stage.index())) {
        const bool head = is_head(stage, parameter.tensor);
        if (has(place.dp(), shared.is_shared(parameter.tensor) ? "embed.weight" : parameter.name, head))
          set_grad(parameter.tensor, 1 + place.dp() + (head ? 10 : 0));
      }
      sync.stage_done(stage.index());
    }
    sync.finish();
    for (const NamedParameter& parameter : stages.parameters()) check(parameter);
  });
}

void expect_grad(const NamedParameter& parameter, std::optional<double> value) {
  ASSERT_EQ(parameter.tensor.grad().defined(), value.has_value()) << parameter.name;
  if (value) {
    EXPECT_TRUE(
        at::allclose(local_if_distributed(parameter.tensor.grad()), at::full({}, static_cast<float>(*value))))
        << parameter.name;
  }
}

TEST(ReplicaGradientSync, AStageWithoutSomeGradientsOnSomeReplicas) {
  for (const Layout& layout : {Layout{.name = "dp2", .dp = 2}, Layout{.name = "pp2 dp2", .pp = 2, .dp = 2},
                               Layout{.name = "dp2 tp2", .dp = 2, .tp = 2}}) {
    SCOPED_TRACE(layout.name);
    const auto has = [](int replica, const std::string& name, bool) {
      if (name.find("query") != std::string::npos) return replica == 0;
      if (name.find("key") != std::string::npos) return replica == 1;
      return name.find("norm") == std::string::npos;
    };
    with_model(layout, {"--tie_head", "false"}, has, [&](const NamedParameter& parameter) {
      const bool first = has(0, parameter.name, false), second = has(1, parameter.name, false);
      expect_grad(parameter,
                  first || second ? std::optional(((first ? 1 : 0) + (second ? 2 : 0)) / 2.0) : std::nullopt);
    });
  }
}

TEST(ReplicaGradientSync, ATiedWeightWithoutOneOfItsGradients) {
  // Both uses on one rank, and on two ranks.
  for (const Layout& layout : {Layout{.name = "dp2", .dp = 2}, Layout{.name = "pp2 dp2", .pp = 2, .dp = 2}})
    for (int mask = 0; mask < 16; ++mask) {
      SCOPED_TRACE(layout.name + ", uses " + std::to_string(mask));
      const auto has = [&](int replica, const std::string& name, bool head) {
        return name != "embed.weight" || (mask >> (2 * replica + (head ? 1 : 0)) & 1) != 0;
      };
      double sum = 0;
      for (const int replica : {0, 1})
        for (const bool head : {false, true})
          if (has(replica, "embed.weight", head)) sum += 1 + replica + (head ? 10 : 0);
      with_model(layout, {"--tie_head", "true"}, has, [&](const NamedParameter& parameter) {
        expect_grad(parameter, parameter.name != "embed.weight" ? std::optional(1.5)
                               : mask != 0                      ? std::optional(sum / 2)
                                                                : std::nullopt);
      });
    }
}

// ------------------------------------------------------------------------------------------------------------------------
// property

// A model of random parameters. A sample uses a random subset, different on every replica and in every run
// and step.
struct Case {
  explicit Case(std::uint64_t seed, int the_replicas) : random(seed), replicas(the_replicas) {
    const int count = draw(1, 6);
    for (int i = 0; i < count; ++i) {
      std::vector<std::int64_t> shape;
      for (int dim = draw(0, 3); dim > 0; --dim) shape.push_back(draw(1, 3));
      const auto dtype = draw(0, 4) == 0 ? at::kDouble : at::kFloat;
      initial.push_back(at::rand(shape, at::TensorOptions(dtype)) - 0.5);
      frozen.push_back(draw(0, 6) == 0);
      chance.push_back(draw(0, 4) == 0 ? 0 : draw(0, 4) == 0 ? 10 : draw(1, 9));
      part.push_back(draw(0, 2));
    }
    runs = draw(1, 3);
    samples = draw(1, 3);
    steps = draw(2, 4);
    adam = draw(0, 1) == 1;
    for (int i = 0; i < steps * runs * replicas * count; ++i)
      used.push_back(draw(1, 10) <= chance[static_cast<std::size_t>(i % count)]);
    factors = at::rand({steps, runs, replicas, samples, count, 2}, at::kDouble) * 2 - 1;
    for (int i = 0; i < 3; ++i) early.push_back(draw(0, 1) == 1);
  }
  int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

  std::vector<NamedParameter> parameters() const {
    std::vector<NamedParameter> made;
    for (std::size_t i = 0; i < initial.size(); ++i)
      made.push_back({"p" + std::to_string(i), initial[i].clone().set_requires_grad(!frozen[i])});
    return made;
  }
  // Mean over the samples of one replica in one run; undefined if no trained parameter is used.
  at::Tensor loss(const std::vector<NamedParameter>& from, int step, int run, int replica) const {
    at::Tensor sum;
    for (int sample = 0; sample < samples; ++sample)
      for (std::size_t k = 0; k < from.size(); ++k) {
        const auto count = static_cast<int>(from.size());
        if (!used[static_cast<std::size_t>(((step * runs + run) * replicas + replica) * count +
                                           static_cast<int>(k))] ||
            frozen[k])
          continue;
        const at::Tensor f = factors[step][run][replica][sample][static_cast<std::int64_t>(k)];
        const at::Tensor term = (from[k].tensor.to(at::kDouble) * f[0] + f[1]).tanh().sum();
        sum = sum.defined() ? sum + term : term;
      }
    return sum.defined() ? sum / samples : sum;
  }
  std::unique_ptr<optim::Optimizer> optimizer(const std::vector<NamedParameter>& of) const {
    // Weight decay shows whether a parameter was updated, even if its gradient is zero.
    if (adam)
      return std::make_unique<optim::AdamW>(of, optim::AdamWOptions{.lr = 0.05,
                                                                    .beta1 = 0.9,
                                                                    .beta2 = 0.99,
                                                                    .eps = 1e-2,
                                                                    .weight_decay = 0.1,
                                                                    .kernels = optim::Kernels::Foreach});
    return std::make_unique<optim::SGD>(of, optim::SGDOptions{.lr = 0.1,
                                                              .momentum = 0.9,
                                                              .nesterov = false,
                                                              .weight_decay = 0.1,
                                                              .decoupled = false,
                                                              .kernels = optim::Kernels::Foreach});
  }

  std::mt19937_64 random;
  int replicas, runs = 1, samples = 1, steps = 1;
  bool adam = false;
  std::vector<at::Tensor> initial;
  std::vector<bool> frozen, used, early;
  std::vector<int> chance, part;
  at::Tensor factors;
};

TEST(ReplicaGradients, RandomUseOfRandomParametersIsThatOfOneProcess) {
  constexpr int kCases = 60;
  std::int64_t missing = 0, nobody = 0, everybody = 0;
  for (const int replicas : {2, 3, 4}) {
    std::vector<Case> cases;
    at::manual_seed(static_cast<std::uint64_t>(replicas));
    for (int i = 0; i < kCases; ++i)
      cases.emplace_back(static_cast<std::uint64_t>(1000 * replicas + i), replicas);
    // One process, everything in one batch: parameters and whether there was a gradient, after each step.
    std::vector<std::vector<std::vector<std::pair<at::Tensor, bool>>>> expected(cases.size());
    for (std::size_t c = 0; c < cases.size(); ++c) {
      const Case& each = cases[c];
      const auto parameters = each.parameters();
      const auto optimizer = each.optimizer(parameters);
      for (int step = 0; step < each.steps; ++step) {
        optimizer->zero_grad();
        at::Tensor sum;
        for (int run = 0; run < each.runs; ++run)
          for (int replica = 0; replica < replicas; ++replica)
            if (const at::Tensor loss = each.loss(parameters, step, run, replica); loss.defined())
              sum = sum.defined() ? sum + loss : loss;
        if (sum.defined()) (sum / (each.runs * replicas)).backward();
        optimizer->step();
        auto& after = expected[c].emplace_back();
        for (const NamedParameter& parameter : parameters)
          after.emplace_back(parameter.tensor.detach().clone(), parameter.tensor.grad().defined());
      }
    }
    std::mutex mutex;
    std::vector<std::vector<at::Tensor>> first(
        cases.size());  // parameters of the first rank that finished, after the last step
    comm::run_ranks(replicas, 120s, [&](comm::World& world) {
      for (std::size_t c = 0; c < cases.size(); ++c) {
        const Case& each = cases[c];
        const auto parameters = each.parameters();
        std::vector<ReplicaGradients::Part> parts{{"0", {}}, {"1", {}}, {"2", {}}};
        for (std::size_t k = 0; k < parameters.size(); ++k)
          parts[static_cast<std::size_t>(each.part[k])].parameters.push_back(parameters[k]);
        ReplicaGradients sync(world.group(), parts);
        const auto optimizer = each.optimizer(parameters);
        for (int step = 0; step < each.steps; ++step) {
          optimizer->zero_grad();
          for (int run = 0; run < each.runs; ++run)
            if (const at::Tensor loss = each.loss(parameters, step, run, world.rank()); loss.defined())
              (loss / each.runs).backward();
          std::int64_t lacks = 0;
          for (const NamedParameter& parameter : parameters) lacks += !parameter.tensor.grad().defined();
          for (std::size_t part = 0; part < parts.size(); ++part)
            if (each.early[part]) sync.begin(part);
          sync.finish();
          optimizer->step();
          const std::lock_guard lock(mutex);
          missing += lacks;
          for (std::size_t k = 0; k < parameters.size(); ++k) {
            const auto& [value, stepped] = expected[c][static_cast<std::size_t>(step)][k];
            (stepped ? everybody : nobody) += 1;
            EXPECT_EQ(parameters[k].tensor.grad().defined(), stepped)
                << replicas << " replicas, case " << c << ", step " << step << ", parameter " << k;
            EXPECT_TRUE(at::allclose(parameters[k].tensor, value, 1e-5, 1e-6))
                << replicas << " replicas, case " << c << ", step " << step << ", parameter " << k;
          }
        }
        const std::lock_guard lock(mutex);
        for (std::size_t k = 0; k < parameters.size(); ++k) {
          if (first[c].size() < parameters.size()) first[c].push_back(parameters[k].tensor.detach().clone());
          EXPECT_TRUE(parameters[k].tensor.equal(first[c][k]))
              << "replicas differ, case " << c << ", parameter " << k;
        }
      }
    });
  }
  // The random cases cover what they are meant to.
  EXPECT_GT(missing, nobody + 200);
  EXPECT_GT(nobody, 200);
  EXPECT_GT(everybody, 1000);
}

}  // namespace replica_gradients_test
}  // namespace penstock::train
