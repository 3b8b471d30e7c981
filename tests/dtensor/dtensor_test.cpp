// Distributed tensors: creating, converting and redistributing them, their gradients, and the communication
// involved.
#include "penstock/dtensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <mutex>
#include <random>

#include "penstock/comm/record/recorder.h"
#include "penstock/dtensor/plan/redistribute_plan.h"
#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/sharding_rule.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock {
namespace dtensor_test {

using namespace std::chrono_literals;
using test::sample;
using test::spread;
using Numbers = std::vector<std::int64_t>;

void on_mesh(const Numbers& shape, const std::vector<std::string>& names,
             const std::function<void(const comm::MeshGroups&)>& body) {
  int size = 1;
  for (const std::int64_t n : shape) size *= static_cast<int>(n);
  comm::run_ranks(size, 120s, [&](comm::World& world) {
    body({world, init_device_mesh("cpu", shape, names, world.rank(), size)});
  });
}

// The part of a whole tensor that a rank holds.
at::Tensor part_of(const at::Tensor& whole, const comm::MeshGroups& mesh, const Placements& placements) {
  at::Tensor part = whole;
  const auto dims = local_segments(whole.sizes().vec(), mesh.shape(), mesh.coordinate(), placements);
  for (std::size_t dim = 0; dim < dims.size(); ++dim) {
    std::vector<at::Tensor> pieces{part.narrow(static_cast<std::int64_t>(dim), 0, 0)};
    for (const Segment& segment : dims[dim])
      pieces.push_back(part.narrow(static_cast<std::int64_t>(dim), segment.offset, segment.length));
    part = at::cat(pieces, static_cast<std::int64_t>(dim));
  }
  return part;
}

std::vector<Placements> random_placements(std::size_t axes, std::int64_t ndim, std::mt19937& random,
                                          bool partial, std::size_t count) {
  std::vector<Placements> all;
  for (std::size_t i = 0; i < count; ++i) {
    Placements placements;
    for (std::size_t axis = 0; axis < axes; ++axis) {
      const auto dim = static_cast<std::int64_t>(random() % static_cast<unsigned>(ndim));
      switch (random() % (partial ? 5 : 4)) {
        case 0:
          placements.push_back(Replicate{});
          break;
        case 1:
        case 2:
          placements.push_back(Shard{dim});
          break;
        case 3:
          placements.push_back(StridedShard{dim, 2 + static_cast<std::int64_t>(random() % 3)});
          break;
        default:
          placements.push_back(Partial{});
          break;
      }
    }
    all.push_back(std::move(placements));
  }
  return all;
}

TEST(DTensor, EveryRankHoldsItsPart) {
  on_mesh({2, 2}, {"dp", "tp"}, [](const comm::MeshGroups& mesh) {
    std::mt19937 random(3);
    for (const Placements& placements : random_placements(2, 2, random, false, 30)) {
      const at::Tensor whole = sample({5, 6});
      // Only the source's values are used.
      const bool source = mesh.coordinate() == Numbers{1, 1};
      const at::Tensor x =
          distribute_tensor(source ? whole : at::zeros({5, 6}), mesh, placements, {.source_axis_rank = 1});
      EXPECT_EQ(x.sizes(), at::IntArrayRef({5, 6}));
      EXPECT_TRUE(at::equal(to_local(x), part_of(whole, mesh, placements))) << to_string(placements);
      EXPECT_TRUE(at::equal(full_tensor(x), whole)) << to_string(placements);
    }
  });
}

// Any placements to any others, on meshes of one, two and three axes, uneven and empty parts included.
TEST(DTensor, RedistributeKeepsTheValue) {
  for (const Numbers& shape : {Numbers{3}, Numbers{2, 2}, Numbers{2, 2, 2}, Numbers{1, 3}})
    on_mesh(shape, {}, [&](const comm::MeshGroups& mesh) {
      std::mt19937 random(11);
      for (const Numbers& size : {Numbers{5, 3}, Numbers{8, 4, 3}, Numbers{2}}) {
        const at::Tensor whole = sample(size);
        const auto from = random_placements(shape.size(), whole.dim(), random, true, 12);
        const auto to = random_placements(shape.size(), whole.dim(), random, false, 12);
        for (std::size_t i = 0; i < from.size(); ++i) {
          const at::Tensor y = redistribute(spread(whole, mesh, from[i]), to[i], {.async = i % 2 == 1});
          EXPECT_EQ(placements_of(y), to[i]);
          EXPECT_TRUE(at::equal(to_local(y), part_of(whole, mesh, to[i])))
              << to_string(from[i]) << " to " << to_string(to[i]);
        }
      }
    });
}

TEST(DTensor, EveryKindOfPartial) {
  on_mesh({3}, {"tp"}, [](const comm::MeshGroups& mesh) {
    const auto rank = static_cast<double>(mesh.coordinate()[0]);
    const at::Tensor term = at::tensor({1.0, 2.0, 3.0, 4.0}) * (rank + 1) * (rank == 1 ? -1 : 1);
    const std::vector<std::pair<PartialOp, std::vector<double>>> expected{
        {PartialOp::Sum, {2, 4, 6, 8}},
        {PartialOp::Avg, {2.0 / 3, 4.0 / 3, 2, 8.0 / 3}},
        {PartialOp::Min, {-2, -4, -6, -8}},
        {PartialOp::Max, {3, 6, 9, 12}},
        {PartialOp::Product, {-6, -48, -162, -384}}};
    for (const auto& [op, values] : expected) {
      const at::Tensor x = from_local(term, mesh, {Partial{op}});
      EXPECT_TRUE(at::allclose(full_tensor(x), at::tensor(values))) << to_text(op);
      EXPECT_TRUE(at::allclose(full_tensor(redistribute(x, {Shard{0}})), at::tensor(values))) << to_text(op);
    }
  });
}

TEST(DTensor, GradientsComeBackInPlacements) {
  on_mesh({2}, {"tp"}, [](const comm::MeshGroups& mesh) {
    const at::Tensor whole = sample({4, 3});
    // Of the parts given to from_local: plain, with the same placements.
    at::Tensor local = part_of(whole, mesh, {Shard{0}}).clone().requires_grad_();
    at::Tensor x = from_local(local, mesh, {Shard{0}});
    full_tensor(x * x).sum().backward();
    EXPECT_FALSE(is_dtensor(local.grad()));
    EXPECT_TRUE(at::equal(local.grad(), 2 * local.detach()));
    // Of a replicated tensor whose parts are used separately: the sum of both, if requested.
    at::Tensor w = distribute_tensor(sample({3}, 1), mesh, {Replicate{}}).requires_grad_();
    const auto rank = static_cast<double>(mesh.coordinate()[0]);
    (to_local(w, {.grad_placements = Placements{Partial{}}}) * (rank + 1)).sum().backward();
    EXPECT_TRUE(placements_of(w.grad())[0].is_partial());
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::full({3}, 3.0)));
    // Two uses add up, in the placements of the first.
    (to_local(w, {.grad_placements = Placements{Partial{}}}) * (rank + 1)).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::full({3}, 6.0)));
    // Of a partial value: the gradient of the sum.
    at::Tensor term = sample({3}, 2).requires_grad_();
    full_tensor(from_local(term, mesh, {Partial{}}) * distribute_tensor(sample({3}, 3), mesh, {Replicate{}}))
        .sum()
        .backward();
    EXPECT_TRUE(at::equal(term.grad(), sample({3}, 3)));
  });
}

