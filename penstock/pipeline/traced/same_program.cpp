#include "penstock/pipeline/traced/same_program.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <map>
#include <vector>

#include "penstock/graph/ir/constant_value.h"
#include "penstock/torch/tree/same_leaf.h"

namespace penstock {

namespace {

using graph::Operand;
using graph::ValueId;

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

  bool same_nodes(std::size_t first_a, std::size_t first_b, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const graph::Node &x = a_.trace.graph.nodes[first_a + i], &y = b_.trace.graph.nodes[first_b + i];
      if (x.op.operator_name() != y.op.operator_name() || x.grad_enabled != y.grad_enabled) return false;
      if (!same_operands(x.arguments, y.arguments) || !same_operands(x.results, y.results)) return false;
    }
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

 private:
  bool same_value(ValueId x, ValueId y) {
    if (x == graph::kNoValue || y == graph::kNoValue) return x == y;
    const auto [known, is_new] = other_.emplace(x, y);
    if (!is_new) return known->second == y;
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
    return equal_found_ && at::equal(x, y);
  }

  const PipeVariant &a_, &b_;
  const bool equal_found_;
  std::map<ValueId, ValueId> other_;
  std::map<ValueId, at::Tensor> found_a_, found_b_;
  std::map<ValueId, const std::string*> names_a_, names_b_;
};

}  // namespace

bool same_operators(const PipeVariant& a, const PipeVariant& b) {
  const graph::Graph &x = a.trace.graph, &y = b.trace.graph;
  if (!a.trace.functions.empty() || !b.trace.functions.empty() || x.nodes.size() != y.nodes.size())
    return false;
  ProgramComparison comparison(a, b, false);
  return comparison.same_nodes(0, 0, x.nodes.size()) && comparison.same_operands(x.outputs, y.outputs);
}

bool same_stage(const PipeVariant& a, const PipeVariant& b, std::size_t stage) {
  const graph::CutStage &x = a.cut.stages[stage], &y = b.cut.stages[stage];
  if (x.functions.size() != y.functions.size() || x.end - x.first != y.end - y.first) return false;
  ProgramComparison comparison(a, b, true);
  return comparison.same_values(x.main_inputs, y.main_inputs) &&
         comparison.same_values(x.skip_inputs, y.skip_inputs) &&
         comparison.same_nodes(x.first, y.first, x.end - x.first) &&
         comparison.same_values(x.main_outputs, y.main_outputs);
}

bool same_arguments(const PipeVariant& a, const PipeVariant& b, std::size_t stage) {
  const graph::CutStage &x = a.cut.stages[stage], &y = b.cut.stages[stage];
  const auto same_sizes = [&](const std::vector<ValueId>& left, const std::vector<ValueId>& right) {
    return std::equal(left.begin(), left.end(), right.begin(), right.end(), [&](ValueId p, ValueId q) {
      return a.geometry(p).sizes == b.geometry(q).sizes && a.geometry(p).dtype == b.geometry(q).dtype;
    });
  };
  const auto tensors_of = [](const PipeVariant& variant, const graph::CutStage& cut) {
    std::vector<ValueId> values;
    for (const std::size_t input : cut.keywords) values.push_back(variant.trace.graph.inputs[input].value);
    return values;
  };
  if (a.kwargs != b.kwargs) return false;
  const std::size_t first = a.args.leaf_count();
  if (first != b.args.leaf_count()) return false;
  for (std::size_t leaf = first; leaf < a.leaves.size(); ++leaf)
    if (!same_leaf(a.leaves[leaf], b.leaves[leaf])) return false;
  return same_sizes(x.main_inputs, y.main_inputs) && same_sizes(x.skip_inputs, y.skip_inputs) &&
         same_sizes(tensors_of(a, x), tensors_of(b, y));
}

}  // namespace penstock
