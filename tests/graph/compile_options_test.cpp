// The effect of each option of a capture, and the messages of what cannot be captured.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/graph/call_trace.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace compile_options_test {

using test::has_text;
using test::message_of;

bool has_op(const Graph& graph, const std::string& name) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(),
                     [&](const Node& node) { return c10::toString(node.op.operator_name()) == name; });
}

TEST(CompileOptions, DecompositionsReplaceOperatorsInBothPhases) {
  const Function function = over_tensors([](const Tensors& in) {
    return Tensors{torch::tanh(in[0]).mm(in[1])};  // the gradient of tanh uses tanh_backward
  });
  int forward = 0, backward = 0;
  CompileOptions options;
  options.decompositions["aten::tanh"] = [&](const std::vector<c10::IValue>& in) -> Tensors {
    ++forward;
    return {torch::sigmoid(in[0].toTensor() * 2) * 2 - 1};
  };
  options.decompositions["aten::tanh_backward"] = [&](const std::vector<c10::IValue>& in) -> Tensors {
    ++backward;
    const at::Tensor y = in[1].toTensor();
    return {in[0].toTensor() * (1 - y * y)};
  };
  const Tensors leaves{leaf({2, 3}), leaf({3, 2})};
  const auto same = [](const Tensors& fresh) { return fresh; };
  const Trace expected = trace_of(function, leaves, same);
  Compiled compiled(function, options);
  for (int call = 0; call < 2; ++call) {
    const Trace actual = trace_of([&](const Values& in) { return compiled(in); }, leaves, same);
    expect_same(actual.outputs, expected.outputs, "output", Compare::Closely);
    expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
  }
  EXPECT_GE(forward, 1);
  EXPECT_GE(backward, 1);
  const Graph& graph = compiled.joint(0).graph;
  EXPECT_FALSE(has_op(graph, "aten::tanh") || has_op(graph, "aten::tanh_backward"));
  EXPECT_TRUE(has_op(graph, "aten::sigmoid"));
}

// A decomposition may call its own operator, and runs in the dtypes of its arguments whatever autocast does.
TEST(CompileOptions, DecompositionsThatCallTheirOperator) {
  CompileOptions options;
  options.decompositions["aten::mm"] = [](const std::vector<c10::IValue>& in) -> Tensors {
    return {torch::mm(in[1].toTensor().t(), in[0].toTensor().t()).t()};
  };
  const Function function = over_tensors([](const Tensors& in) { return Tensors{in[0].mm(in[1])}; });
  Compiled compiled(function, options);
  const Tensors in{torch::randn({2, 3}), torch::randn({3, 4})};
  EXPECT_TRUE(torch::allclose(compiled(values_of(in))[0].toTensor(), in[0].mm(in[1])));
  EXPECT_TRUE(has_op(compiled.joint(0).graph, "aten::t") ||
              has_op(compiled.joint(0).graph, "aten::transpose.int"));
  const AutocastScope casts(at::kCPU, at::kBFloat16);
  EXPECT_EQ(compiled(values_of(in))[0].toTensor().scalar_type(), at::kBFloat16);
}

TEST(CompileOptions, DecompositionsThatCannotBeUsed) {
  const auto refusal = [](const char* name, Decomposition how) {
    return message_of<ValueError>([&] {
      CompileOptions options;
      options.decompositions[name] = std::move(how);
      Compiled(over_tensors([](const Tensors& in) { return Tensors{in[0].tanh()}; }),
               options)({torch::ones({3})});
    });
  };
  const auto returns = [](const Tensors& results) {
    return [results](const std::vector<c10::IValue>&) { return results; };
  };
  EXPECT_TRUE(has_text(refusal("aten::tanhh", returns({})), "there is no operator aten::tanhh"));
  EXPECT_TRUE(has_text(refusal("aten::tanh", nullptr), "aten::tanh has no function"));
  EXPECT_TRUE(has_text(refusal("aten::mul_.Tensor", returns({})), "writes an argument"));
  EXPECT_TRUE(has_text(refusal("aten::tanh", returns({})), "returned 0 tensors, expected 1"));
  EXPECT_TRUE(has_text(refusal("aten::tanh", returns({torch::ones({4})})),
                       "result 0 of the decomposition of aten::tanh is float32[4], expected float32[3]"));
}