// Redistribution sends what its plan requires: the process's recorder sees all ranks of the world of threads.
TEST(DTensor, SendsWhatThePlanNeeds) {
  struct Step {
    Placements from, to;
    std::string operation;  // empty: nothing may be sent
    std::uint64_t bytes;    // by all four ranks together, as the operation counts them
  };
  constexpr std::uint64_t kWhole = 8 * 8 * 4;
  const std::vector<Step> steps{
      {{Shard{0}, Replicate{}}, {Replicate{}, Replicate{}}, "all_gather", 4 * kWhole},
      {{Replicate{}, Replicate{}}, {Shard{0}, Shard{1}}, "", 0},
      {{Partial{}, Replicate{}}, {Shard{0}, Replicate{}}, "reduce_scatter", 4 * kWhole},
      {{Partial{}, Shard{0}}, {Replicate{}, Shard{0}}, "all_reduce", 2 * kWhole},
      {{Shard{0}, Replicate{}}, {Shard{1}, Replicate{}}, "all_to_all", 2 * kWhole},
      // The slice comes first: only a quarter is reduced and scattered.
      {{Partial{}, Replicate{}}, {Shard{0}, Shard{1}}, "reduce_scatter", 2 * kWhole},
      {{Shard{0}, Shard{1}}, {Shard{0}, Shard{1}}, "", 0},
  };
  for (const Step& step : steps) {
    comm::Recorder& recorder = comm::Recorder::global();
    std::mutex mutex;
    std::map<std::string, comm::OperationTotals> totals;
    on_mesh({2, 2}, {"dp", "tp"}, [&](const comm::MeshGroups& mesh) {
      const at::Tensor x = spread(sample({8, 8}), mesh, step.from);
      for (int axis = 0; axis < 2; ++axis) mesh.group(axis).barrier().wait();
      for (int axis = 0; axis < 2; ++axis) mesh.group(axis).barrier().wait();
      if (mesh.mesh().this_rank() == 0) recorder.reset_totals();
      for (int axis = 0; axis < 2; ++axis) mesh.group(axis).barrier().wait();
      const at::Tensor y = redistribute(x, step.to);
      for (int axis = 0; axis < 2; ++axis) mesh.group(axis).barrier().wait();
      if (mesh.mesh().this_rank() == 0) {
        const std::lock_guard lock(mutex);
        totals = recorder.totals();
      }
      for (int axis = 0; axis < 2; ++axis) mesh.group(axis).barrier().wait();
    });
    totals.erase("barrier");
    const std::string where = to_string(step.from) + " to " + to_string(step.to);
    if (step.operation.empty()) {
      EXPECT_TRUE(totals.empty()) << where << ": " << totals.begin()->first;
    } else {
      ASSERT_EQ(totals.size(), 1u) << where;
      EXPECT_EQ(totals.begin()->first, step.operation) << where;
      EXPECT_EQ(totals.begin()->second.bytes, step.bytes) << where;
      EXPECT_EQ(totals.begin()->second.operations, 4u) << where;
    }
  }
}

