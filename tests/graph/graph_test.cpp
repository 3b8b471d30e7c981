#include "penstock/graph/ir/graph.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/metadata.h"
#include "penstock/graph/trace/tracer.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace graph_test {

using test::has_text;
using test::message_of;

// Records a function of real tensors.
Graph traced(const std::vector<at::Tensor>& inputs,
             const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function) {
  FakeMode fake;
  Tracer tracer;
  std::vector<at::Tensor> fakes;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    fakes.push_back(tracer.add_input(to_fake(inputs[i]), "in" + std::to_string(i)));
  const ModeGuard below(fake);
  const ModeGuard on(tracer);
  for (const at::Tensor& output : function(fakes)) tracer.graph.outputs.push_back(tracer.operand_of(output));
  verify(tracer.graph);
  return std::move(tracer.graph);
}

TEST(Graph, TextOfARecordedFunction) {
  const Graph graph = traced({torch::ones({3, 4}), torch::ones({4, 2})}, [](const auto& in) {
    const at::Tensor product = in[0].mm(in[1]);
    const at::Tensor corner = in[0].select(0, 0).select(0, 0);
    return std::vector<at::Tensor>{torch::add(product, corner, 2).t()};
  });
  EXPECT_EQ(to_text(graph),
            "graph(%0 in0: float32[3, 4], %1 in1: float32[4, 2]) {\n"
            "  %2: float32[3, 2] = aten::mm(%0, %1)\n"
            "  %3: float32[4] = aten::select.int(%0, 0, 0)\n"
            "  %4: float32[] = aten::select.int(%3, 0, 0)\n"
            "  %5: float32[3, 2] = aten::add.Tensor(%2, %4, 2)\n"
            "  %6: float32[2, 3] strides [1, 2] = aten::t(%5)\n"
            "  return (%6)\n}\n");
  EXPECT_EQ(graph[ValueId{5}].storage, graph[ValueId{6}].storage);
  EXPECT_EQ(graph[ValueId{0}].storage, graph[ValueId{4}].storage);
  EXPECT_NE(graph[ValueId{2}].storage, graph[ValueId{5}].storage);
}

TEST(Graph, ReplayGivesTheSameBits) {
  torch::manual_seed(1);
  const at::Tensor x = torch::randn({5, 7}), w = torch::randn({7, 3}), b = torch::randn({3});
  const auto function = [](const std::vector<at::Tensor>& in) {
    at::Tensor h = torch::addmm(in[2], in[0], in[1]).tanh();
    std::vector<at::Tensor> parts = h.split(2, 1);
    return std::vector<at::Tensor>{torch::cat({parts[1], parts[0]}, 1), std::get<1>(h.max(1)),
                                   h.index({in[0].select(1, 0).argsort()})};
  };
  const Graph graph = traced({x, w, b}, function);
  const std::vector<at::Tensor> expected = function({x, w, b});
  const Executor run(graph);
  for (int i = 0; i < 2; ++i) {
    const std::vector<c10::IValue> results = run({x, w, b});
    ASSERT_EQ(results.size(), expected.size());
    for (std::size_t j = 0; j < expected.size(); ++j)
      EXPECT_TRUE(torch::equal(results[j].toTensor(), expected[j])) << j;
  }
}

TEST(Graph, InPlaceOperatorsWriteTheInput) {
  const auto function = [](const std::vector<at::Tensor>& in) {
    in[0].select(0, 1).mul_(3);
    in[0].t_();
    return std::vector<at::Tensor>{in[0] + 1};
  };
  const at::Tensor x = torch::arange(6.).reshape({2, 3});
  const Graph graph = traced({x}, function);
  EXPECT_TRUE(torch::equal(x, torch::arange(6.).reshape({2, 3})));  // recording writes nothing
  EXPECT_EQ(count_writes(graph), 2u);
  at::Tensor expected = x.clone(), actual = x.clone();
  const at::Tensor expected_result = function({expected})[0];
  const at::Tensor result = Executor(graph)({actual})[0].toTensor();
  EXPECT_TRUE(torch::equal(result, expected_result));
  EXPECT_TRUE(torch::equal(actual, expected));
  EXPECT_EQ(actual.strides(), expected.strides());
}

TEST(Graph, TensorsFromOutsideBecomeConstants) {
  const at::Tensor weight = torch::randn({4});
  const Graph graph = traced({torch::ones({4})}, [&](const auto& in) {
    return std::vector<at::Tensor>{in[0] * weight.view({2, 2}).view(-1)};
  });
  ASSERT_EQ(graph.constants.size(), 1u);
  EXPECT_EQ(graph.nodes.size(), 1u);  // a view of a constant is a constant
  EXPECT_EQ(graph.constants[0].tensor.data_ptr(), weight.data_ptr());
  EXPECT_TRUE(torch::equal(Executor(graph)({torch::full({4}, 2.)})[0].toTensor(), weight * 2));
}