TEST(CompileOptions, SpecializeCapturesEachSize) {
  const Function function = over_tensors([](const Tensors& in) { return Tensors{in[0].sin().sum()}; });
  const auto captures = [&](bool specialize) {
    Compiled compiled(function, {.dynamic = {.dims = {{0, 0, "B"}}, .specialize = specialize}});
    for (const std::int64_t size : {4, 5, 6}) compiled({torch::ones({size, 2})});
    EXPECT_EQ(compiled.is_dynamic(0), !specialize);
    return compiled.captures();
  };
  EXPECT_EQ(captures(false), 1u);
  EXPECT_EQ(captures(true), 3u);
}

// Counts what it compiles. Backward takes a while, and fails a number of times before.
class Counting final : public GraphCompiler {
 public:
  std::string_view name() const override { return "counting"; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                               const CompileRequest& request) const override {
    ++(request.role == GraphRole::Backward ? backward : forward);
    if (request.role == GraphRole::Backward) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (failures-- > 0) throw StateError("no memory for code");
    }
    return graph_compiler(kExecutorCompiler)->compile(graph, request);
  }
  mutable std::atomic<int> forward = 0, backward = 0, failures = 0;
};

TEST(CompileOptions, BackwardIsCompiledAtOnceOrAtItsFirstUse) {
  const Function function = over_tensors([](const Tensors& in) { return Tensors{in[0].sin()}; });
  for (const CompileBackward when : {CompileBackward::AtOnce, CompileBackward::FirstUse}) {
    const bool later = when == CompileBackward::FirstUse;
    const auto compiler = std::make_shared<Counting>();
    const at::Tensor x = leaf({3});
    const CompiledCall call(partition(capture_function(function, {x}), Partitioner::Default),
                            CompilerChoice(compiler), {.compile_backward = when});
    EXPECT_EQ(compiler->forward, 1);
    EXPECT_EQ(compiler->backward, later ? 0 : 1);
    for (int run = 0; run < 2; ++run) {
      x.mutable_grad() = at::Tensor();
      call.run({x})[0].toTensor().sum().backward();
      EXPECT_TRUE(torch::equal(x.grad(), x.detach().cos()));
      EXPECT_EQ(compiler->backward, 1);
    }
  }
  Compiled compiled(function, {.compile_backward = CompileBackward::FirstUse});
  const at::Tensor x = leaf({3});
  compiled({x})[0].toTensor().sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), x.detach().cos()));
}

// The first one compiles, and the others wait for it.
TEST(CompileOptions, ABackwardOfManyThreadsIsCompiledOnce) {
  const Function function = over_tensors([](const Tensors& in) { return Tensors{in[0].sin() * in[0]}; });
  const auto compiler = std::make_shared<Counting>();
  const CompiledCall call(partition(capture_function(function, {leaf({3})}), Partitioner::Default),
                          CompilerChoice(compiler), {.compile_backward = CompileBackward::FirstUse});
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      const at::Tensor x = torch::full({3}, 0.1 * t).requires_grad_(true);
      bool same = true;
      for (int round = 0; round < 20; ++round) {
        x.mutable_grad() = at::Tensor();
        call.run({x})[0].toTensor().sum().backward();
        const at::Tensor plain = x.detach();
        same = same && at::allclose(x.grad(), plain.sin() + plain * plain.cos());
      }
      right += same ? 1 : 0;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 8);
  EXPECT_EQ(compiler->backward, 1);
}

TEST(CompileOptions, ABackwardThatCouldNotBeCompiledIsTriedAgain) {
  const Function function = over_tensors([](const Tensors& in) { return Tensors{in[0].sin()}; });
  const auto compiler = std::make_shared<Counting>();
  compiler->failures = 1;
  const at::Tensor x = leaf({3});
  const CompiledCall call(partition(capture_function(function, {x}), Partitioner::Default),
                          CompilerChoice(compiler), {.compile_backward = CompileBackward::FirstUse});
  const at::Tensor sum = call.run({x})[0].toTensor().sum();
  EXPECT_TRUE(has_text(message_of<StateError>([&] { sum.backward({}, /*retain_graph=*/true); }),
                       "no memory for code"));
  EXPECT_FALSE(call.code().backward);
  call.run({x})[0].toTensor().sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), x.detach().cos()));
  EXPECT_EQ(compiler->backward, 2);
}

