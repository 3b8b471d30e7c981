#include "penstock/pipeline/traced/same_program.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "penstock/graph/ir/constant_value.h"
#include "penstock/torch/tree/same_leaf.h"

namespace penstock {

namespace {

using graph::CustomFunction;
using graph::Operand;
using graph::ValueId;

// NaNs are the same as NaNs of the same bits.
bool same_bits(const at::Tensor& x, const at::Tensor& y) {
  if (x.sizes() != y.sizes() || x.scalar_type() != y.scalar_type() || x.device() != y.device()) return false;
  if (x.is_meta() || x.numel() == 0) return true;
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous().reshape({-1}).view(at::kByte);
  };
  return at::equal(bytes(x), bytes(y));
}

// Compares nodes in order, and takes values for the same that appear in the same places.
class ProgramComparison {
 public:
  // `equal_found`: whether tensors that the forward found in its environment are the same if their values are
  // equal now.
  ProgramComparison(const PipeVariant& a, const PipeVariant& b, bool equal_found)
      : a_(a), b_(b), equal_found_(equal_found) {
    for (const graph::ConstantTensor& each : a.trace.graph.constants)
      found_a_.emplace(each.value, each.tensor);
    for (const graph::ConstantTensor& each : b.trace.graph.constants)
      found_b_.emplace(each.value, each.tensor);
    for (const graph::Placeholder& each : a.trace.graph.inputs) names_a_.emplace(each.value, &each.name);
    for (const graph::Placeholder& each : b.trace.graph.inputs) names_b_.emplace(each.value, &each.name);
  }

  bool same_node(const graph::Node& x, const graph::Node& y) {
    return x.op.operator_name() == y.op.operator_name() && x.grad_enabled == y.grad_enabled &&
           same_operands(x.arguments, y.arguments) && same_operands(x.results, y.results);
  }

  bool same_nodes(std::size_t first_a, std::size_t first_b, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      if (!same_node(a_.trace.graph.nodes[first_a + i], b_.trace.graph.nodes[first_b + i])) return false;
    return true;
  }

  bool same_values(const std::vector<ValueId>& x, const std::vector<ValueId>& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                      [&](ValueId p, ValueId q) { return same_value(p, q); });
  }

  bool same_operands(const std::vector<Operand>& x, const std::vector<Operand>& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), [&](const Operand& p, const Operand& q) {
      return p.kind == q.kind &&
             (p.kind != Operand::Kind::Constant || graph::same_constant(p.constant, q.constant)) &&
             std::equal(p.values.begin(), p.values.end(), q.values.begin(), q.values.end(),
                        [&](ValueId m, ValueId n) { return same_value(m, n); });
    });
  }

  // Functions of stages that begin at these nodes.
  bool same_function(const CustomFunction& x, const CustomFunction& y, std::size_t first_a,
                     std::size_t first_b) {
    return x.name == y.name && x.first - first_a == y.first - first_b && x.end - first_a == y.end - first_b &&
           same_values(x.inputs, y.inputs) && same_values(x.outputs, y.outputs) &&
           same_values(x.tangents, y.tangents) && same_values(x.saved, y.saved) &&
           std::equal(x.backward.begin(), x.backward.end(), y.backward.begin(), y.backward.end(),
                      [&](const graph::Node& p, const graph::Node& q) { return same_node(p, q); }) &&
           same_operands(x.gradients, y.gradients);
  }

  bool same_results() {
    return a_.result == b_.result && same_operands(a_.trace.graph.outputs, b_.trace.graph.outputs);
  }

 private:
  bool same_value(ValueId x, ValueId y) {
    if (x == graph::kNoValue || y == graph::kNoValue) return x == y;
    const auto [known, is_new] = other_.emplace(x, y);
    if (!is_new) return known->second == y;
    // Two values of one trace are not one value of the other.
    if (!taken_.insert(y).second) return false;
    if (!(a_.geometry(x) == b_.geometry(y))) return false;
    const auto name_a = names_a_.find(x), name_b = names_b_.find(y);
    if ((name_a == names_a_.end()) != (name_b == names_b_.end())) return false;
    if (name_a != names_a_.end() && *name_a->second != *name_b->second) return false;
    const auto found_a = found_a_.find(x), found_b = found_b_.find(y);
    if ((found_a == found_a_.end()) != (found_b == found_b_.end())) return false;
    return found_a == found_a_.end() || same_found(found_a->second, found_b->second);
  }

  bool same_found(const at::Tensor& x, const at::Tensor& y) const {
    if (x.is_same(y) || (x.is_alias_of(y) && x.data_ptr() == y.data_ptr())) return true;
    return equal_found_ && same_bits(x, y);
  }

  const PipeVariant &a_, &b_;
  const bool equal_found_;
  std::map<ValueId, ValueId> other_;
  std::set<ValueId> taken_;
  std::map<ValueId, at::Tensor> found_a_, found_b_;
  std::map<ValueId, const std::string*> names_a_, names_b_;
};

// The plain leaves of the keyword arguments of an example, by path; empty for a tensor.
std::map<std::string, std::optional<Tree>> keyword_leaves(const PipeVariant& variant) {
  std::map<std::string, std::optional<Tree>> found;
  const std::vector<std::string> paths = variant.kwargs.leaf_paths("kwargs");
  for (std::size_t i = 0; i < paths.size(); ++i)
    found.emplace(paths[i], variant.leaves[variant.args.leaf_count() + i]);
  for (std::size_t i = variant.trace.found; i < variant.trace.graph.inputs.size(); ++i)
    if (variant.kinds[i] == graph::InputKind::Keyword) found[variant.trace.graph.inputs[i].name].reset();
  return found;
}

