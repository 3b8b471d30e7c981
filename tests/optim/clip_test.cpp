// The norm of all gradients: one process, tensor-parallel shards, pipeline ranks, ties; gradients that are
// not finite.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/gradients.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::optim {
namespace clip_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor numbers(at::IntArrayRef shape, int seed) {
  return (at::arange(c10::multiply_integers(shape), at::kDouble) * 1.7 + seed * 0.37)
      .sin()
      .add(0.1)
      .reshape(shape)
      .to(at::kFloat);
}

NamedParameter with_gradient(std::string name, const at::Tensor& gradient) {
  at::Tensor p = at::zeros_like(gradient).set_requires_grad(true);
  p.mutable_grad() = gradient.clone();
  return {std::move(name), p};
}

TEST(ClipGradNorm, OfComplexGradients) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble})
    for (const double order : {2.0, kInfinity}) {
      const at::Tensor one = at::ones({4}, dtype);
      std::vector<NamedParameter> parameters{with_gradient("a", at::complex(one * 3, one * 4)),
                                             with_gradient("b", at::complex(one * 0, one * 5))};
      const ClipResult result = clip_grad_norm(parameters, 1, {.order = order});
      const double expected = order == 2 ? std::sqrt(8 * 25.0) : 5;
      EXPECT_NEAR(result.value(), expected, 1e-5);
      for (const NamedParameter& parameter : parameters)
        EXPECT_TRUE(at::allclose(parameter.tensor.grad().abs(), one * (5 / expected), 1e-4))
            << parameter.name;
    }
}

TEST(ClipGradNorm, AgainstTorch) {
  for (const double order : {2.0, kInfinity})
    for (const double most : {0.5, 1e6}) {
      std::vector<NamedParameter> ours;
      std::vector<at::Tensor> theirs;
      for (const std::vector<std::int64_t>& shape :
           {std::vector<std::int64_t>{70, 50}, {13}, {}, {3, 4, 5}}) {
        const int seed = static_cast<int>(ours.size());
        ours.push_back(with_gradient("p" + std::to_string(seed), numbers(shape, seed)));
        theirs.push_back(with_gradient("", numbers(shape, seed)).tensor);
      }
      ours.push_back({"without", at::zeros({2}).set_requires_grad(true)});
      ours.push_back(with_gradient("empty", at::zeros({0, 2})));
      const double expected = torch::nn::utils::clip_grad_norm_(theirs, most, order);
      const ClipResult result = clip_grad_norm(ours, most, {.order = order});
      EXPECT_EQ(result.norm.dim(), 0);
      EXPECT_NEAR(result.value(), expected, 1e-5 * expected);
      EXPECT_TRUE(result.finite());
      EXPECT_FALSE(result.skipped);
      for (std::size_t i = 0; i < theirs.size(); ++i)
        EXPECT_TRUE(at::allclose(ours[i].tensor.grad(), theirs[i].grad(), 1e-5, 1e-7));
      EXPECT_FALSE(ours[4].tensor.grad().defined());
    }
}

TEST(ClipGradNorm, Precisions) {
  // In float16 the squares of the elements overflow.
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
    const NamedParameter p = with_gradient("p", at::full({300}, 512.0).to(dtype));
    const NamedParameter t = with_gradient("t", at::full({2, 50}, 512.0).t().to(dtype));
    const double expected = 512 * std::sqrt(400.0);
    const ClipResult result = clip_grad_norm({p, t}, 10);
    EXPECT_NEAR(result.value(), expected, 1e-9 * expected) << dtype;
    EXPECT_NEAR(p.tensor.grad().to(at::kDouble).norm().item<double>(), 10 * std::sqrt(0.75), 0.05) << dtype;
    EXPECT_EQ(p.tensor.grad().scalar_type(), dtype);
  }
}

TEST(ClipGradNorm, TiesCountOnceAndInfinityOnlyMeasures) {
  const NamedParameter p = with_gradient("embed.weight", at::full({4}, 3.0));
  const ClipResult measured = clip_grad_norm({p, {"head.weight", p.tensor}}, kInfinity);
  EXPECT_EQ(measured.value(), 6);
  EXPECT_TRUE(at::equal(p.tensor.grad(), at::full({4}, 3.0)));
  clip_grad_norm({p, {"head.weight", p.tensor}}, 3);
  EXPECT_TRUE(at::allclose(p.tensor.grad(), at::full({4}, 1.5)));
  EXPECT_EQ(clip_grad_norm({p}, 1, {.counts = [](const NamedParameter&) { return false; }}).value(), 0);
  EXPECT_EQ(clip_grad_norm({}, 1).value(), 0);
}

