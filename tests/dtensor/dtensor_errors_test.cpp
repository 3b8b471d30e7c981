// What distributed tensors refuse, with which error, and that every rank reports it.
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/sharding_rule.h"
#include "tests/dtensor/rule_checker.h"
#include "tests/has_text.h"
#include "tests/throws.h"

// Operators defined by a user.
TORCH_LIBRARY_FRAGMENT(penstock_errors_test, library) {
  library.def("scale_rows(Tensor x, Tensor s) -> Tensor");
  library.def("without_rule(Tensor x) -> Tensor");
  library.def("twice(Tensor x) -> Tensor");
  library.def("twice_too(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock_errors_test, CompositeExplicitAutograd, library) {
  library.impl("scale_rows", [](const at::Tensor& x, const at::Tensor& s) { return x * s.unsqueeze(1); });
  library.impl("without_rule", [](const at::Tensor& x) { return x + 1; });
  library.impl("twice", [](const at::Tensor& x) { return at::cat({x, x}, 0); });
  library.impl("twice_too", [](const at::Tensor& x) { return at::cat({x, x}, 0); });
}

namespace penstock::test {
namespace dtensor_errors_test {

using namespace std::chrono_literals;
using Numbers = std::vector<std::int64_t>;

at::Tensor call(const char* name, const std::vector<at::Tensor>& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  op.callBoxed(&stack);
  return stack.at(0).toTensor();
}

comm::MeshGroups mesh_on(comm::World& world, const Numbers& shape,
                         const std::vector<std::string>& names = {}) {
  return {world, init_device_mesh("cpu", shape, names, world.rank(), world.size())};
}

// The message of each rank's own error. A rank that throws waits for all: no rank learns of the error by
// another's exit.
template <class Error>
std::vector<std::string> errors_of(int size, const std::function<void(comm::World&)>& body) {
  std::vector<std::string> messages(static_cast<std::size_t>(size));
  comm::run_ranks(size, 30s, [&](comm::World& world) {
    messages[static_cast<std::size_t>(world.rank())] = message_of<Error>([&] { body(world); });
    world.group().barrier().wait();
  });
  return messages;
}

template <class Error>
void expect_everywhere(int size, const std::vector<std::string>& parts,
                       const std::function<void(comm::World&)>& body) {
  for (const std::string& message : errors_of<Error>(size, body))
    for (const std::string& part : parts) EXPECT_TRUE(has_text(message, part));
}

TEST(DTensorErrors, TwoMeshesInOneOperator) {
  expect_everywhere<ValueError>(
      4, {"aten::add.Tensor", "dp=2 x tp=2", "DeviceMesh(cpu, tp=2", "expected one mesh", "full_tensor()"},
      [](comm::World& world) {
        const auto root = mesh_on(world, {2, 2}, {"dp", "tp"});
        const auto tp = root.with_mesh(root.mesh()["tp"]);
        const at::Tensor a = distribute_tensor(sample({4, 3}), root, {Shard{0}, Replicate{}}),
                         b = distribute_tensor(sample({4, 3}), tp, {Replicate{}});
        a + b;
      });
}

TEST(DTensorErrors, PlacementsOfTheWrongLength) {
  comm::run_ranks(2, 30s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2});
    const Placements two{Shard{0}, Replicate{}};
    const at::Tensor tensor = distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           distribute_tensor(sample({4, 3}), mesh, two);
                         }),
                         "[S(0), R]"));
    EXPECT_THROW(distribute_tensor(sample({4, 3}), mesh, {}), ValueError);
    EXPECT_THROW(from_local(sample({4, 3}), mesh, two), ValueError);
    EXPECT_THROW(redistribute(tensor, two), ValueError);
    EXPECT_THROW(to_local(tensor, {.grad_placements = two}), ValueError);
  });
}

TEST(DTensorErrors, ADimThatDoesNotExist) {
  comm::run_ranks(2, 30s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2});
    const at::Tensor tensor = distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
    for (const std::int64_t dim : {2, -3}) {
      const Placements bad{Shard{dim}};
      EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                             distribute_tensor(sample({4, 3}), mesh, bad);
                           }),
                           "expected a dim from -2 to 1"));
      EXPECT_THROW(from_local(sample({4, 3}), mesh, bad), ValueError);
      EXPECT_THROW(redistribute(tensor, bad), ValueError);
    }
    EXPECT_THROW(distribute_tensor(at::ones({}), mesh, {Shard{0}}), ValueError);
    EXPECT_THROW(distribute_tensor(sample({4, 3}), mesh, {StridedShard{0, 0}}), ValueError);
    EXPECT_EQ(placements_of(distribute_tensor(sample({4, 3}), mesh, {Shard{-1}})), (Placements{Shard{1}}));
  });
}

