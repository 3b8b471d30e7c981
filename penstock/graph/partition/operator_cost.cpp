#include "penstock/graph/partition/operator_cost.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string_view>

#include "penstock/graph/ir/memory_groups.h"

namespace penstock::graph {
namespace {

std::string_view bare_name(const Node& node) {
  const std::string& name = node.op.operator_name().name;
  return std::string_view(name).substr(name.rfind(':') + 1);
}

// Elements in memory: one that is at several places (expand) counts once.
double elements_of(const Geometry& geometry) {
  double elements = 1;
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i)
    if (geometry.strides[i] != 0 || geometry.sizes[i] == 0)
      elements *= static_cast<double>(geometry.sizes[i]);
  return elements;
}

const Geometry* argument_geometry(const Graph& graph, const std::vector<Operand>& operands,
                                  std::size_t place) {
  if (place >= operands.size()) return nullptr;
  const ValueId value = operands[place].value();
  return value == kNoValue ? nullptr : &graph[value].geometry;
}

std::int64_t size_from_end(const Geometry& geometry, std::size_t place) {
  const std::size_t dims = geometry.sizes.size();
  return place < dims ? geometry.sizes[dims - 1 - place] : 1;
}

// Products of matrices: which argument has the rows and the dim that is summed over.
struct MatrixProduct {
  std::string_view name;
  std::size_t left;
};
constexpr std::array kProducts = {MatrixProduct{"mm", 0},
                                  MatrixProduct{"bmm", 0},
                                  MatrixProduct{"addmm", 1},
                                  MatrixProduct{"baddbmm", 1},
                                  MatrixProduct{"addbmm", 1},
                                  MatrixProduct{"matmul", 0},
                                  MatrixProduct{"linear", 0},
                                  MatrixProduct{"mv", 0},
                                  MatrixProduct{"addmv", 1},
                                  MatrixProduct{"dot", 0},
                                  MatrixProduct{"grouped_product", 0},
                                  MatrixProduct{"router_logits", 0}};

// Two or more multiplications for each pair of a query and a key, and for each element of the two.
constexpr std::array<std::string_view, 3> kAttentions = {"scaled_dot_product", "window_attention",
                                                         "block_attention"};

// Per element of the results, in multiplications.
constexpr std::array<std::string_view, 20> kExponentials = {
    "exp",          "log",          "tanh",        "sigmoid",     "erf",
    "gelu",         "silu",         "softmax",     "log_softmax", "_softmax",
    "_log_softmax", "silu_product", "silu_halves", "softplus",    "pow",
    "sin",          "cos",          "mish",        "logsumexp",   "causal_convolution"};
constexpr std::array<std::string_view, 4> kDraws = {"dropout", "bernoulli", "keyed_", "rand"};

template <class Names>
bool has_part(std::string_view name, const Names& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](std::string_view part) { return name.find(part) != std::string_view::npos; });
}

double multiplications(const Graph& graph, const Node& node, std::string_view name, double results) {
  for (const MatrixProduct& product : kProducts)
    if (product.name == name)
      if (const Geometry* left = argument_geometry(graph, node.arguments, product.left))
        return results * static_cast<double>(size_from_end(*left, 0));
  if (name.find("convolution") != std::string_view::npos && name != "causal_convolution")
    if (const Geometry* weight = argument_geometry(graph, node.arguments, 1);
        weight && !weight->sizes.empty())
      return results * static_cast<double>(weight->numel()) /
             static_cast<double>(std::max<std::int64_t>(1, weight->sizes[0]));
  if (has_part(name, kAttentions)) {
    const Geometry *query = argument_geometry(graph, node.arguments, 0),
                   *key = argument_geometry(graph, node.arguments, 1);
    if (query && key)
      return 2 * static_cast<double>(query->numel()) * static_cast<double>(size_from_end(*key, 1));
  }
  if (name == "selective_scan")
    if (const Geometry* keys = argument_geometry(graph, node.arguments, 3))
      return 4 * results * static_cast<double>(size_from_end(*keys, 0));
  if (name == "expert_feed")
    if (const Geometry* gate = argument_geometry(graph, node.arguments, 1))
      return 3 * results * static_cast<double>(size_from_end(*gate, 1));
  if (has_part(name, kDraws)) return 32 * results;
  if (std::find(kExponentials.begin(), kExponentials.end(), name) != kExponentials.end()) return 16 * results;
  return results;
}

}  // namespace

std::int64_t cost_of_node(const Graph& graph, const Node& node) {
  if (only_views(node)) return 0;
  double bytes = 0, results = 0;
  bool on_gpu = false, is_narrow = false;
  const auto add = [&](ValueId value) {
    const Geometry& geometry = graph[value].geometry;
    bytes += elements_of(geometry) * static_cast<double>(c10::elementSize(geometry.dtype));
    on_gpu |= geometry.device.is_cuda();
    is_narrow |= geometry.dtype == at::kBFloat16 || geometry.dtype == at::kHalf;
  };
  for_each_value(node.arguments, add);
  for_each_value(node.results, [&](ValueId value) {
    add(value);
    results += elements_of(graph[value].geometry);
  });
  // A random operator with its state as an argument is named after the operator inside.
  const double work = multiplications(graph, node, bare_name(node), results),
               for_a_byte = !on_gpu     ? 8
                            : is_narrow ? 128
                                        : 12,
               call = on_gpu ? 65536 : 4096;
  return static_cast<std::int64_t>(std::llround(std::min(bytes + work / for_a_byte + call, 1e15)));
}

}  // namespace penstock::graph