// Operators that need no communication send nothing, and are decided once.
TEST(DTensor, DecisionsAreCached) {
  on_mesh({2}, {"tp"}, [](const comm::MeshGroups& mesh) {
    const at::Tensor x = distribute_tensor(sample({4, 3}), mesh, {Shard{0}}),
                     w = distribute_tensor(sample({3, 6}, 1), mesh, {Replicate{}});
    clear_sharding_cache();
    for (int i = 0; i < 5; ++i) (x.mm(w) * (0.5 + i)).relu();
    const ShardingCacheStats before = sharding_cache_stats();
    EXPECT_EQ(before.entries, 3u);
    for (int i = 0; i < 5; ++i) (x.mm(w) * (7.5 + i)).relu();
    EXPECT_EQ(sharding_cache_stats().misses, before.misses);
    EXPECT_EQ(sharding_cache_stats().hits, before.hits + 15);
  });
}

TEST(DTensor, PendingValuesAreWaitedFor) {
  on_mesh({2}, {"tp"}, [](const comm::MeshGroups& mesh) {
    const at::Tensor whole = sample({6, 4}), x = distribute_tensor(whole, mesh, {Shard{1}}).requires_grad_();
    const at::Tensor a = redistribute(x, {Replicate{}}, {.async = true}),
                     b = redistribute(x, {Shard{0}}, {.async = true});
    EXPECT_EQ(a.sizes(), whole.sizes());
    EXPECT_TRUE(at::equal(full_tensor(b), whole));
    EXPECT_TRUE(at::equal(to_local(a), whole));
    (a * 2).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), at::full({6, 4}, 2.0)));
    // Dropped without being used: the transfer completes nevertheless.
    redistribute(x, {Replicate{}}, {.async = true});
  });
}

TEST(DTensor, OptimizersWork) {
  const auto train =
      [](const std::function<at::Tensor(const at::Tensor&)>& place,
         const std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>& make) {
        at::Tensor w = place(sample({6, 4})).requires_grad_();
        const at::Tensor x = place(sample({6, 4}, 1));
        const auto optimizer = make({w});
        for (int step = 0; step < 4; ++step) {
          optimizer->zero_grad();
          ((w * x).tanh() * w).sum().backward();
          optimizer->step();
        }
        return is_dtensor(w) ? full_tensor(w.detach()) : w.detach();
      };
  const std::vector<std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>>
      optimizers{[](auto parameters) {
                   return std::make_unique<torch::optim::SGD>(
                       parameters, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
                 },
                 [](auto parameters) {
                   return std::make_unique<torch::optim::AdamW>(
                       parameters, torch::optim::AdamWOptions(0.1).amsgrad(true));
                 },
                 [](auto parameters) {
                   return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.1));
                 },
                 [](auto parameters) {
                   return std::make_unique<torch::optim::RMSprop>(
                       parameters, torch::optim::RMSpropOptions(0.1).centered(true).momentum(0.5));
                 },
                 [](auto parameters) {
                   return std::make_unique<torch::optim::Adagrad>(parameters,
                                                                  torch::optim::AdagradOptions(0.1));
                 }};
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    const at::Tensor expected = train([](const at::Tensor& t) { return t.clone(); }, optimizers[i]);
    on_mesh({2}, {"tp"}, [&](const comm::MeshGroups& mesh) {
      for (const Placement& placement : {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})})
        // Nothing is summed over ranks: bitwise equal.
        EXPECT_TRUE(
            at::equal(train([&](const at::Tensor& t) { return distribute_tensor(t, mesh, {placement}); },
                            optimizers[i]),
                      expected))
            << i << " " << placement.to_string();
    });
  }
}