TEST(DTensorErrors, FromLocalComparesOverRanks) {
  const FromLocalOptions check{.check = true};
  // Valid: every rank passes, also with uneven and empty shards.
  comm::run_ranks(3, 30s, [&](comm::World& world) {
    const auto mesh = mesh_on(world, {3});
    EXPECT_EQ(from_local(sample({2, 3}), mesh, {Shard{0}}, check).sizes(), at::IntArrayRef({6, 3}));
    EXPECT_EQ(from_local(sample({world.rank() < 2 ? 1 : 0, 3}), mesh, {Shard{0}},
                         {.shape = Numbers{2, 3}, .check = true})
                  .sizes(),
              at::IntArrayRef({2, 3}));
    EXPECT_EQ(from_local(at::ones(Numbers(10, 1)), mesh, {Shard{9}}, check).dim(), 10);
  });
  // Invalid: all ranks report the same.
  expect_everywhere<ValueError>(
      3, {"the rank at (2)", "[15, 3]", "[12, 3]", "`shape`"}, [&](comm::World& world) {
        from_local(sample({world.rank() == 2 ? 5 : 4, 3}), mesh_on(world, {3}), {Shard{0}}, check);
      });
  expect_everywhere<ValueError>(
      3, {"the rank at (1)", "a local part of [3, 3]", "expected [2, 3], its part of"},
      [&](comm::World& world) {
        from_local(sample({world.rank() == 1   ? 3
                           : world.rank() == 0 ? 2
                                               : 1,
                           3}),
                   mesh_on(world, {3}), {Shard{0}}, {.shape = Numbers{5, 3}, .check = true});
      });
  expect_everywhere<ValueError>(2, {"the rank at (1)", "float64[4, 3]", "float32[4, 3]"},
                                [&](comm::World& world) {
                                  from_local(sample({2, 3}).to(world.rank() == 1 ? at::kDouble : at::kFloat),
                                             mesh_on(world, {2}), {Shard{0}}, check);
                                });
  expect_everywhere<
      ValueError>(2, {"the rank at (1)", "float32[3]", "float32[2, 3]"}, [&](comm::World& world) {
    from_local(world.rank() == 1 ? sample({3}) : sample({2, 3}), mesh_on(world, {2}), {Replicate{}}, check);
  });
  // The shapes alone would be valid on rank 0, and also on rank 1.
  expect_everywhere<ValueError>(2, {"the rank at (1)", "as [R]", "as [P(sum)]"}, [&](comm::World& world) {
    from_local(sample({2, 3}), mesh_on(world, {2}),
               {world.rank() == 1 ? Placement(Replicate{}) : Placement(Partial{})}, check);
  });
  expect_everywhere<ValueError>(
      2, {"the rank at (1)", "stride [1, 2]", "stride [3, 1]"}, [&](comm::World& world) {
        from_local(sample({2, 3}), mesh_on(world, {2}), {Replicate{}},
                   {.stride = world.rank() == 1 ? Numbers{1, 2} : Numbers{3, 1}, .check = true});
      });
  // On a mesh of two axes the coordinate of the faulty rank is correct.
  expect_everywhere<ValueError>(4, {"the rank at (1, 0)"}, [&](comm::World& world) {
    from_local(sample({world.rank() == 2 ? 3 : 2, 3}), mesh_on(world, {2, 2}), {Shard{0}, Shard{1}},
               {.shape = Numbers{4, 6}, .check = true});
  });
}

// One rank rejects its own arguments before the comparison: the others must not wait for it.
TEST(DTensorErrors, FromLocalReportsABadArgumentOfOneRank) {
  const auto messages = errors_of<ValueError>(2, [](comm::World& world) {
    from_local(world.rank() == 1 ? sample({3}) : sample({2, 3}), mesh_on(world, {2}), {Shard{1}},
               {.check = true});
  });
  EXPECT_TRUE(has_text(messages[0], "the rank at (1)"));
  EXPECT_TRUE(has_text(messages[0], "see the error of that rank"));
  EXPECT_TRUE(has_text(messages[1], "S(1)"));
}

