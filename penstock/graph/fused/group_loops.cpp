#include "penstock/graph/fused/group_loops.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "penstock/graph/fused/group_lowering.h"

namespace penstock::graph {
namespace {

bool is_gapless(const Geometry& geometry) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;
  for (std::size_t d = 0; d < geometry.sizes.size(); ++d)
    if (geometry.sizes[d] > 1) dims.emplace_back(geometry.strides[d], geometry.sizes[d]);
  std::sort(dims.begin(), dims.end());
  std::int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

}  // namespace

std::optional<ElementType> element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return ElementType::Bool;
    case at::kByte:
      return ElementType::UInt8;
    case at::kChar:
      return ElementType::Int8;
    case at::kShort:
      return ElementType::Int16;
    case at::kInt:
      return ElementType::Int32;
    case at::kLong:
      return ElementType::Int64;
    case at::kHalf:
      return ElementType::Half;
    case at::kBFloat16:
      return ElementType::BFloat16;
    case at::kFloat:
      return ElementType::Float;
    case at::kDouble:
      return ElementType::Double;
    default:
      return std::nullopt;
  }
}

std::vector<std::int64_t> GroupLowering::strides_of(const Term& term, const Geometry& geometry,
                                                    const std::vector<IndexSpace::Axis>& loops) const {
  std::vector<std::int64_t> strides(loops.size(), 0);
  for (std::size_t d = 0; d < term.dims.size(); ++d) {
    const Axes axes = space_.leaves(term.dims[d]);
    std::int64_t stride = geometry.strides[d];
    for (std::size_t i = axes.size(); i-- > 0;) {
      const auto loop = std::find(loops.begin(), loops.end(), axes[i]);
      if (loop == loops.end()) throw NotLoops();
      strides[static_cast<std::size_t>(loop - loops.begin())] = stride;
      stride *= space_.size(axes[i]);
    }
  }
  return strides;
}

void GroupLowering::set_loops() {
  const auto as_set = [](const Axes& axes) {
    std::set<IndexSpace::Axis> set(axes.begin(), axes.end());
    // An element would be one of a diagonal.
    if (set.size() != axes.size()) throw NotLoops();
    return set;
  };
  std::set<IndexSpace::Axis> all, reduced;
  for (const ValueId value : computed_) {
    const auto axes = as_set(all_axes(terms_.at(index_of(value))));
    all.insert(axes.begin(), axes.end());
  }
  for (std::size_t i = 0; i < reduced_.size(); ++i) {
    const auto axes = as_set(space_.leaves(reduced_[i]));
    if (i > 0 && axes != reduced) throw NotLoops();
    reduced = axes;
  }
  all.insert(reduced.begin(), reduced.end());
  std::set<IndexSpace::Axis> rest;
  std::set_difference(all.begin(), all.end(), reduced.begin(), reduced.end(),
                      std::inserter(rest, rest.end()));
  // Every value is computed once for each element, or once for each row or column.
  for (const ValueId value : computed_) {
    const Term& term = terms_.at(index_of(value));
    const auto axes = as_set(all_axes(term));
    const bool is_sum = kernel_.instructions[static_cast<std::size_t>(term.value)].op == LoopOp::ColumnSum;
    if (axes == all && !(kernel_.form == LoopForm::Columns && is_sum)) continue;
    if (axes != rest || kernel_.form == LoopForm::Elements) throw NotLoops();
    if (kernel_.form == LoopForm::Columns && !is_sum) throw NotLoops();
  }

  // A sum of columns is known when all rows are.
  for (const LoopInstruction& instruction : kernel_.instructions)
    for (std::size_t o = 0; o < operand_count(instruction.op); ++o)
      if (kernel_.instructions[static_cast<std::size_t>(instruction.operands[o])].op == LoopOp::ColumnSum)
        throw NotLoops();

  // Outputs get their buffers; the largest tensor decides the order of the loops.
  const Term* first = nullptr;
  const Geometry* order = nullptr;
  const auto consider = [&](const Term& term, const Geometry& geometry) {
    if (first && all_axes(term).size() <= all_axes(*first).size()) return;
    first = &term;
    order = &geometry;
  };
  std::vector<GroupTensor> outputs;
  for (const ValueId value : needed_) {
    if (!is_computed(value)) throw NotLoops();
    const Geometry& geometry = graph_[value].geometry;
    const Term& term = terms_.at(index_of(value));
    if (!is_gapless(geometry) || geometry.storage_offset != 0 || !is_usable(geometry)) throw NotLoops();
    if (kernel_.form == LoopForm::Columns &&
        kernel_.instructions[static_cast<std::size_t>(term.value)].op != LoopOp::ColumnSum)
      throw NotLoops();
    outputs.push_back({value, kernel_.buffers.size()});
    kernel_.buffers.push_back({.type = term.type, .written = true});
    kernel_.stores.push_back({term.value, outputs.back().buffer});
    consider(term, geometry);
  }
  for (const GroupTensor& input : inputs_)
    consider(terms_.at(index_of(input.value)), graph_[input.value].geometry);
  if (outputs.empty() || !first) throw NotLoops();
  std::vector<IndexSpace::Axis> loops(all.begin(), all.end());
  const std::vector<std::int64_t> by_order = strides_of(*first, *order, loops);
  std::map<IndexSpace::Axis, std::int64_t> stride_in_order;
  for (std::size_t i = 0; i < loops.size(); ++i) stride_in_order[loops[i]] = by_order[i];
  const auto is_last = [&](IndexSpace::Axis axis) {
    return kernel_.form == LoopForm::Columns ? !reduced.contains(axis) : reduced.contains(axis);
  };
  std::stable_sort(loops.begin(), loops.end(), [&](IndexSpace::Axis a, IndexSpace::Axis b) {
    if (is_last(a) != is_last(b)) return is_last(b);
    const std::int64_t x = stride_in_order.at(a), y = stride_in_order.at(b);
    if ((x == 0) != (y == 0)) return x == 0;
    return x > y;
  });
  for (const IndexSpace::Axis axis : loops) kernel_.sizes.push_back(space_.size(axis));
  if (kernel_.form == LoopForm::Rows) kernel_.row_dims = reduced.size();
  if (kernel_.form == LoopForm::Columns) {
    kernel_.column_dims = reduced.size();
    if (rest.empty()) throw NotLoops();
  }
  for (const auto* tensors : {&inputs_, &outputs})
    for (const GroupTensor& tensor : *tensors) {
      const Term& term = terms_.at(index_of(tensor.value));
      kernel_.buffers[tensor.buffer].strides = strides_of(term, graph_[tensor.value].geometry, loops);
      if (loops.empty()) kernel_.buffers[tensor.buffer].strides = {0};
    }
  if (loops.empty()) kernel_.sizes = {1};
  outputs_ = std::move(outputs);
}

