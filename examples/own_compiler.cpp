// A compiler of your own: it fuses `a * b + c` into one operator, and leaves the rest to the built-in
// executor.
//   build/release/bin/own_compiler
#include <torch/torch.h>

#include <cstdio>
#include <map>

#include "examples/failure.h"
#include "penstock/penstock.h"

using namespace penstock;
using namespace penstock::graph;

struct Fusing final : GraphCompiler {
  std::string_view name() const override { return "fusing"; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& given,
                                               const CompileRequest& request) const override {
    static const auto fused = c10::Dispatcher::singleton().findSchemaOrThrow("aten::addcmul", "");
    Graph graph = given;
    std::map<ValueId, int> uses;
    std::map<ValueId, const Node*> products;
    for (const Node& node : graph.nodes)
      for_each_value(node.arguments, [&](ValueId value) { ++uses[value]; });
    for_each_value(graph.outputs, [&](ValueId value) { ++uses[value]; });
    const auto is = [](const Node& node, const char* op) {
      return node.op.operator_name().name == op && node.op.operator_name().overload_name == "Tensor";
    };
    int count = 0;
    for (Node& node : graph.nodes) {
      if (is(node, "aten::mul")) products[node.results[0].value()] = &node;
      if (!is(node, "aten::add") || !node.arguments[2].constant.toScalar().equal(1)) continue;
      const ValueId product = node.arguments[0].value(), other = node.arguments[1].value();
      if (!products.contains(product) || uses[product] > 1 ||
          graph[product].geometry.dtype != graph[other].geometry.dtype)
        continue;
      const auto& factors = products[product]->arguments;
      node = {fused,
              {node.arguments[1], factors[0], factors[1], Operand::of(at::Scalar(1))},
              node.results,
              node.phase,
              node.grad_enabled};
      ++count;
    }
    remove_dead_nodes(graph);  // the products
    verify(graph);
    std::printf("%s: %d fused\n", std::string(to_text(request.role)).c_str(), count);
    return graph_compiler("executor")->compile(graph, request);
  }
};

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return at::gelu(x * scale + shift) * scale + x; }
  at::Tensor scale = register_parameter("scale", torch::randn({64}));
  at::Tensor shift = register_parameter("shift", torch::randn({64}));
};
TORCH_MODULE(Net);

int main() try {
  register_graph_compiler(std::make_shared<Fusing>());
  Net net;
  auto fast = graph::compile(net, {.compiler = "fusing"});
  const at::Tensor x = torch::randn({16, 64});
  const auto gradient_of = [&](const at::Tensor& result) {
    return torch::autograd::grad({result.square().sum()}, {net->scale})[0];
  };
  const at::Tensor gradient = gradient_of(fast->forward(x)), expected = gradient_of(net->forward(x));
  const bool same = at::allclose(gradient, expected, 1e-4, 1e-4);
  std::printf("gradients are %s as without a graph\n", same ? "the same" : "not the same");
  return same ? 0 : 1;
} catch (...) {
  return failure("own_compiler");
}