// pp x tp = 2 x 2. Stage 0: the embedding (split), a norm with a Partial gradient, a plain parameter; stage
// 1: a matrix (split along the other dim), a norm and its copy of the embedding, which is counted on stage 0.
struct Part {
  const char* name;
  std::vector<std::int64_t> shape;
  int stage;
  Placements parameter, gradient;
  bool owner = true;
};

const std::vector<Part>& parts() {
  static const std::vector<Part> result{{"embed.weight", {9, 4}, 0, {Shard{0}}, {Shard{0}}},
                                        {"a.norm", {5}, 0, {Replicate{}}, {Partial{}}},
                                        {"b.norm", {3}, 0, {Replicate{}}, {Replicate{}}},
                                        {"c.weight", {5, 7}, 1, {Shard{1}}, {Shard{1}}},
                                        {"d.norm", {6}, 1, {Replicate{}}, {Partial{}}},
                                        {"tiny.weight", {1, 3}, 1, {Shard{0}}, {Shard{0}}},
                                        {"embed.weight", {9, 4}, 1, {Shard{0}}, {Shard{0}}, false}};
  return result;
}

int seed_of(const Part& part) { return static_cast<int>(std::string(part.name).size()) + part.name[0]; }

std::vector<NamedParameter> of_stage(int stage, const comm::MeshGroups& tp, int tp_rank) {
  std::vector<NamedParameter> result;
  for (const Part& part : parts()) {
    if (part.stage != stage) continue;
    const at::Tensor gradient = numbers(part.shape, seed_of(part));
    at::Tensor p = distribute_tensor(at::zeros(part.shape), tp, part.parameter).set_requires_grad(true);
    p.mutable_grad() = part.gradient[0].is_partial()
                           ? from_local(gradient * (tp_rank == 0 ? 0.75 : 0.25), tp, {Partial{}})
                           : distribute_tensor(gradient, tp, part.gradient);
    result.push_back({part.name, p});
  }
  return result;
}

TEST(ClipGradNorm, PipelineAndTensorParallelAgainstOneProcess) {
  for (const double order : {2.0, kInfinity})
    for (const double most : {0.25, 1e6})
      for (const bool one_group : {false, true}) {
        std::vector<NamedParameter> alone;
        for (const Part& part : parts())
          if (part.owner) alone.push_back(with_gradient(part.name, numbers(part.shape, seed_of(part))));
        const double expected = clip_grad_norm(alone, most, {.order = order}).value();
        std::mutex mutex;
        std::set<std::uint64_t> bits;
        comm::run_ranks(4, 60s, [&](comm::World& world) {
          DeviceMesh whole = init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, world.rank(), 4);
          const comm::MeshGroups mesh(world, whole);
          const comm::MeshGroups tp = mesh.with_mesh(whole["tp"]);
          const int stage = world.rank() / 2;
          const auto own = of_stage(stage, tp, world.rank() % 2);
          const ClipResult result =
              clip_grad_norm(own, most,
                             {.order = order,
                              .groups = {one_group ? world.group() : mesh.group("pp")},
                              .counts = [&](const NamedParameter& parameter) {
                                return !(stage == 1 && parameter.name == "embed.weight");
                              }});
          EXPECT_NEAR(result.value(), expected, 1e-6 * expected);
          for (const NamedParameter& parameter : own)
            for (const NamedParameter& other : alone)
              if (parameter.name == other.name) {
                EXPECT_TRUE(
                    at::allclose(full_tensor(parameter.tensor.grad()), other.tensor.grad(), 1e-6, 1e-7))
                    << parameter.name;
              }
          const std::lock_guard lock(mutex);
          bits.insert(std::bit_cast<std::uint64_t>(result.value()));
        });
        EXPECT_EQ(bits.size(), 1u) << "ranks differ";
      }
}