TEST(DTensorErrors, FromLocalWithoutTheCheckLooksAtThisRank) {
  comm::run_ranks(2, 30s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2});
    const auto refuse = [&](const FromLocalOptions& options) {
      return message_of<ValueError>([&] { from_local(sample({2, 3}), mesh, {Shard{0}}, options); });
    };
    const std::string shape = refuse({.shape = Numbers{8, 3}, .check = false});
    EXPECT_TRUE(has_text(shape, "got [2, 3], expected [4, 3]"));
    EXPECT_TRUE(has_text(shape, "pass the global `shape`"));
    EXPECT_TRUE(has_text(refuse({.shape = Numbers{8}, .check = false}), "2 numbers each"));
    EXPECT_TRUE(has_text(refuse({.shape = Numbers{4, 3, 1}, .check = false}), "2 numbers each"));
    EXPECT_TRUE(has_text(refuse({.stride = Numbers{1}, .check = false}), "2 numbers each"));
    EXPECT_THROW(from_local(at::Tensor(), mesh, {Shard{0}}), ValueError);
  });
}

TEST(DTensorErrors, PlainTensorsAreRefused) {
  expect_everywhere<TypeError>(
      2,
      {"aten::mul.Tensor", "a plain tensor [4, 3] among distributed ones", "distribute_tensor",
       "ImplicitReplicationGuard"},
      [](comm::World& world) {
        distribute_tensor(sample({4, 3}), mesh_on(world, {2}), {Shard{0}}) * sample({4, 3});
      });
  comm::run_ranks(2, 30s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2});
    const at::Tensor value = sample({4, 3}), mask = sample({3}, 1);
    const at::Tensor tensor = distribute_tensor(value, mesh, {Shard{0}});
    EXPECT_THROW(at::cat({value, tensor}), TypeError);
    // Numbers, and tensors without dims, are the same everywhere.
    EXPECT_TRUE(at::equal(full_tensor(tensor * 2), value * 2));
    EXPECT_TRUE(at::equal(full_tensor(tensor + at::full({}, 0.5)), value + 0.5));
    {
      const ImplicitReplicationGuard outer;
      { const ImplicitReplicationGuard inner; }
      EXPECT_TRUE(ImplicitReplicationGuard::active());
      const at::Tensor product = tensor * mask;
      EXPECT_EQ(placements_of(product), (Placements{Shard{0}}));
      EXPECT_TRUE(at::equal(full_tensor(product), value * mask));
      EXPECT_TRUE(
          at::equal(full_tensor(tensor.masked_fill(mask > 0, -1e9)), value.masked_fill(mask > 0, -1e9)));
    }
    EXPECT_FALSE(ImplicitReplicationGuard::active());
    EXPECT_THROW(tensor * mask, TypeError);
    EXPECT_THROW(distribute_tensor(tensor, mesh, {Shard{0}}), TypeError);
    EXPECT_THROW(from_local(tensor, mesh, {Shard{0}}), TypeError);
    EXPECT_TRUE(has_text(message_of<TypeError>([&] { redistribute(value, {Shard{0}}); }),
                         "redistribute: got a plain tensor"));
    EXPECT_THROW(to_local(value), TypeError);
    EXPECT_THROW(full_tensor(value), TypeError);
    EXPECT_THROW(placements_of(at::Tensor()), TypeError);
  });
}

TEST(DTensorErrors, WritingAPlainTensor) {
  expect_everywhere<TypeError>(
      2, {"aten::add_.Tensor", "the tensor that is written", "out-of-place"}, [](comm::World& world) {
        const at::Tensor tensor = distribute_tensor(sample({4, 3}), mesh_on(world, {2}), {Shard{0}});
        const ImplicitReplicationGuard guard;
        at::Tensor plain = sample({4, 3});
        plain.add_(tensor);
      });
  // Also without the guard, and for tensors without dims.
  comm::run_ranks(2, 30s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2});
    at::Tensor plain = sample({4, 3}), number = at::ones({});
    EXPECT_THROW(plain.copy_(distribute_tensor(sample({4, 3}), mesh, {Shard{0}})), TypeError);
    EXPECT_THROW(number.add_(distribute_tensor(at::ones({}), mesh, {Replicate{}})), TypeError);
    EXPECT_TRUE(at::equal(plain, sample({4, 3})));
    EXPECT_EQ(number.item<float>(), 1);
  });
}

