// Common subexpressions, patterns, pictures, files and signatures of graphs.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/constant_value.h"
#include "penstock/graph/ir/rewrite.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph/tools/draw.h"
#include "penstock/graph/tools/graph_file.h"
#include "penstock/graph/tools/signature.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace graph_tools_test {

namespace nn = torch::nn;
using test::has_text;
using test::message_of;
using Tensors = std::vector<at::Tensor>;

Graph captured(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs) {
  return capture_forward(
      [&](const Values& in) {
        Tensors tensors;
        for (const c10::IValue& value : in) tensors.push_back(value.toTensor());
        const Tensors results = function(tensors);
        return Values(results.begin(), results.end());
      },
      Values(inputs.begin(), inputs.end()));
}

std::vector<std::string> names_of(const Graph& graph) {
  std::vector<std::string> names;
  for (const Node& node : graph.nodes) names.push_back(c10::toString(node.op.operator_name()));
  return names;
}

void expect_same_results(const Graph& a, const Graph& b, const Tensors& inputs) {
  const auto x = Executor(a)(inputs), y = Executor(b)(inputs);
  ASSERT_EQ(x.size(), y.size());
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(torch::equal(x[i].toTensor(), y[i].toTensor())) << i;
}

TEST(Constants, AreTheSameBitForBit) {
  EXPECT_TRUE(same_constant(0.1234567, 0.1234567));
  EXPECT_FALSE(same_constant(0.1234567, 0.12345671));
  EXPECT_FALSE(same_constant(0.0, -0.0));
  EXPECT_TRUE(same_constant(std::nan(""), std::nan("")));
  EXPECT_FALSE(same_constant(1, 1.0));
  EXPECT_TRUE(same_constant(std::vector<std::int64_t>{1, 2}, std::vector<std::int64_t>{1, 2}));
  EXPECT_FALSE(same_constant(std::vector<std::int64_t>{1, 2}, std::vector<std::int64_t>{1, 3}));
  EXPECT_FALSE(same_constant(c10::IValue(), 0));
  EXPECT_FALSE(same_constant(torch::ones({2}), torch::ones({2})));
}

TEST(CommonSubexpressions, AreComputedOnce) {
  const Tensors inputs{torch::randn({3, 4}), torch::randn({3, 4})};
  const Graph before = captured(
      [](const Tensors& in) {
        const at::Tensor a = (in[0] + in[1]).exp().view({12}), b = (in[0] + in[1]).exp().view({12});
        return Tensors{a * b, (in[0] + in[1] * 2).sin() + (in[1] + in[0]).sin()};
      },
      inputs);
  Graph after = before;
  EXPECT_EQ(merge_common_subexpressions(after), 3u);  // add, exp and view
  EXPECT_EQ(after.nodes.size() + 3, before.nodes.size());
  expect_same_results(before, after, inputs);
  EXPECT_EQ(merge_common_subexpressions(after), 0u);
}

TEST(CommonSubexpressions, RandomNodesAndOutputsStayApart) {
  Graph random =
      captured([](const Tensors& in) { return Tensors{torch::rand_like(in[0]) - torch::rand_like(in[0])}; },
               {torch::ones({3})});
  EXPECT_EQ(merge_common_subexpressions(random), 0u);
  Graph outputs = captured(
      [](const Tensors& in) {
        return Tensors{in[0].exp(), in[0].exp()};
      },
      {torch::ones({3})});
  EXPECT_EQ(merge_common_subexpressions(outputs), 0u);
  const auto results = Executor(outputs)({torch::ones({3})});
  EXPECT_FALSE(results[0].toTensor().is_alias_of(results[1].toTensor()));
  Graph writing = captured([](const Tensors& in) { return Tensors{in[0].add_(1)}; }, {torch::ones({3})});
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { merge_common_subexpressions(writing); }),
                       "functionalize it first"));
}

Rule silu_rule() {
  const Tensors example{torch::ones({2})};
  return {captured([](const Tensors& in) { return Tensors{in[0] * in[0].sigmoid()}; }, example),
          captured([](const Tensors& in) { return Tensors{at::silu(in[0])}; }, example), nullptr};
}