// The keyword arguments of a trace that are tensors, by path.
std::map<std::string, ValueId> keyword_tensors(const PipeVariant& variant) {
  std::map<std::string, ValueId> found;
  for (std::size_t i = variant.trace.found; i < variant.trace.graph.inputs.size(); ++i)
    if (variant.kinds[i] == graph::InputKind::Keyword)
      found.emplace(variant.trace.graph.inputs[i].name, variant.trace.graph.inputs[i].value);
  return found;
}

}  // namespace

bool same_operators(const PipeVariant& a, const PipeVariant& b) {
  const graph::Graph &x = a.trace.graph, &y = b.trace.graph;
  if (!a.trace.functions.empty() || !b.trace.functions.empty() || x.nodes.size() != y.nodes.size())
    return false;
  ProgramComparison comparison(a, b, false);
  return comparison.same_nodes(0, 0, x.nodes.size()) && comparison.same_results();
}

std::optional<std::size_t> first_other_node(const PipeVariant& a, const PipeVariant& b) {
  const std::vector<graph::Node>&x = a.trace.graph.nodes, &y = b.trace.graph.nodes;
  const std::size_t common = std::min(x.size(), y.size());
  ProgramComparison comparison(a, b, true);
  for (std::size_t i = 0; i < common; ++i)
    if (!comparison.same_node(x[i], y[i])) return i;
  if (x.size() != y.size()) return common;
  const bool same = std::equal(a.trace.functions.begin(), a.trace.functions.end(), b.trace.functions.begin(),
                               b.trace.functions.end(),
                               [&](const CustomFunction& p, const CustomFunction& q) {
                                 return comparison.same_function(p, q, 0, 0);
                               }) &&
                    comparison.same_results();
  return same ? std::nullopt : std::optional(common);
}

bool same_stage(const PipeVariant& a, const PipeVariant& b, std::size_t stage) {
  const graph::CutStage &x = a.cut.stages[stage], &y = b.cut.stages[stage];
  if (x.functions.size() != y.functions.size() || x.end - x.first != y.end - y.first) return false;
  ProgramComparison comparison(a, b, true);
  if (!comparison.same_values(x.main_inputs, y.main_inputs) ||
      !comparison.same_values(x.skip_inputs, y.skip_inputs) ||
      !comparison.same_nodes(x.first, y.first, x.end - x.first))
    return false;
  for (std::size_t i = 0; i < x.functions.size(); ++i)
    if (!comparison.same_function(a.trace.functions[x.functions[i]], b.trace.functions[y.functions[i]],
                                  x.first, y.first))
      return false;
  if (stage + 1 == a.cut.stages.size()) return comparison.same_results();
  return comparison.same_values(x.main_outputs, y.main_outputs) &&
         comparison.same_values(x.skip_outputs, y.skip_outputs);
}

bool in_same_mode(const PipeVariant& a, const PipeVariant& b) {
  for (std::size_t i = 0; i < a.training.size(); ++i)
    if (a.training[i] != b.training[i] && !a.any_mode[i] && !b.any_mode[i]) return false;
  return true;
}

bool same_tensors(const PipeVariant& a, const PipeVariant& b, std::size_t stage) {
  const graph::CutStage &x = a.cut.stages[stage], &y = b.cut.stages[stage];
  const auto same_size = [&](ValueId p, ValueId q) {
    return a.geometry(p).sizes == b.geometry(q).sizes && a.geometry(p).dtype == b.geometry(q).dtype;
  };
  const auto same_sizes = [&](const std::vector<ValueId>& left, const std::vector<ValueId>& right) {
    return std::equal(left.begin(), left.end(), right.begin(), right.end(), same_size);
  };
  const std::map<std::string, ValueId> of_a = keyword_tensors(a), of_b = keyword_tensors(b);
  const auto used_alike = [&](const PipeVariant& variant, const graph::CutStage& cut) {
    return std::all_of(cut.keywords.begin(), cut.keywords.end(), [&](std::size_t input) {
      const std::string& path = variant.trace.graph.inputs[input].name;
      const auto in_a = of_a.find(path), in_b = of_b.find(path);
      return in_a == of_a.end() || in_b == of_b.end() || same_size(in_a->second, in_b->second);
    });
  };
  return same_sizes(x.main_inputs, y.main_inputs) && same_sizes(x.skip_inputs, y.skip_inputs) &&
         used_alike(a, x) && used_alike(b, y);
}

std::vector<std::string> telling_keywords(const PipeVariant& a, const PipeVariant& b) {
  const auto of_a = keyword_leaves(a), of_b = keyword_leaves(b);
  std::vector<std::string> names;
  const auto add = [&](const std::string& path) {
    const std::string name = keyword_of(path);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  const auto is_nothing = [](const std::optional<Tree>& leaf) { return leaf && leaf->is_none(); };
  for (const auto& [path, leaf] : of_a) {
    const auto other = of_b.find(path);
    if (other == of_b.end()) {
      if (!is_nothing(leaf)) add(path);
    } else if (leaf.has_value() != other->second.has_value() || (leaf && !same_leaf(*leaf, *other->second))) {
      add(path);
    }
  }
  for (const auto& [path, leaf] : of_b)
    if (!of_a.contains(path) && !is_nothing(leaf)) add(path);
  return names;
}

std::string keyword_of(const std::string& path) {
  const std::size_t begin = path.find('\'') + 1;
  return path.substr(begin, path.find('\'', begin) - begin);
}

}  // namespace penstock
