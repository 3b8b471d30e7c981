// The pass "collectives": what it moves, what keeps its place, and that ranks compute the same with it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "penstock/comm/group/operators.h"
#include "penstock/graph/passes/pass_check.h"
#include "penstock/graph/passes/pass_list.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/world.h"
#include "tests/graph/call_trace.h"

namespace penstock::graph {
namespace collectives_pass_test {
namespace {

namespace functional = comm::functional;

PassPointer collectives() {
  for (const PassPointer& pass : standard_passes())
    if (pass->name() == "collectives") return pass;
  return nullptr;
}

// The operators of a graph, one after the other: "mm all_reduce wait_tensor".
std::string operators_of(const Graph& graph) {
  std::string text;
  for (const Node& node : graph.nodes) {
    const std::string& name = node.op.operator_name().name;
    text += (text.empty() ? "" : " ") + name.substr(name.find("::") + 2);
  }
  return text;
}

struct Order {
  std::string before, after;
};
Order order_of(const std::function<Tensors(const Tensors&)>& function, std::size_t inputs) {
  const at::NoGradGuard no_grad;
  const FunctionCapture capture =
      capture_function(over_tensors(function), values_of(Tensors(inputs, torch::ones({2, 2}))));
  const Graph after = collectives()->run(capture.joint.graph, PassContext());
  check_pass(capture.joint.graph, after, "collectives");
  return {operators_of(capture.joint.graph), operators_of(after)};
}

at::Tensor sum_of(const at::Tensor& x, const comm::Group& group) {
  return functional::wait_tensor(functional::all_reduce(x, comm::ReduceOp::Sum, group));
}

}  // namespace

TEST(CollectivesPass, WaitsMoveDownAndStartsMoveUp) {
  comm::run_ranks(1, std::chrono::seconds(60), [&](comm::World& world) {
    const comm::Group group = world.group();
    const Order wait = order_of(
        [&](const Tensors& in) {
          const at::Tensor sum = sum_of(in[0], group);
          return Tensors{in[1].sin().cos() + sum};
        },
        2);
    EXPECT_EQ(wait.before, "all_reduce wait_tensor sin cos add");
    EXPECT_EQ(wait.after, "all_reduce sin cos wait_tensor add");
    const Order start = order_of(
        [&](const Tensors& in) {
          const at::Tensor y = in[0].exp(), other = in[1].sin().cos(), sum = sum_of(y, group);
          return Tensors{other + sum};
        },
        2);
    // Collectives and draws may change places.
    const Order draw = order_of(
        [&](const Tensors& in) {
          const at::Tensor y = in[0].exp(), drawn = torch::bernoulli(in[1]), sum = sum_of(y, group);
          return Tensors{drawn + sum};
        },
        2);
    EXPECT_EQ(draw.before, "exp bernoulli all_reduce wait_tensor add");
    EXPECT_EQ(draw.after, "exp all_reduce bernoulli wait_tensor add");
    EXPECT_EQ(start.before, "exp sin cos all_reduce wait_tensor add");
    EXPECT_EQ(start.after, "exp all_reduce sin cos wait_tensor add");
    // Nothing is between: nothing moves.
    const Order tight =
        order_of([&](const Tensors& in) { return Tensors{sum_of(in[0].exp(), group).sin()}; }, 1);
    EXPECT_EQ(tight.before, tight.after);
  });
}

TEST(CollectivesPass, StartsKeepTheirOrder) {
  comm::run_ranks(1, std::chrono::seconds(60), [&](comm::World& world) {
    const comm::Group group = world.group();
    // The second start needs nothing, but must not pass the first.
    const Order order = order_of(
        [&](const Tensors& in) {
          const at::Tensor first = sum_of(in[0].exp().sin(), group);
          const at::Tensor second = functional::wait_tensor(functional::all_gather(in[1], group));
          return Tensors{first.cos(), second};
        },
        2);
    EXPECT_EQ(order.before, "exp sin all_reduce wait_tensor all_gather_into_tensor wait_tensor cos");
    EXPECT_EQ(order.after, "exp sin all_reduce wait_tensor all_gather_into_tensor cos wait_tensor");
    // Several waits may move to one place.
    const Order both = order_of(
        [&](const Tensors& in) {
          const at::Tensor first = functional::all_reduce(in[0], comm::ReduceOp::Sum, group);
          const at::Tensor second = functional::all_gather(in[1], group);
          const at::Tensor a = functional::wait_tensor(first), b = functional::wait_tensor(second);
          return Tensors{in[0].sin(), b, a};
        },
        2);
    EXPECT_EQ(both.before, "all_reduce all_gather_into_tensor wait_tensor wait_tensor sin");
    EXPECT_EQ(both.after, "all_reduce all_gather_into_tensor sin wait_tensor wait_tensor");
    // What a start needs is waited for before it.
    const Order chain = order_of(
        [&](const Tensors& in) {
          const at::Tensor twice = sum_of(sum_of(in[0], group), group);
          return Tensors{in[1].sin() + twice};
        },
        2);
    EXPECT_EQ(chain.after, "all_reduce wait_tensor all_reduce sin wait_tensor add");
  });
}

// The tensor that a start returns is the one that the wait returns, and may be used after it.
TEST(CollectivesPass, WaitsDoNotPassAnythingInTheirMemory) {
  comm::run_ranks(1, std::chrono::seconds(60), [&](comm::World& world) {
    const comm::Group group = world.group();
    const Order order = order_of(
        [&](const Tensors& in) {
          const at::Tensor started = functional::all_reduce(in[0], comm::ReduceOp::Sum, group);
          const at::Tensor waited = functional::wait_tensor(started), other = in[0].exp();
          const at::Tensor used = started.sin();
          return Tensors{used.cos() + waited, other};
        },
        1);
    EXPECT_EQ(order.after, "all_reduce exp wait_tensor sin cos add");
  });
}

TEST(CollectivesPass, UnusedWaitsStay) {
  comm::run_ranks(1, std::chrono::seconds(60), [&](comm::World& world) {
    const Order order = order_of(
        [&](const Tensors& in) {
          sum_of(in[0], world.group());
          return Tensors{in[0].sin().cos()};
        },
        1);
    EXPECT_EQ(order.after, "all_reduce wait_tensor sin cos");
  });
}

// Forward and backward of a layer with collectives, with and without passes, on four ranks.
TEST(CollectivesPass, RanksComputeTheSame) {
  comm::run_ranks(4, std::chrono::seconds(120), [&](comm::World& world) {
    const comm::Group group = world.group();
    const Function function = over_tensors([&](const Tensors& in) {
      const at::Tensor first = sum_of(in[0].mm(in[1]), group);
      const at::Tensor gathered = functional::wait_tensor(functional::all_gather(in[0].sin(), group));
      const at::Tensor second = sum_of(first.relu().mm(in[1].t()), group);
      return Tensors{second + gathered.slice(0, 0, 3), in[0].cos() * first.sum()};
    });
    const Tensors leaves{leaf({3, 4}), leaf({4, 4})};
    const auto same = [](const Tensors& fresh) { return fresh; };
    std::vector<Trace> traces;
    std::vector<std::string> forwards;
    for (const bool passes : {false, true}) {
      CompileOptions options{.verify_passes = true};
      if (!passes) options.disable_passes = graph_pass_names();
      Compiled compiled(function, options);
      for (int call = 0; call < 3; ++call)
        traces.push_back(trace_of([&](const Values& in) { return compiled(in); }, leaves, same));
      forwards.push_back(operators_of(compiled.partition(0).forward));
    }
    EXPECT_NE(forwards[0], forwards[1]);
    EXPECT_NE(forwards[0].find("mm all_reduce wait_tensor"), std::string::npos) << forwards[0];
    EXPECT_EQ(forwards[1].find("mm all_reduce wait_tensor"), std::string::npos) << forwards[1];
    for (const Trace& trace : traces) {
      expect_same(trace.outputs, traces[0].outputs, "output");
      expect_same(trace.gradients, traces[0].gradients, "gradient");
    }
  });
}

}  // namespace collectives_pass_test
}  // namespace penstock::graph