TEST(Graph, DeadNodesAreRemovedAndVisibleWritesKept) {
  Graph graph = traced({torch::ones({4})}, [](const auto& in) {
    in[0].exp().sin();
    at::Tensor inside = in[0] + 1;
    inside.view({2, 2}).select(0, 0).mul_(2);  // visible through `inside`
    at::Tensor unseen = in[0] + 2;
    unseen.mul_(2);
    in[0].add_(1);     // visible to the caller
    torch::rand({3});  // advances the generator
    return std::vector<at::Tensor>{inside};
  });
  remove_dead_nodes(graph);
  verify(graph);
  std::vector<std::string> names;
  for (const Node& node : graph.nodes) names.push_back(node.op.operator_name().name);
  EXPECT_EQ(names, (std::vector<std::string>{"aten::add", "aten::view", "aten::select", "aten::mul_",
                                             "aten::add_", "aten::rand"}));
}

TEST(Graph, ValuesAreFreedAtTheirLastUse) {
  // The middle of the chain is dead when the end runs: the memory of a value passed by move is freed as well.
  const Graph graph = traced({torch::ones({4})},
                             [](const auto& in) { return std::vector<at::Tensor>{in[0].exp().sin().cos()}; });
  at::Tensor x = torch::ones({4});
  const c10::weak_intrusive_ptr<c10::TensorImpl> watch(x.getIntrusivePtr());
  std::vector<at::Tensor> inputs;
  inputs.push_back(std::move(x));
  const std::vector<c10::IValue> results = Executor(graph)(std::move(inputs));
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(results[0].toTensor().use_count(), 1u);
}

// LibTorch tags the fused operators of attention as random, whatever their probability of dropout is.
TEST(Graph, AttentionDrawsOnlyWithDropout) {
  for (const char* name :
       {"aten::_scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_attention_math"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    if (!op) continue;  // not in every version
    SCOPED_TRACE(name);
    Node node{*op, {}, {}};
    Operand* dropout = nullptr;
    node.arguments.resize(op->schema().arguments().size());
    for (std::size_t i = 0; i < node.arguments.size(); ++i)
      if (op->schema().arguments()[i].name() == "dropout_p") dropout = &node.arguments[i];
    if (!dropout) continue;
    *dropout = Operand::of(0.0);
    EXPECT_FALSE(is_random(node));
    EXPECT_FALSE(must_run(node));
    const bool tagged = op->hasTag(at::Tag::nondeterministic_seeded);
    *dropout = Operand::of(0.1);
    EXPECT_EQ(is_random(node), tagged);
    // An example of what depends on sizes.
    *dropout = Operand::of(0.0);
    dropout->symbolic = 0;
    EXPECT_EQ(is_random(node), tagged);
  }
}

TEST(Graph, VerifyFindsWhatIsBroken) {
  const auto broken = [](const std::function<void(Graph&)>& damage) {
    Graph graph = traced({torch::ones({4})}, [](const auto& in) {
      return std::vector<at::Tensor>{in[0].exp().view({2, 2})};
    });
    damage(graph);
    return message_of<InvariantError>([&] { verify(graph); });
  };
  EXPECT_TRUE(has_text(broken([](Graph& graph) { std::swap(graph.nodes[0], graph.nodes[1]); }),
                       "used before it is defined"));
  EXPECT_TRUE(
      has_text(broken([](Graph& graph) { graph.nodes.push_back(graph.nodes[0]); }), "defines %1 again"));
  EXPECT_TRUE(
      has_text(broken([](Graph& graph) { graph.nodes[0].arguments.clear(); }), "0 arguments, the schema 1"));
  EXPECT_TRUE(has_text(broken([](Graph& graph) { graph.values[2].storage = graph.new_storage(); }),
                       "should share the memory"));
  EXPECT_TRUE(has_text(broken([](Graph& graph) { graph.outputs[0] = Operand::of(graph.new_value({})); }),
                       "which no node defines"));
}

TEST(Graph, WrongInputsAreErrors) {
  const Graph graph =
      traced({torch::ones({4})}, [](const auto& in) { return std::vector<at::Tensor>{in[0].exp()}; });
  const Executor run(graph);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { run({}); }), "expected 1"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { run({at::Tensor()}); }), "input 0 is undefined"));
}

TEST(Graph, ValueDependentStepsNameTheOperator) {
  EXPECT_TRUE(has_text(message_of<DataDependentError>([] {
                         traced({torch::ones({4})}, [](const auto& in) {
                           if (in[0].sum().template item<float>() > 0) return std::vector<at::Tensor>{in[0]};
                           return std::vector<at::Tensor>{};
                         });
                       }),
                       "aten::_local_scalar_dense"));
}

TEST(Metadata, FlagsThatContradictEachOtherNameTheInput) {
  InputInfo other_memory;
  other_memory.mutates_storage_metadata = true;
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { other_memory.validate(3); }),
                       "input 3 is marked as getting other memory (set_) but keeping its metadata"));
  other_memory.mutates_metadata = true;
  other_memory.validate(3);
}

}  // namespace graph_test
}  // namespace penstock::graph