TEST(Rewrite, PatternsAreReplaced) {
  const Tensors inputs{torch::randn({3, 4})};
  const auto function = [](const Tensors& in) {
    const at::Tensor a = in[0] * in[0].sigmoid();       // here
    const at::Tensor b = a.t() * a.t().sigmoid();       // two views: not the same value
    const at::Tensor gate = b.sigmoid(), c = b * gate;  // the gate is used again
    const at::Tensor d = c.t().view({12}), e = (d * d.sigmoid()).view({3, 4});  // and here
    return Tensors{e, gate};
  };
  const Graph before = captured(function, inputs);
  Graph after = before;
  EXPECT_EQ(rewrite(after, silu_rule()), 2u);
  std::vector<std::string> names = names_of(after);
  EXPECT_EQ(std::count(names.begin(), names.end(), "aten::silu"), 2);
  EXPECT_EQ(after.nodes.size() + 2, before.nodes.size());
  const auto x = Executor(before)(inputs), y = Executor(after)(inputs);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(torch::allclose(x[i].toTensor(), y[i].toTensor()));

  Rule picky = silu_rule();
  picky.accept = [](const Graph& graph, const Match& match) {
    return graph[match.inputs[0]].geometry.sizes.size() == 1;
  };
  Graph some = before;
  EXPECT_EQ(rewrite(some, picky), 1u);
}

TEST(Rewrite, BrokenRulesAreErrors) {
  Graph graph = captured([](const Tensors& in) { return Tensors{in[0].exp()}; }, {torch::ones({3})});
  Rule inputs = silu_rule();
  inputs.replacement = captured([](const Tensors& in) { return Tensors{in[0] + in[1]}; },
                                {torch::ones({2}), torch::ones({2})});
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { rewrite(graph, inputs); }), "1 inputs, the replacement 2"));
  Rule shape{captured([](const Tensors& in) { return Tensors{in[0].exp()}; }, {torch::ones({3})}),
             captured([](const Tensors& in) { return Tensors{in[0].sum()}; }, {torch::ones({3})}), nullptr};
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { rewrite(graph, shape); }), "produces float32[] for float32[3]"));
  const at::Tensor held = torch::ones({2});
  Rule constant = silu_rule();
  constant.pattern = captured([&](const Tensors& in) { return Tensors{in[0] * held}; }, {torch::ones({2})});
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { rewrite(graph, constant); }), "tensor constants"));
}

struct Small {
  nn::Sequential net{nn::Linear(4, 3), nn::BatchNorm1d(3), nn::GELU()};
  std::shared_ptr<CompiledModule<nn::SequentialImpl>> fast = compile(net);
  Small() { fast->forward(torch::randn({5, 4})); }
  const Compiled& compiled() const { return compiled_entry(*fast, 0); }
  GraphSignature signature() const {
    return make_signature(compiled().joint(0), compiled().inner_meta(0),
                          {.state = &state_of(*fast),
                           .loss_index = {},
                           .hidden_outputs = 1,
                           .in_spec = arguments_spec(*fast, 0).to_string(),
                           .out_spec = results_spec(*fast, 0, 0).to_string()});
  }
  GraphFile file() const {
    return {compiled().joint(0), compiled().inner_meta(0), compiled().partition(0).saved, signature()};
  }
};

// Others hold the inputs, the results and views of results; tensors in between belong to backward alone.
TEST(Partition, DonatedTensorsBelongToNobodyElse) {
  Compiled compiled([](const Values& in) -> Values {
    const at::Tensor hidden = in[0].toTensor().mm(in[1].toTensor()).relu();
    const at::Tensor result = hidden.mm(in[1].toTensor()).exp();
    return {result, result.t().mul(2)};
  });
  compiled({torch::randn({3, 3}).set_requires_grad(true), torch::randn({3, 3}).set_requires_grad(true)});
  const JointGraph& joint = compiled.joint(0);
  const Partition& parts = compiled.partition(0);
  const auto made_by = [&](ValueId value) -> std::string {
    for (const Node& node : joint.graph.nodes)
      for (const Operand& result : node.results)
        if (result.value() == value) return node.op.operator_name().name;
    return "an input";
  };
  std::vector<std::string> donated, others;
  const std::vector<std::size_t> places = parts.donated(joint);
  for (std::size_t i = 0; i < parts.saved.size(); ++i)
    (std::find(places.begin(), places.end(), i) != places.end() ? donated : others)
        .push_back(made_by(parts.saved[i]));
  EXPECT_EQ(std::set<std::string>(donated.begin(), donated.end()), std::set<std::string>{"aten::relu"});
  EXPECT_NE(std::find(others.begin(), others.end(), "an input"), others.end());
  EXPECT_NE(std::find(others.begin(), others.end(), "aten::exp"), others.end());
  EXPECT_EQ(parts.first_saved_output() + parts.saved.size(), parts.forward.outputs.size());
  EXPECT_EQ(parts.first_saved_output(), joint.forward_outputs);
}