GroupLoops GroupLowering::run() {
  for (const std::size_t index : nodes_) {
    const Node& node = graph_.nodes[index];
    const OperatorRow* row = row_of(node.op);
    if (!row || (options_.exact && !row->exact)) throw NotLoops();
    if (row->view && !terms_.contains(index_of(node.arguments.at(0).value()))) throw NotLoops();
    row->lower(*this, node);
    // The operators of the group, which run where the kernel cannot, need their arguments.
    for_each_value(node.arguments, [&](ValueId value) {
      if (!terms_.contains(index_of(value))) throw NotLoops();
    });
  }
  set_loops();
  join_loops(kernel_);
  if (uses_position_ && kernel_.row_dims != 1) throw NotLoops();
  if (kernel_.form == LoopForm::Columns && kernel_.first_inner_dim() + 1 != kernel_.sizes.size())
    throw NotLoops();
  verify(kernel_);
  return {std::move(kernel_), std::move(inputs_), std::move(outputs_)};
}

NodeKind kind_of(const Graph& graph, const Node& node, const LoweringOptions& options) {
  const OperatorRow* row = row_of(node.op);
  if (!row || (options.exact && !row->exact) || must_run(node) || writes(node)) return NodeKind::Unknown;
  for (const Operand& result : node.results) {
    const ValueId value = result.value();
    if (value == kNoValue || !GroupLowering::is_usable(graph[value].geometry) ||
        !element_type(graph[value].geometry.dtype))
      return NodeKind::Unknown;
    // LibTorch's CUDA operators contract and multiply by reciprocals.
    if (options.exact && graph[value].geometry.device.is_cuda()) return NodeKind::Unknown;
  }
  return row->view ? NodeKind::View : NodeKind::Compute;
}

std::optional<GroupLoops> loops_of(const Graph& graph, const std::vector<std::size_t>& nodes,
                                   const std::vector<ValueId>& needed, const LoweringOptions& options) {
  try {
    return GroupLowering(graph, nodes, needed, options).run();
  } catch (const NotLoops&) {
    return std::nullopt;
  }
}

}  // namespace penstock::graph