// Nothing is split, and the group of all ranks holds two copies of everything.
TEST(ClipGradNorm, CopiesAlongAnAxisCountOnce) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
    at::Tensor p = distribute_tensor(at::zeros({4}), mesh, {Replicate{}}).set_requires_grad(true);
    p.mutable_grad() = distribute_tensor(at::full({4}, 3.0), mesh, {Replicate{}});
    EXPECT_EQ(clip_grad_norm({{"p", p}}, kInfinity).value(), 6);
    EXPECT_EQ(clip_grad_norm({{"p", p}}, kInfinity, {.groups = {world.group()}}).value(), 6);
    // A plain parameter beside a split one is a copy, too.
    at::Tensor split = distribute_tensor(at::zeros({4}), mesh, {Shard{0}}).set_requires_grad(true);
    split.mutable_grad() = distribute_tensor(at::full({4}, 4.0), mesh, {Shard{0}});
    EXPECT_EQ(
        clip_grad_norm({{"p", p}, with_gradient("plain", at::full({4}, 6.0)), {"split", split}}, kInfinity)
            .value(),
        std::sqrt(36.0 + 144 + 64));
  });
}

// Of eight ranks, groups of four split one parameter as one axis, and another (of experts) as two axes; a
// third one is whole. Each counts once.
TEST(ClipGradNorm, NestedAxes) {
  const at::Tensor dense = numbers({8, 3}, 1), experts = numbers({2, 4}, 2), whole = numbers({5}, 3);
  const double expected = std::sqrt(
      at::cat({dense.flatten(), experts.flatten(), whole}).to(at::kDouble).square().sum().item<double>());
  std::mutex mutex;
  comm::run_ranks(8, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = world.mesh("cpu", {{"copies", 2}, {"shard", 2}, {"ep", 2}});
    const auto parameter = [&](const char* name, const at::Tensor& gradient, const comm::MeshGroups& over,
                               const Placements& placements) {
      at::Tensor p = distribute_tensor(at::zeros_like(gradient), over, placements).set_requires_grad(true);
      p.mutable_grad() = distribute_tensor(gradient, over, placements);
      return NamedParameter{name, p};
    };
    const comm::MeshGroups flat = mesh.with_mesh(mesh.mesh().flatten({"shard", "ep"}, "flat")),
                           both = mesh.with_mesh(mesh.mesh().slice({"shard", "ep"}));
    const NamedParameter one = parameter("dense", dense, flat, {Shard{0}}),
                         two = parameter("experts", experts, both, {Shard{1}, Shard{0}}),
                         three = with_gradient("whole", whole);
    for (const std::vector<NamedParameter>& all :
         {std::vector{one, two, three}, {two, one, three}, {three, two, one}}) {
      const double norm = clip_grad_norm(all, kInfinity).value();
      const std::lock_guard lock(mutex);
      EXPECT_NEAR(norm, expected, 1e-6 * expected);
    }
    // Split over one half of the other's ranks and copied over the rest: who counts is not decided.
    const NamedParameter half = parameter("half", experts, mesh.with_mesh(mesh.mesh()["ep"]), {Shard{0}});
    const std::string refused = message_of<NotImplemented>([&] { clip_grad_norm({one, half}, kInfinity); });
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(has_text(refused, "share more than this rank"));
  });
}

TEST(SettleGradients, AGradientOnOtherRanksIsRefusedWhateverItsPlacements) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world.rank(), 4));
    const comm::MeshGroups other(world, DeviceMesh("cpu", {2, 2}, {0, 2, 1, 3}, {"dp", "tp"}, world.rank()));
    for (const Placement& placement : {Placement(Shard{0}), Placement(Replicate{})}) {
      at::Tensor parameter =
          distribute_tensor(at::ones({4}), mesh, {Replicate{}, Shard{0}}, {.source_axis_rank = std::nullopt});
      parameter.mutable_grad() = distribute_tensor(at::ones({4}), other, {Replicate{}, placement},
                                                   {.source_axis_rank = std::nullopt});
      EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                             settle_gradients({{"p", parameter}});
                           }),
                           "over one mesh"));
    }
  });
}