TEST(DTensorErrors, WritesThatAreNotPossible) {
  expect_everywhere<ValueError>(
      2, {"aten::relu_", "the tensor that is written", "[P(sum)]", "redistribute it first"},
      [](comm::World& world) {
        at::Tensor terms = spread(sample({4, 3}), mesh_on(world, {2}), {Partial{}});
        terms.relu_();
      });
  // 6 numbers over 4 ranks are 2, 2, 2, 0, but 2 rows are 1, 1, 0, 0: the view is a copy.
  expect_everywhere<StateError>(
      4, {"aten::add_", "a view that had to be redistributed", "clone()"}, [](comm::World& world) {
        const at::Tensor tensor = distribute_tensor(sample({6}), mesh_on(world, {4}), {Shard{0}});
        tensor.view({2, 3}).add_(1);
      });
}

TEST(DTensorErrors, AnOperatorWithoutARule) {
  expect_everywhere<NotImplemented>(
      2,
      {"penstock_errors_test::without_rule", "[4, 3] [S(0)]",
       "register_sharding_rule(\"penstock_errors_test::without_rule\"", "full_tensor()"},
      [](comm::World& world) {
        call("penstock_errors_test::without_rule",
             {distribute_tensor(sample({4, 3}), mesh_on(world, {2}), {Shard{0}})});
      });
}

TEST(DTensorErrors, PartialTargets) {
  expect_everywhere<ValueError>(2, {"distribute_tensor", "P(sum)", "from_local()"}, [](comm::World& world) {
    distribute_tensor(sample({4, 3}), mesh_on(world, {2}), {Partial{}});
  });
  expect_everywhere<ValueError>(2, {"P(sum)"}, [](comm::World& world) {
    redistribute(distribute_tensor(sample({4, 3}), mesh_on(world, {2}), {Replicate{}}), {Partial{}});
  });
  expect_everywhere<ValueError>(2, {"P(max)"}, [](comm::World& world) {
    redistribute(distribute_tensor(sample({4, 3}), mesh_on(world, {2}), {Shard{0}}),
                 {Partial{PartialOp::Max}});
  });
  expect_everywhere<ValueError>(2, {"P(avg)"}, [](comm::World& world) {
    redistribute(spread(sample({4, 3}), mesh_on(world, {2}), {Partial{}}), {Partial{PartialOp::Avg}});
  });
}

TEST(DTensorErrors, ARankOutsideOfTheMesh) {
  comm::run_ranks(3, 30s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2});
    if (world.rank() < 2) {
      EXPECT_TRUE(
          at::equal(full_tensor(distribute_tensor(sample({4, 3}), mesh, {Shard{0}})), sample({4, 3})));
      return;
    }
    for (const std::string& message : {message_of<ValueError>([&] {
                                         distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
                                       }),
                                       message_of<ValueError>([&] {
                                         from_local(sample({4, 3}), mesh, {Shard{0}}, {.check = true});
                                       })})
      EXPECT_TRUE(has_text(message, "rank 2, which is not in"));
  });
}

TEST(DTensorErrors, ASourceThatDoesNotExist) {
  for (const int source : {-1, 2})
    expect_everywhere<ValueError>(2, {"source_axis_rank", "0 to 1"}, [&](comm::World& world) {
      distribute_tensor(sample({4, 3}), mesh_on(world, {2}), {Shard{0}}, {.source_axis_rank = source});
    });
}

TEST(DTensorErrors, LocalGradientsThatDoNotFit) {
  expect_everywhere<ValueError>(
      2, {"to_local: the local gradient", "shape [4, 3]", "[2, 3]", "grad_placements"},
      [](comm::World& world) {
        const at::Tensor tensor =
            distribute_tensor(sample({4, 3}).requires_grad_(), mesh_on(world, {2}), {Replicate{}});
        to_local(tensor, {.grad_placements = Placements{Shard{0}}}).sum().backward();
      });
}

