// Collectives, side effects and tensor subclasses inside captured functions, and what backward rejects.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "penstock/comm/group/operators.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/rewrite.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock::graph {
namespace captured_effects_test {

using namespace std::chrono_literals;
using comm::ReduceOp;
namespace functional = comm::functional;
using test::has_text;
using test::message_of;

std::size_t count_of(const Graph& graph, const std::string& name) {
  return static_cast<std::size_t>(
      std::count_if(graph.nodes.begin(), graph.nodes.end(),
                    [&](const Node& node) { return node.op.operator_name().name == name; }));
}

TEST(CapturedCollectives, RunAsInThePlainFunction) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::Group group = world.group();
    const Function function = [&](const Values& in) -> Values {
      const at::Tensor x = in[0].toTensor(), w = in[1].toTensor();
      functional::broadcast(x.detach() * 3, 0, group);  // unused here, but the other ranks take part
      const at::Tensor sum = functional::wait_tensor(functional::all_reduce(x * w, ReduceOp::Sum, group));
      return {functional::wait_tensor(functional::all_gather(sum.sin(), group)).pow(2).sum()};
    };
    Compiled compiled(function);
    for (int step = 0; step < 2; ++step) {
      auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(10 * step + world.rank()));
      const at::Tensor x = at::randn({4, 3}, generator), w = at::randn({4, 3}, generator).requires_grad_();
      const at::Tensor expected = function({x, w})[0].toTensor();
      expected.backward();
      const at::Tensor gradient = w.grad().clone();
      w.mutable_grad() = at::Tensor();
      const at::Tensor actual = compiled({x, w})[0].toTensor();
      actual.backward();
      EXPECT_TRUE(at::equal(actual, expected)) << "rank " << world.rank();
      EXPECT_TRUE(at::equal(w.grad(), gradient)) << "rank " << world.rank();
    }
    const Partition& halves = compiled.partition(0);
    EXPECT_EQ(count_of(halves.forward, "penstock::broadcast"), 1u);
    EXPECT_EQ(count_of(halves.forward, "penstock::all_reduce"), 1u);
    EXPECT_EQ(count_of(halves.backward, "penstock::all_reduce"), 1u);
    EXPECT_EQ(count_of(halves.backward, "penstock::reduce_scatter_tensor"), 1u);
  });
}

// Ordered by tokens, the collectives of both halves send what the plain function sends.
TEST(CapturedCollectives, WithTokens) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::Group group = world.group();
    const Function function = [&](const Values& in) -> Values {
      const at::Tensor x = in[0].toTensor(), w = in[1].toTensor();
      functional::broadcast(x.detach() * 3, 0, group);
      const at::Tensor sum = functional::wait_tensor(functional::all_reduce(x * w, ReduceOp::Sum, group));
      return {functional::wait_tensor(functional::all_gather(sum.sin(), group)).pow(2).sum()};
    };
    for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
      Compiled compiled(function, {.partitioner = partitioner, .effect_tokens = true});
      for (int step = 0; step < 2; ++step) {
        auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(10 * step + world.rank()));
        const at::Tensor x = at::randn({4, 3}, generator), w = at::randn({4, 3}, generator).requires_grad_();
        const at::Tensor expected = function({x, w})[0].toTensor();
        expected.backward();
        const at::Tensor gradient = w.grad().clone();
        w.mutable_grad() = at::Tensor();
        const at::Tensor actual = compiled({x, w})[0].toTensor();
        actual.backward();
        EXPECT_TRUE(at::equal(actual, expected)) << "rank " << world.rank();
        EXPECT_TRUE(at::equal(w.grad(), gradient)) << "rank " << world.rank();
      }
      const Partition& halves = compiled.partition(0);
      EXPECT_EQ(count_of(halves.forward, "penstock_effect::penstock__broadcast"), 1u);
      EXPECT_EQ(count_of(halves.forward, "penstock_effect::penstock__all_reduce"), 1u);
      EXPECT_EQ(count_of(halves.backward, "penstock_effect::penstock__all_reduce"), 1u);
      EXPECT_EQ(count_of(halves.backward, "penstock_effect::penstock__reduce_scatter_tensor"), 1u);
      EXPECT_EQ(compiled.meta(0).tokens, std::vector<std::string>{"ordered"});
      EXPECT_EQ(compiled.meta(0).backward_tokens, 1u);
    }
  });
}