// Also where nothing is copied to redistribute: a slice of dense memory, an axis of one rank.
TEST(DTensor, AWriteToARedistributedTensorDoesNotChangeItsSource) {
  const std::vector<std::pair<Placement, Placement>> changes{
      {Replicate{}, Shard{0}}, {Replicate{}, Shard{1}},  {Shard{0}, Replicate{}},
      {Shard{1}, Shard{0}},    {Partial{}, Replicate{}}, {Partial{}, Shard{0}}};
  for (const std::int64_t ranks : {1, 2})
    on_mesh({ranks}, {"tp"}, [&](const comm::MeshGroups& mesh) {
      for (const Numbers& shape : {Numbers{4, 6}, Numbers{1, 6}})
        for (const auto& [from, to] : changes)
          for (const bool async : {false, true}) {
            const at::Tensor x = spread(sample(shape), mesh, {from});
            const at::Tensor before = to_local(x).clone();
            at::Tensor y = redistribute(x, {to}, {.async = async});
            y.add_(1);
            EXPECT_TRUE(at::equal(to_local(x), before))
                << from.to_string() << " to " << to.to_string() << " on " << ranks << " ranks";
            EXPECT_TRUE(at::allclose(full_tensor(y), sample(shape) + 1));
          }
    });
}

TEST(DTensor, GradientsOfTwoParametersDoNotShareMemory) {
  for (const std::int64_t ranks : {1, 2})
    on_mesh({ranks}, {"tp"}, [](const comm::MeshGroups& mesh) {
      const at::Tensor a = distribute_tensor(sample({4, 3}), mesh, {Shard{0}}).set_requires_grad(true),
                       b = distribute_tensor(sample({4, 3}), mesh, {Replicate{}}).set_requires_grad(true),
                       c = distribute_tensor(sample({4, 3}, 2), mesh, {Replicate{}});
      ((redistribute(a, {Replicate{}}) + b) * c).sum().backward();
      a.mutable_grad().zero_();
      EXPECT_TRUE(at::allclose(full_tensor(b.grad()), sample({4, 3}, 2)));
    });
}

TEST(DTensor, ExtremesKeepNaN) {
  on_mesh({3}, {"tp"}, [](const comm::MeshGroups& mesh) {
    for (const std::int64_t row : {0, 2, 4}) {  // on each rank in turn
      at::Tensor x = sample({6, 3}).clone();
      x[row][1] = std::numeric_limits<double>::quiet_NaN();
      const at::Tensor split = distribute_tensor(x, mesh, {Shard{0}});
      EXPECT_TRUE(full_tensor(split.amax()).isnan().item<bool>()) << row;
      EXPECT_TRUE(full_tensor(split.min()).isnan().item<bool>()) << row;
      EXPECT_TRUE(at::allclose(full_tensor(split.amin(0)), x.amin(0), 0, 0, /*equal_nan=*/true)) << row;
    }
  });
}

TEST(DTensor, AHalfMeanOverASplitDimStaysInRange) {
  on_mesh({2}, {"tp"}, [](const comm::MeshGroups& mesh) {
    const at::Tensor x = distribute_tensor(at::full({4096, 3}, 100.0, at::kHalf), mesh, {Shard{0}});
    for (const at::Tensor& mean : {x.mean(), x.mean(0), x.mean(0, true)}) {
      EXPECT_EQ(mean.scalar_type(), at::kHalf);
      const at::Tensor whole = full_tensor(mean).to(at::kFloat);
      EXPECT_TRUE(at::equal(whole, at::full_like(whole, 100)));
    }
  });
}

TEST(DTensor, DescribesItself) {
  on_mesh({2, 2}, {"dp", "tp"}, [](const comm::MeshGroups& mesh) {
    const at::Tensor x = distribute_tensor(sample({5, 3}), mesh, {Shard{0}, Replicate{}});
    if (mesh.coordinate() == Numbers{1, 0}) {
      EXPECT_EQ(describe_dtensor(x),
                "DTensor(float32[5, 3] as [S(0), R], local [2, 3] at (1, 0) of DeviceMesh(cpu, dp=2 x tp=2, "
                "ranks [[0,1],[2,3]]))");
    }
    EXPECT_EQ(local_shape_of(x)[0], mesh.coordinate()[0] == 0 ? 3 : 2);
  });
}

}  // namespace dtensor_test
}  // namespace penstock