TEST(Signature, NamesOfAModule) {
  const Small small;
  const GraphSignature signature = small.signature();
  EXPECT_EQ(signature.parameters.size(), 4u);
  EXPECT_EQ(signature.inputs_to_buffers.at(GraphInput("1.running_var")), Qualified("1.running_var"));
  EXPECT_EQ(signature.user_inputs, std::vector<GraphInput>{GraphInput("args[0]")});
  EXPECT_EQ(signature.user_outputs.size(), 1u);
  EXPECT_EQ(signature.buffers_to_mutate.size(), 3u);
  EXPECT_EQ(signature.in_spec, "(*,)");
  ASSERT_TRUE(signature.backward);
  EXPECT_EQ(signature.backward->gradients_to_parameters.size(), 4u);
  EXPECT_TRUE(signature.backward->gradients_to_user_inputs.empty());
  EXPECT_EQ(signature.backward->loss_output, signature.user_outputs[0]);
  EXPECT_TRUE(has_text(to_text(signature), "parameter 0.weight -> 0.weight"));
}

TEST(Signature, UnsupportedGraphsAreErrors) {
  const auto message = [](const std::function<Tensors(const Tensors&)>& function, const at::Tensor& input) {
    const Function over = [&](const Values& in) {
      const Tensors results = function({in[0].toTensor()});
      return Values(results.begin(), results.end());
    };
    const ViewAndMutationMeta meta = analyze(over, {input});
    const JointGraph joint = capture_joint(over, {input}, meta);
    return message_of<ValueError>([&] { make_signature(joint, meta); });
  };
  EXPECT_TRUE(
      has_text(message([](const Tensors& in) { return Tensors{in[0].view({4})}; }, torch::ones({2, 2})),
               "result 0 is made at run time"));
  EXPECT_TRUE(has_text(message(
                           [](const Tensors& in) {
                             in[0].t_();
                             return Tensors{in[0] + 1};
                           },
                           torch::ones({2, 3})),
                       "only the shape of primals_1"));
}

TEST(Drawing, DotAndSvg) {
  const Small small;
  const Graph& graph = small.compiled().joint(0).graph;
  const DrawOptions options{
      .title = "a <small> net", .saved = small.compiled().partition(0).saved, .max_boxes = 1000};
  const std::string dot = to_dot(graph, options), svg = to_svg(graph, options);
  EXPECT_TRUE(has_text(dot, "aten::addmm"));
  EXPECT_TRUE(has_text(dot, "penwidth=3"));
  EXPECT_TRUE(has_text(svg, "a &lt;small&gt; net"));
  EXPECT_TRUE(has_text(svg, "penstock::native_batch_norm_functional"));
  EXPECT_TRUE(has_text(svg, "rect class=\"box forward saved\""));
  std::size_t boxes = 0;
  for (std::size_t at = svg.find("<rect class=\"box"); at != std::string::npos;
       at = svg.find("<rect class=\"box", at + 1))
    ++boxes;
  std::size_t outputs = 0;
  for (const Operand& output : graph.outputs) outputs += output.value() != kNoValue;
  EXPECT_EQ(boxes, graph.inputs.size() + graph.constants.size() + graph.nodes.size() + outputs);
  // With fewer boxes it is folded.
  const std::string folded = to_svg(graph, {.title = "a <small> net", .max_boxes = 3});
  EXPECT_EQ(folded.find("<rect class=\"box"), std::string::npos);
  EXPECT_TRUE(has_text(folded, "<g class=\"part "));
}