TEST(ClipGradNorm, NotFinite) {
  for (const double order : {2.0, kInfinity})
    for (const double bad : {std::nan(""), kInfinity, -kInfinity}) {
      const NamedParameter good = with_gradient("good", at::full({4}, 3.0)),
                           broken =
                               with_gradient("broken", at::tensor({1.0F, static_cast<float>(bad), 2.0F}));
      const std::vector<NamedParameter> both{good, broken};
      const auto untouched = [&] {
        return at::equal(good.tensor.grad(), at::full({4}, 3.0)) &&
               broken.tensor.grad()[2].item<float>() == 2;
      };
      const ClipResult left = clip_grad_norm(both, 1, {.order = order});
      EXPECT_FALSE(left.finite());
      EXPECT_EQ(std::isnan(left.value()), std::isnan(bad));
      EXPECT_FALSE(left.skipped);
      EXPECT_TRUE(untouched());
      const ClipResult skipped = clip_grad_norm(both, 1, {.order = order, .non_finite = NonFinite::Skip});
      EXPECT_TRUE(skipped.skipped);
      EXPECT_TRUE(untouched());
      const std::string text = message_of<StateError>(
          [&] { clip_grad_norm(both, 1, {.order = order, .non_finite = NonFinite::Throw}); });
      EXPECT_TRUE(has_text(text, "gradients of broken,"));
      EXPECT_TRUE(untouched());
      EXPECT_EQ(non_finite_gradients(both), std::vector<std::string>{"broken"});
      EXPECT_FALSE(clip_grad_norm({good}, 1, {.order = order, .non_finite = NonFinite::Skip}).skipped);
    }
}

TEST(ClipGradNorm, NotFiniteOnOneRankIsKnownToAll) {
  for (const double order : {2.0, kInfinity})
    for (const double bad : {std::nan(""), kInfinity})
      for (const int where : {0, 1})
        comm::run_ranks(2, 60s, [&](comm::World& world) {
          const NamedParameter p = with_gradient("p" + std::to_string(world.rank()),
                                                 at::full({2}, world.rank() == where ? bad : 1.0));
          const ClipResult result = clip_grad_norm(
              {p}, 1, {.order = order, .groups = {world.group()}, .non_finite = NonFinite::Skip});
          EXPECT_TRUE(result.skipped);
          EXPECT_EQ(std::isnan(result.value()), std::isnan(bad)) << result.value();
          const std::string text = message_of<StateError>([&] {
            clip_grad_norm({p}, 1,
                           {.order = order, .groups = {world.group()}, .non_finite = NonFinite::Throw});
          });
          EXPECT_TRUE(has_text(
              text, world.rank() == where ? "gradients of p" + std::to_string(where) : "on another rank"));
        });
}

TEST(ClipGradNorm, BadInput) {
  const NamedParameter p = with_gradient("p", at::ones({2}));
  for (const double most : {0.0, -1.0, std::nan("")})
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { clip_grad_norm({p}, most); }), "max_norm"));
  for (const double order : {1.0, 0.0, -kInfinity, std::nan("")})
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { clip_grad_norm({p}, 1, {.order = order}); }), "order"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { clip_grad_norm({p}, 1, {.groups = {comm::Group()}}); }),
                       "empty handle"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         clip_grad_norm({p, with_gradient("p", at::ones({2}))}, 1);
                       }),
                       "two tensors"));
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const comm::Group first = world.new_group({0});
    const NamedParameter own = with_gradient("p", at::ones({2}));
    if (world.rank() == 1) {
      EXPECT_TRUE(has_text(message_of<ValueError>([&] { clip_grad_norm({own}, 1, {.groups = {first}}); }),
                           "groups that this rank is in"));
    }
  });
}

// Of the same size, so that only a comparison can detect that different gradients were summed.
TEST(SettleGradients, RanksWithDifferentGradientsAreNamed) {
  std::set<std::string> texts;
  std::mutex mutex;
  comm::run_ranks(2, 20s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
    std::vector<NamedParameter> parameters;
    for (const char* name : {"a", "b"})
      parameters.push_back(
          {name, distribute_tensor(at::zeros({3}), mesh, {Replicate{}}).detach().set_requires_grad(true)});
    const auto give = [&](std::size_t which) {
      parameters[which].tensor.mutable_grad() = from_local(at::ones({3}), mesh, {Partial{}});
    };
    // The same on both: summed.
    give(0);
    settle_gradients(parameters);
    EXPECT_TRUE(at::equal(to_local(parameters[0].tensor.grad()), at::full({3}, 2.f)));
    EXPECT_FALSE(parameters[1].tensor.grad().defined());
    parameters[0].tensor.mutable_grad() = at::Tensor();
    give(static_cast<std::size_t>(world.rank()));
    const std::string text = message_of<StateError>([&] { settle_gradients(parameters); });
    const std::lock_guard lock(mutex);
    texts.insert(text);
  });
  ASSERT_EQ(texts.size(), 2U);
  EXPECT_TRUE(has_text(*texts.begin(), "those of a on this rank"));
  EXPECT_TRUE(has_text(*texts.rbegin(), "those of b on this rank"));
}

}  // namespace clip_test
}  // namespace penstock::optim