TEST(CapturedCollectives, AreNeitherDroppedNorMerged) {
  const comm::World world = comm::World::fake(0, 4);
  const comm::Group& group = world.group();
  Graph graph = capture_forward(
      [&](const Values& in) -> Values {
        const at::Tensor x = in[0].toTensor();
        functional::all_reduce(x, ReduceOp::Sum, group);
        return {functional::wait_tensor(functional::all_reduce(x, ReduceOp::Sum, group)) +
                functional::wait_tensor(functional::all_reduce(x, ReduceOp::Sum, group))};
      },
      {at::ones({3})});
  EXPECT_EQ(remove_dead_nodes(graph), 0u);
  merge_common_subexpressions(graph);
  EXPECT_EQ(count_of(graph, "penstock::all_reduce"), 3u);
}

TEST(CapturedSubclasses, MadeInsideAreFlattened) {
  using sample::Boxed;
  using sample::Two;
  const Function function = [](const Values& in) -> Values {
    const at::Tensor boxed = Boxed::make(in[0].toTensor());
    const at::Tensor both = Two::make(boxed * 2, Boxed::make(in[1].toTensor()));  // a subclass of a subclass
    const at::Tensor result = (both + 1).relu().t();
    const auto inner = [](const at::Tensor& tensor) { return payload_as<Boxed>(tensor)->inner; };
    return {inner(payload_as<Two>(result)->a), inner(payload_as<Two>(result)->b)};
  };
  const at::Tensor x = at::randn({2, 3}), y = at::randn({2, 3});
  const at::NoGradGuard no_grad;
  const Graph graph = capture_forward(function, {x, y});
  std::vector<std::string> names;
  for (const Node& node : graph.nodes) names.push_back(node.op.operator_name().name);
  EXPECT_EQ(names, (std::vector<std::string>{"aten::mul", "aten::add", "aten::add", "aten::relu",
                                             "aten::relu", "aten::t", "aten::t"}));
  const auto results = Executor(graph)({x, y});
  EXPECT_TRUE(at::equal(results[0].toTensor(), (x * 2 + 1).relu().t()));
  EXPECT_TRUE(at::equal(results[1].toTensor(), (y + 1).relu().t()));
}

TEST(CapturedSubclasses, OfAnUnknownKindAreErrorsThatNameThem) {
  using sample::Boxed;
  Compiled compiled([](const Values& in) -> Values { return {in[0].toTensor() * 2}; });
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { compiled({Boxed::make(at::ones({3}))}); }), "Boxed"));
  EXPECT_TRUE(has_text(message_of<StateError>([] {
                         capture_forward(
                             [](const Values& in) -> Values { return {Boxed::make(in[0].toTensor())}; },
                             {at::ones({3})});
                       }),
                       "Boxed"));
}

TEST(CapturedBackward, RefusesWhatItWasNotCapturedFor) {
  Compiled compiled([](const Values& in) -> Values { return {in[0].toTensor().sin()}; });
  const at::Tensor x = at::ones({3}).requires_grad_();
  // Deterministic algorithms enabled between forward and backward.
  const at::Tensor first = compiled({x})[0].toTensor();
  at::globalContext().setDeterministicAlgorithms(true, false);
  EXPECT_TRUE(has_text(message_of<StateError>([&] { first.sum().backward(); }), "deterministic algorithms"));
  const at::Tensor second = compiled({x})[0].toTensor();
  second.sum().backward();  // on in both
  at::globalContext().setDeterministicAlgorithms(false, false);
  // A gradient of another tensor kind.
  const at::Tensor third = compiled({x})[0].toTensor();
  EXPECT_TRUE(has_text(message_of<TypeError>([&] { third.backward(sample::Boxed::make(at::ones({3}))); }),
                       "a tensor of kind Boxed"));
  // The rejected call has consumed nothing.
  x.mutable_grad() = at::Tensor();
  third.backward(at::ones({3}));
  EXPECT_TRUE(at::equal(x.grad(), x.detach().cos()));
  EXPECT_TRUE(has_text(message_of<c10::Error>([&] { third.backward(at::ones({3})); }), "second time"));
  // Of another dtype: autograd converts it, as usual.
  x.mutable_grad() = at::Tensor();
  compiled({x})[0].toTensor().backward(at::ones({3}, at::kDouble));
  EXPECT_TRUE(at::equal(x.grad(), x.detach().cos()));
}

}  // namespace captured_effects_test
}  // namespace penstock::graph