TEST(UserRule, OfACustomOperator) {
  register_sharding_rule("penstock_errors_test::scale_rows", [](const ShardingCall& call) {
    std::vector<AxisStrategy> ways{{{Shard{0}, Shard{0}}, {Shard{0}}},
                                   {{Shard{1}, Replicate{}}, {Shard{1}}},
                                   {{Partial{}, Replicate{}}, {Partial{}}}};
    return choose(call, ways);
  });
  EXPECT_TRUE(has_sharding_rule("penstock_errors_test::scale_rows"));
  EXPECT_THROW(register_sharding_rule("penstock_errors_test::scale_rows", replicate_all), StateError);
  EXPECT_THROW(register_sharding_rule("scale_rows", replicate_all), ValueError);
  check_rule({.name = "scale_rows",
              .inputs = {sample({5, 3}), sample({5}, 1)},
              .body = [](const Tensors& in) { return Tensors{call("penstock_errors_test::scale_rows", in)}; },
              .backward = false});
  // The rule determines the placements.
  comm::run_ranks(2, 30s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2});
    const auto placed = [&](const Placement& x, const Placement& s) {
      return placements_of(call("penstock_errors_test::scale_rows",
                                {spread(sample({5, 3}), mesh, {x}), spread(sample({5}, 1), mesh, {s})}))[0];
    };
    EXPECT_EQ(placed(Shard{0}, Shard{0}), Placement(Shard{0}));
    EXPECT_EQ(placed(Shard{1}, Replicate{}), Placement(Shard{1}));
    EXPECT_EQ(placed(Partial{}, Replicate{}), Placement(Partial{}));
    EXPECT_EQ(placed(Replicate{}, Replicate{}), Placement(Replicate{}));
  });
}

TEST(UserRule, AWrongRuleIsDetected) {
  // Columns of the parts are not rows of the whole.
  register_sharding_rule("penstock_errors_test::twice", [](const ShardingCall& call) {
    return choose(call, {{{Shard{1}}, {Shard{0}}}});
  });
  expect_everywhere<InvariantError>(
      2, {"penstock_errors_test::twice", "the local result is float32[8, 2]", "is [4, 4]", "does not fit"},
      [](comm::World& world) {
        call("penstock_errors_test::twice",
             {distribute_tensor(sample({4, 4}), mesh_on(world, {2}), {Shard{1}})});
      });
  // No placements for the input.
  register_sharding_rule("penstock_errors_test::twice_too", [](const ShardingCall& call) {
    return Sharding{{}, {{Shard{0}}}, {}, {}};
  });
  expect_everywhere<InvariantError>(
      2, {"penstock_errors_test::twice_too", "1 inputs and 1 outputs"}, [](comm::World& world) {
        call("penstock_errors_test::twice_too",
             {distribute_tensor(sample({4, 4}), mesh_on(world, {2}), {Shard{1}})});
      });
  // A better rule replaces it, and cached decisions are dropped.
  replace_sharding_rule("penstock_errors_test::twice", [](const ShardingCall& call) {
    return choose(call, {{{Shard{1}}, {Shard{1}}}});
  });
  comm::run_ranks(2, 30s, [](comm::World& world) {
    const at::Tensor result = call("penstock_errors_test::twice",
                                   {distribute_tensor(sample({4, 4}), mesh_on(world, {2}), {Shard{1}})});
    EXPECT_EQ(placements_of(result), (Placements{Shard{1}}));
    EXPECT_TRUE(at::equal(full_tensor(result), at::cat({sample({4, 4}), sample({4, 4})})));
  });
}

TEST(UserRule, AnOperatorThatIsNewLeavesOtherDecisionsAlone) {
  comm::run_ranks(1, 30s, [](comm::World& world) {
    const at::Tensor tensor = distribute_tensor(sample({4, 4}), mesh_on(world, {1}), {Shard{0}});
    clear_sharding_cache();
    tensor.sin();
    tensor.cos();
    EXPECT_EQ(sharding_cache_stats().entries, 2u);
    const auto before = sharding_cache_stats();
    tensor.sin();
    EXPECT_EQ(sharding_cache_stats().hits, before.hits + 1);
    EXPECT_EQ(sharding_cache_stats().misses, before.misses);
  });
}

}  // namespace dtensor_errors_test
}  // namespace penstock::test
