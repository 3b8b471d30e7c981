// Random operators: the same values for all placements, different ones for every call.
#include <gtest/gtest.h>

#include <map>

#include "penstock/dtensor/tensor/dtensor_random.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_random_test {

using namespace std::chrono_literals;

struct Draw {
  std::string name;
  std::function<at::Tensor(const at::Tensor& model)> draw;
};

std::vector<Draw> draws() {
  return {
      {"uniform_", [](const at::Tensor& x) { return at::empty_like(x).uniform_(-1, 2); }},
      {"normal_", [](const at::Tensor& x) { return at::empty_like(x).normal_(1, 2); }},
      {"bernoulli_", [](const at::Tensor& x) { return at::empty_like(x).bernoulli_(0.3); }},
      {"bernoulli.p", [](const at::Tensor& x) { return at::bernoulli(x, 0.6); }},
      {"bernoulli", [](const at::Tensor& x) { return at::bernoulli(x.sigmoid()); }},
      {"bernoulli_ by a tensor",
       [](const at::Tensor& x) { return at::zeros_like(x, at::kLong).bernoulli_(x.sigmoid()); }},
      {"bernoulli.Tensor",
       [](const at::Tensor& x) { return at::bernoulli(at::zeros_like(x, at::kLong), x.sigmoid()); }},
      {"rand_like", [](const at::Tensor& x) { return at::rand_like(x); }},
      {"randn_like", [](const at::Tensor& x) { return at::randn_like(x, at::kDouble); }},
      {"randint_like", [](const at::Tensor& x) { return at::randint_like(x, 3, 90); }},
      {"randint_like of integers", [](const at::Tensor& x) { return at::randint_like(x, 70, at::kLong); }},
      {"random_", [](const at::Tensor& x) { return at::empty_like(x, at::kLong).random_(); }},
      {"random_ of bytes", [](const at::Tensor& x) { return at::empty_like(x, at::kByte).random_(); }},
      {"random_ from to", [](const at::Tensor& x) { return at::empty_like(x).random_(-4, 200); }},
      {"exponential_", [](const at::Tensor& x) { return at::empty_like(x).exponential_(2); }},
      {"log_normal_", [](const at::Tensor& x) { return at::empty_like(x).log_normal_(0, 0.5); }},
      {"cauchy_", [](const at::Tensor& x) { return at::empty_like(x).cauchy_(); }},
      {"geometric_", [](const at::Tensor& x) { return at::empty_like(x).geometric_(0.2); }},
      {"normal of tensors", [](const at::Tensor& x) { return at::normal(x, x.abs()); }},
      {"normal around a tensor", [](const at::Tensor& x) { return at::normal(x, 0.5); }},
      {"normal with a tensor of deviations", [](const at::Tensor& x) { return at::normal(0.5, x.abs()); }},
      {"normal_functional", [](const at::Tensor& x) { return at::normal_functional(x, 1, 2); }},
      {"dropout", [](const at::Tensor& x) { return at::dropout(x, 0.4, true); }},
      {"native_dropout", [](const at::Tensor& x) { return std::get<0>(at::native_dropout(x, 0.4, true)); }},
      {"rrelu", [](const at::Tensor& x) { return at::rrelu(x, 0.1, 0.4, true); }},
      {"feature dropout", [](const at::Tensor& x) { return at::feature_dropout(x, 0.5, true); }},
  };
}

// Every draw twice after a seed, as whole tensors.
std::vector<at::Tensor> results_on(const comm::MeshGroups& mesh, const Placements& placements,
                                   std::string* where = nullptr) {
  manual_seed(mesh, 77);
  const at::Tensor model = spread(sample({5, 6}), mesh, placements);
  std::vector<at::Tensor> results;
  for (const Draw& draw : draws())
    for (int i = 0; i < 2; ++i) {
      if (where) *where = draw.name;
      results.push_back(full_tensor(draw.draw(model)));
    }
  return results;
}

std::vector<at::Tensor> reference() {
  std::vector<at::Tensor> results;
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {1}, {}, 0, 1));
    results = results_on(mesh, {Replicate{}});
  });
  return results;
}

TEST(RandomRules, DoNotDependOnTheLayout) {
  const RulesChecked checked;
  const std::vector<at::Tensor> expected = reference();
  const auto check = [&](const std::vector<std::int64_t>& mesh_shape,
                         const std::vector<Placements>& layouts) {
    int size = 1;
    for (const std::int64_t n : mesh_shape) size *= static_cast<int>(n);
    comm::run_ranks(size, 120s, [&](comm::World& world) {
      const comm::MeshGroups mesh(world, init_device_mesh("cpu", mesh_shape, {}, world.rank(), size));
      for (const Placements& placements : layouts) {
        const auto actual = results_on(mesh, placements);
        for (std::size_t i = 0; i < actual.size(); ++i) {
          const Draw draw = draws()[i / 2];
          // Partial sums are added before and after; everything else is exact.
          EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type()) << draw.name;
          EXPECT_TRUE(at::allclose(actual[i].to(at::kDouble), expected[i].to(at::kDouble), 1e-6, 1e-6))
              << draw.name << " as " << to_string(placements);
        }
      }
    });
  };
  check({2}, {{Replicate{}}, {Shard{0}}, {Shard{1}}, {Partial{}}});
  check({3}, {{Shard{0}}, {Shard{1}}});
  check({2, 2}, {{Shard{0}, Shard{1}},
                 {Shard{1}, Shard{0}},
                 {Shard{0}, Shard{0}},
                 {StridedShard{0, 2}, Shard{0}},
                 {Replicate{}, StridedShard{1, 3}},
                 {Partial{}, Shard{1}}});
}