TEST(GraphFiles, FilesRoundTrip) {
  const Small small;
  const GraphFile file = small.file();
  const std::vector<std::uint8_t> bytes = encode_graph(file);
  const GraphFile again = decode_graph(bytes);
  EXPECT_EQ(to_text(again.joint.graph), to_text(file.joint.graph));
  EXPECT_TRUE(again.meta.same_in_every_field(file.meta));
  EXPECT_EQ(again.saved, file.saved);
  EXPECT_EQ(again.signature, file.signature);
  EXPECT_EQ(again.joint.tangents, file.joint.tangents);
  EXPECT_EQ(encode_graph(again), bytes);

  // And it runs.
  Tensors inputs;
  for (const Placeholder& input : file.joint.graph.inputs) {
    const Geometry& geometry = file.joint.graph[input.value].geometry;
    inputs.push_back(torch::randn(geometry.sizes).to(geometry.dtype).abs());
  }
  const auto x = Executor(file.joint.graph)(inputs), y = Executor(again.joint.graph)(inputs);
  for (std::size_t i = 0; i < x.size(); ++i)
    if (x[i].isTensor() && x[i].toTensor().defined()) {
      EXPECT_TRUE(torch::equal(x[i].toTensor(), y[i].toTensor())) << i;
    }

  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     fmt::format("penstock_graph_tools_test.{}.psgraph", ::getpid());
  save_graph(path, file);
  EXPECT_EQ(to_text(load_graph(path).joint.graph), to_text(file.joint.graph));
  std::filesystem::remove(path);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { load_graph(path); }), "a file that can be read"));
}

TEST(GraphFiles, ConstantsOfAllKinds) {
  const at::Tensor held = torch::randn({3, 4}).t();
  const Tensors inputs{torch::randn({4, 3})};
  const Graph graph = captured(
      [&](const Tensors& in) {
        const at::Tensor flipped = (in[0] + held).flip({0}).roll({1}, {0});
        return Tensors{torch::gelu(flipped, "tanh") * 0.1234567,
                       at::upsample_nearest2d(flipped.view({1, 1, 4, 3}), {8, 6}), flipped.to(at::kDouble)};
      },
      inputs);
  const GraphFile again =
      decode_graph(encode_graph({JointGraph{graph, 1, graph.outputs.size(), {}}, {}, {}, {}}));
  EXPECT_EQ(to_text(again.joint.graph), to_text(graph));
  expect_same_results(graph, again.joint.graph, inputs);
}

std::vector<std::uint8_t> with_new_checksum(std::vector<std::uint8_t> bytes) {
  if (bytes.size() < 28) return bytes;
  const std::uint64_t size = bytes.size() - 28,
                      checksum = detail::graph_checksum(std::span(bytes).subspan(28));
  std::memcpy(bytes.data() + 12, &size, 8);
  std::memcpy(bytes.data() + 20, &checksum, 8);
  return bytes;
}

// Flipped bits, truncation and appended bytes: always a ValueError. With a corrected checksum, an error or
// another valid graph.
TEST(GraphFiles, DamageIsAnErrorNeverACrash) {
  const std::vector<std::uint8_t> bytes = encode_graph(Small().file());
  std::mt19937 random(5);
  const char* asked = std::getenv("PENSTOCK_FUZZ_FILES");
  const int rounds = asked ? std::atoi(asked) : 1500;
  int sound = 0;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    std::vector<std::uint8_t> damaged = bytes;
    switch (random() % 4) {
      case 0:
        damaged.resize(random() % damaged.size());
        break;
      case 1:
        damaged.push_back(static_cast<std::uint8_t>(random()));
        break;
      default:
        for (std::size_t flips = 1 + random() % 3; flips > 0; --flips)
          damaged[random() % damaged.size()] ^= static_cast<std::uint8_t>(1u << (random() % 8));
    }
    if (damaged != bytes) {
      EXPECT_THROW(decode_graph(damaged), ValueError);
    }
    try {
      const GraphFile read = decode_graph(with_new_checksum(damaged));
      verify(read.joint.graph);
      encode_graph(read);
      ++sound;
    } catch (const ValueError&) {
    }
  }
  EXPECT_GT(sound, 0);  // a flipped bit in a name or a number
  EXPECT_LT(sound, rounds);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { decode_graph({}); }), "this is not a graph file"));
  std::vector<std::uint8_t> newer = bytes;
  newer[8] = 9;
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { decode_graph(newer); }), "version 9, expected 6"));
}

TEST(GraphFiles, UnknownOperatorsAreNamed) {
  std::vector<std::uint8_t> bytes = encode_graph(Small().file());
  const std::string name = "aten::addmm";
  const auto at = std::search(bytes.begin(), bytes.end(), name.begin(), name.end());
  ASSERT_NE(at, bytes.end());
  at[6] = 'x';
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { decode_graph(with_new_checksum(bytes), "step.psgraph"); }),
               "this LibTorch has no operator aten::xddmm"));
}

}  // namespace graph_tools_test
}  // namespace penstock::graph