TEST(CompileOptions, JointChecksRefuseWritesToWhatRequiresAGradient) {
  const Function function = over_tensors([](const Tensors& in) {
    {
      const at::NoGradGuard no_grad;
      in[0].mul_(0.5);
    }
    return Tensors{in[0] * in[1]};
  });
  const Values in{leaf({3}), leaf({3})};
  Compiled(function, CompileOptions{})(in);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { Compiled(function, {.joint_checks = true})(in); }),
                       "input 0, which requires a gradient, is written in a function with backward"));
  const at::NoGradGuard no_grad;
  Compiled(function, {.joint_checks = true})(in);  // no backward
}

TEST(CompileOptions, TheLogHasALineForEachCaptureAndItsReason) {
  std::vector<std::string> lines;
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0].sin()}; }),
                    {.log = [&](const std::string& line) { lines.push_back(line); }});
  compiled({leaf({3})});
  compiled({leaf({3})});
  compiled({leaf({4})});
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(has_text(lines[0], "capture 1: 3 nodes, 1 in forward, 2 in backward, 12 bytes saved"))
      << lines[0];
  EXPECT_TRUE(has_text(lines[1], "input 0 has sizes [4], in the capture [3]")) << lines[1];
}

struct Masked : torch::nn::Module {
  Masked() : layer(register_module("layer", torch::nn::Linear(3, 3))) {}
  at::Tensor forward(const at::Tensor& x, const std::vector<at::Tensor>& masks) {
    const at::Tensor y = layer->forward(x);
    if (masks.at(1).gt(0).all().item<bool>()) return y;
    return y * masks[0];
  }
  torch::nn::Linear layer;
};

TEST(CompileOptions, ArgumentNamesAreThoseOfMessagesAndGraphs) {
  const at::NoGradGuard no_grad;
  const auto message = [](const CompileOptions& options) {
    return message_of<DataDependentError>([&] {
      compile(std::make_shared<Masked>(), options)
          ->forward(torch::ones({2, 3}), Tensors{torch::ones({3}), torch::ones({3})});
    });
  };
  const std::string numbered = message({}), named = message({.argument_names = {"", "masks"}});
  EXPECT_TRUE(has_text(numbered, "it reads values computed from args[1][1];")) << numbered;
  EXPECT_TRUE(has_text(named, "it reads values computed from masks[1];")) << named;
  auto fast = compile(torch::nn::Linear(3, 3), {.argument_names = {"features"}});
  fast->forward(torch::ones({2, 3}));
  EXPECT_TRUE(has_text(fast->graph_text(), "features: float32[2, 3]")) << fast->graph_text();
}

// The operator, the inputs that its values come from, the module that was used last, and what to do.
TEST(DataDependence, TheMessageNamesOperatorInputsAndModule) {
  struct Branching : torch::nn::Module {
    Branching()
        : blocks(register_module("blocks",
                                 torch::nn::ModuleList(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3)))),
          last(register_module("last", torch::nn::Linear(3, 3))) {}
    at::Tensor forward(const at::Tensor& x, const at::Tensor& unused) {
      at::Tensor y = blocks[0]->as<torch::nn::Linear>()->forward(x);
      y = blocks[1]->as<torch::nn::Linear>()->forward(y);
      const at::Tensor limit = torch::zeros({});
      limit.copy_(y.abs().sum());
      if (limit.item<float>() > 3) y = y * 2;
      return last->forward(y) + unused;
    }
    torch::nn::ModuleList blocks;
    torch::nn::Linear last;
  };
  auto fast = compile(std::make_shared<Branching>());
  const std::string message = message_of<DataDependentError>([&] {
    fast->forward(torch::ones({2, 3}), torch::ones({2, 3}));
  });
  EXPECT_TRUE(has_text(message, "_local_scalar_dense")) << message;
  EXPECT_TRUE(has_text(message, "of module blocks.1")) << message;
  EXPECT_TRUE(has_text(message, "values computed from args[0] and parameters;")) << message;
  EXPECT_FALSE(has_text(message, "args[1]")) << message;
  EXPECT_FALSE(has_text(message, "last.weight")) << message;
  EXPECT_TRUE(has_text(message, "torch::where")) << message;
}

}  // namespace compile_options_test
}  // namespace penstock::graph