TEST(RandomRules, DifferFromCallToCall) {
  const std::vector<at::Tensor> results = reference();
  for (std::size_t i = 0; i < results.size(); i += 2)
    EXPECT_FALSE(at::equal(results[i], results[i + 1])) << draws()[i / 2].name;
}

// Means and bounds of many draws.
TEST(RandomRules, HaveTheRightDistributions) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    manual_seed(mesh, 5);
    const at::Tensor x = distribute_tensor(at::zeros({200, 100}), mesh, {Shard{0}});
    const auto mean = [](const at::Tensor& t) {
      return full_tensor(t).to(at::kDouble).mean().item<double>();
    };
    EXPECT_NEAR(mean(at::rand_like(x)), 0.5, 0.01);
    EXPECT_NEAR(mean(at::randn_like(x).square()), 1.0, 0.05);
    EXPECT_NEAR(mean(at::empty_like(x).exponential_(4)), 0.25, 0.01);
    EXPECT_NEAR(mean(at::empty_like(x).geometric_(0.25)), 4.0, 0.1);
    EXPECT_NEAR(mean(at::empty_like(x).log_normal_(0, 0.5)), std::exp(0.125), 0.03);
    EXPECT_NEAR(mean(at::empty_like(x).bernoulli_(0.3)), 0.3, 0.02);
    EXPECT_NEAR(mean(at::empty_like(x, at::kLong).random_(10, 20)), 14.5, 0.1);
    EXPECT_NEAR(mean(at::empty_like(x, at::kLong).random_()) / 9.223372036854775807e18, 0.5, 0.01);
    EXPECT_NEAR(mean(at::dropout(x + 1, 0.4, true)), 1.0, 0.03);
    const at::Tensor integers = full_tensor(at::randint_like(x, 3, 6));
    EXPECT_EQ(integers.min().item<float>(), 3);
    EXPECT_EQ(integers.max().item<float>(), 5);
  });
}

TEST(RandomRules, GradientsOfDropoutUseTheSameMask) {
  const RulesChecked checked;
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    for (const Placement& placement : {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
      at::Tensor x = distribute_tensor(at::ones({5, 4}).set_requires_grad(true), mesh, {placement});
      const at::Tensor y = at::dropout(x, 0.5, true);
      y.sum().backward();
      EXPECT_TRUE(at::equal(full_tensor(x.grad()), full_tensor(y.detach())));
      x.mutable_grad() = at::Tensor();
      const auto [z, mask] = at::native_dropout(x, 0.5, true);
      z.sum().backward();
      EXPECT_TRUE(at::equal(full_tensor(x.grad()), full_tensor(z.detach())));
      EXPECT_TRUE(at::equal(full_tensor(mask), full_tensor(z.detach()).ne(0)));
    }
  });
}

TEST(RandomRules, SeedsOfMeshesAndSteps) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor x = distribute_tensor(at::zeros({4, 3}), mesh, {Shard{0}});
    const auto draw = [&] { return full_tensor(at::rand_like(x)); };
    // Ranks whose generators differ agree on the first one's seed.
    const at::Tensor unseeded = draw();
    at::Tensor both = at::empty({2, 4, 3});
    mesh.group(0).all_gather(both, unseeded).wait();
    EXPECT_TRUE(at::equal(both[0], both[1]));
    manual_seed(mesh, 1);
    const at::Tensor first = draw(), second = draw();
    manual_seed(mesh, 1);
    EXPECT_TRUE(at::equal(draw(), first));
    EXPECT_TRUE(at::equal(draw(), second));
    manual_seed(mesh, 2);
    EXPECT_FALSE(at::equal(draw(), first));

    // Within a step, by step and microbatch; returning to a microbatch continues its counter.
    StepContext step;
    step.seed = 9, step.step = 3, step.microbatches = 2;
    const auto in = [&](std::int64_t number, std::int64_t microbatch, auto&& body) {
      StepContext here = step;
      here.step = number, here.microbatch = microbatch;
      const StepGuard guard(here);
      return body();
    };
    const at::Tensor a = in(3, 0, draw), b = in(3, 1, draw), c = in(3, 0, draw), d = in(4, 0, draw);
    EXPECT_FALSE(at::equal(a, b));
    EXPECT_FALSE(at::equal(a, c));
    EXPECT_FALSE(at::equal(a, d));
    EXPECT_TRUE(at::equal(in(3, 0, draw), a)) << "a restarted step draws the same";

    // A recomputation starts with the counter of the first time and restores the counter afterwards.
    in(5, 0, [&] {
      draw();
      const RandomCursor start = random_cursor(mesh);
      const at::Tensor forward = draw();
      const RandomCursor end = random_cursor(mesh);
      {
        const RandomReplay replay(mesh, start);
        EXPECT_TRUE(at::equal(draw(), forward));
        draw();
      }
      EXPECT_EQ(random_cursor(mesh), end);
      return forward;
    });
    // A mesh with a different number draws different values.
    manual_seed(mesh, 3);
    EXPECT_FALSE(at::equal(in(3, 0, draw), a));
  });
}

TEST(RandomRules, GeneratorsAreRefused) {
  comm::run_ranks(1, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {1}, {}, 0, 1));
    at::Tensor x = distribute_tensor(at::zeros({4}), mesh, {Shard{0}});
    try {
      x.uniform_(0, 1, at::detail::createCPUGenerator(5));
      ADD_FAILURE() << "not refused";
    } catch (const ValueError& error) {
      EXPECT_NE(std::string(error.what()).find("manual_seed(mesh, seed)"), std::string::npos) << error.what();
    }
  });
}

}  // namespace rules_random_test
}  // namespace penstock::test
