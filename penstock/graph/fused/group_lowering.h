// Reads the operators of a group into a loop kernel, one after the other (operator_loops.cpp), and lays out
// its loops at the end (group_loops.cpp). Private to this folder. Thread safety: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "penstock/graph/codegen/index_space.h"
#include "penstock/graph/fused/group_loops.h"

namespace penstock::graph {

using Axes = IndexSpace::Dim;

// None for dtypes that kernels do not know.
std::optional<ElementType> element_type(at::ScalarType dtype);

// A tensor of the group: what computes its elements, and the axes of its dims.
struct Term {
  int value = kNoOperand;
  ElementType type = ElementType::Float;  // of the tensor
  std::vector<Axes> dims;
};

// Thrown by what cannot be part of a kernel; loops_of() catches it.
struct NotLoops {};

class GroupLowering {
 public:
  GroupLowering(const Graph& graph, const std::vector<std::size_t>& nodes, const std::vector<ValueId>& needed,
                const LoweringOptions& options)
      : graph_(graph), nodes_(nodes), needed_(needed), options_(options) {}

  GroupLoops run();

  // ---- for the table of operators ----

  const Graph& graph() const { return graph_; }
  bool exact() const { return options_.exact; }
  const Geometry& geometry(ValueId value) const { return graph_[value].geometry; }
  const Geometry& result(const Node& node, std::size_t i = 0) const {
    const ValueId value = node.results.at(i).value();
    if (value == kNoValue) throw NotLoops();
    return geometry(value);
  }

  Term& tensor(const Node& node, std::size_t argument) {
    const ValueId value = node.arguments.at(argument).value();
    if (value == kNoValue) throw NotLoops();
    return term(value);
  }
  // The constant of an argument.
  const c10::IValue& constant(const Node& node, std::size_t argument) const {
    const Operand& operand = node.arguments.at(argument);
    if (operand.kind != Operand::Kind::Constant || operand.symbolic != kNotSymbolic) throw NotLoops();
    return operand.constant;
  }
  bool is_none(const Node& node, std::size_t argument) const { return constant(node, argument).isNone(); }
  at::Scalar scalar(const Node& node, std::size_t argument) const {
    const c10::IValue& value = constant(node, argument);
    if (!value.isScalar() || value.toScalar().isComplex()) throw NotLoops();
    return value.toScalar();
  }
  double number(const Node& node, std::size_t argument) const { return scalar(node, argument).toDouble(); }

  int add(LoopOp op, int a, int b = kNoOperand, int c = kNoOperand) {
    return kernel_.add({.op = op, .operands = {a, b, c}});
  }
  int add(const LoopInstruction& instruction) { return kernel_.add(instruction); }
  ElementType type_of(int value) const { return kernel_.instructions[static_cast<std::size_t>(value)].type; }
  bool is_loaded(int value) const {
    return kernel_.instructions[static_cast<std::size_t>(value)].op == LoopOp::Load;
  }
  int number_like(int like, double number) { return kernel_.add(LoopInstruction::of(type_of(like), number)); }
  int convert(int value, ElementType type) {
    if (type_of(value) == type) return value;
    if (is_float(type_of(value)) && is_whole_number(type)) throw NotLoops();
    return kernel_.add({.op = LoopOp::Convert, .type = type, .operands = {value, kNoOperand, kNoOperand}});
  }
  int round(int value, ElementType type) {
    return kernel_.add({.op = LoopOp::Round, .operands = {value, kNoOperand, kNoOperand}, .rounded = type});
  }
  // A tensor's element as one of another dtype, as `to` makes it.
  int cast(const Term& from, ElementType to) {
    const int value = convert(from.value, computed_in(to));
    return is_narrow_float(to) && from.type != to ? round(value, to) : value;
  }
  // A constant as the operator takes it beside tensors of a dtype.
  int constant_of(ElementType type, const at::Scalar& scalar) {
    if (type == ElementType::Bool || (is_whole_number(type) && scalar.isFloatingPoint())) throw NotLoops();
    LoopInstruction number = LoopInstruction::of(computed_in(type), scalar.toDouble());
    if (is_whole_number(type)) {
      number.whole = scalar.toLong();
      const unsigned bits =
          static_cast<unsigned>(8 * bytes_of(type)) - (type == ElementType::UInt8 ? 0u : 1u);
      if (bits < 63 && (number.whole >= (std::int64_t{1} << bits) ||
                        number.whole < (type == ElementType::UInt8 ? 0 : -(std::int64_t{1} << bits))))
        throw NotLoops();
    } else if (is_narrow_float(type) && options_.exact) {
      // Whether a constant is rounded first depends on the operator.
      const float given = static_cast<float>(number.number);
      const float rounded = type == ElementType::Half ? static_cast<float>(static_cast<at::Half>(given))
                                                      : static_cast<float>(static_cast<at::BFloat16>(given));
      if (given != rounded) throw NotLoops();
    }
    return kernel_.add(number);
  }

  // The dims of a result of broadcast tensors.
  std::vector<Axes> broadcast(const std::vector<const Term*>& terms, std::size_t dims) {
    std::vector<Axes> made(dims);
    for (const Term* term : terms) {
      if (term->dims.size() > dims) throw NotLoops();
      for (std::size_t i = 0; i < term->dims.size(); ++i) {
        Axes& dim = made[dims - term->dims.size() + i];
        const Axes& other = term->dims[i];
        if (other.empty()) continue;
        if (dim.empty())
          dim = other;
        else if (!space_.unify(dim, other))
          throw NotLoops();
      }
    }
    return made;
  }
  std::vector<Axes> fresh_dims(const Geometry& geometry) {
    std::vector<Axes> dims;
    for (const std::int64_t size : geometry.sizes) dims.push_back(space_.dim(size));
    return dims;
  }
  IndexSpace& space() { return space_; }

  // Sets a result, whose computed type must be that of its dtype.
  void set(const Node& node, std::size_t i, int value, std::vector<Axes> dims) {
    const ValueId result = node.results.at(i).value();
    if (result == kNoValue) return;
    require_device(geometry(result));
    const auto type = element_type(geometry(result).dtype);
    if (!type || type_of(value) != computed_in(*type) || dims.size() != geometry(result).sizes.size())
      throw NotLoops();
    if (options_.exact && is_narrow_float(*type)) value = round(value, *type);
    for (std::size_t d = 0; d < dims.size(); ++d)
      if (space_.size_of(dims[d]) != geometry(result).sizes[d]) throw NotLoops();
    terms_[index_of(result)] = {value, *type, std::move(dims)};
    computed_.push_back(result);
  }
  void set_view(const Node& node, const Term& base, std::vector<Axes> dims) {
    const ValueId result = node.results.at(0).value();
    if (result == kNoValue) throw NotLoops();
    terms_[index_of(result)] = {base.value, base.type, std::move(dims)};
  }
  bool is_computed(ValueId value) const {
    const auto found = terms_.find(index_of(value));
    return found != terms_.end() && !loaded_.contains(index_of(value));
  }

  // One number for all elements that differ in `over` alone. The form of the kernel follows from the first.
  int reduce(LoopOp row_op, int value, const Axes& over, bool rows) {
    if (over.empty()) throw NotLoops();
    const LoopForm form = rows ? LoopForm::Rows : LoopForm::Columns;
    if (kernel_.form == LoopForm::Elements)
      kernel_.form = form;
    else if (kernel_.form != form)
      throw NotLoops();
    reduced_.push_back(over);
    if (!rows && row_op != LoopOp::RowSum) throw NotLoops();
    return add(rows ? row_op : LoopOp::ColumnSum, value);
  }
  // The place of an element in its row, which has these axes.
  int position_in(const Axes& row) {
    if (row.empty() || kernel_.form == LoopForm::Columns) throw NotLoops();
    kernel_.form = LoopForm::Rows;
    reduced_.push_back(row);
    uses_position_ = true;
    return kernel_.add({.op = LoopOp::Position});
  }
  // Whether reducing these dims of a tensor is a matter of neighbours in memory.
  static bool are_inner(const Geometry& geometry, const std::vector<char>& is_reduced) {
    std::size_t innermost = geometry.sizes.size();
    for (std::size_t d = geometry.sizes.size(); d-- > 0;)
      if (geometry.sizes[d] > 1 && geometry.strides[d] != 0 &&
          (innermost == geometry.sizes.size() || geometry.strides[d] < geometry.strides[innermost]))
        innermost = d;
    return innermost == geometry.sizes.size() || is_reduced[innermost];
  }

 private:
  // The term of a value; one from outside the group is loaded.
  Term& term(ValueId value) {
    const auto found = terms_.find(index_of(value));
    if (found != terms_.end()) return found->second;
    const Geometry& geometry = graph_[value].geometry;
    const auto type = element_type(geometry.dtype);
    if (!type || !is_usable(geometry)) throw NotLoops();
    require_device(geometry);
    const std::size_t buffer = kernel_.buffers.size();
    kernel_.buffers.push_back({.type = *type});
    inputs_.push_back({value, buffer});
    Term loaded{kNoOperand, *type, fresh_dims(geometry)};
    loaded.value = kernel_.add({.op = LoopOp::Load, .buffer = buffer});
    loaded_.insert(index_of(value));
    return terms_[index_of(value)] = std::move(loaded);
  }

 public:
  static bool is_usable(const Geometry& geometry) {
    return (geometry.device.is_cpu() || geometry.device.is_cuda()) && !geometry.conjugated &&
           !geometry.negated && geometry.symbolic == kNotSymbolic && geometry.numel() > 0;
  }

 private:
  // A kernel runs on one device.
  void require_device(const Geometry& geometry) {
    if (!device_) device_ = geometry.device;
    if (*device_ != geometry.device) throw NotLoops();
  }
  Axes all_axes(const Term& term) const { return space_.leaves(joined(term.dims)); }
  std::vector<std::int64_t> strides_of(const Term& term, const Geometry& geometry,
                                       const std::vector<IndexSpace::Axis>& loops) const;
  void set_loops();

  const Graph& graph_;
  const std::vector<std::size_t>& nodes_;
  const std::vector<ValueId>& needed_;
  const LoweringOptions& options_;
  IndexSpace space_;
  LoopKernel kernel_;
  std::vector<Axes> reduced_;
  std::unordered_map<std::size_t, Term> terms_;  // by value
  std::set<std::size_t> loaded_;                 // values from outside
  std::vector<ValueId> computed_;
  std::vector<GroupTensor> inputs_, outputs_;
  bool uses_position_ = false;
  std::optional<c10::Device> device_;
};

struct OperatorRow {
  const char* name;  // with the overload
  void (*lower)(GroupLowering& group, const Node& node);
  bool exact = false;  // has the bits of the operator, with what `lower` refuses in exact mode
  bool view = false;
};
// Null for an operator that is not part of kernels.
const OperatorRow* row_of(const c10::OperatorHandle& op);

}  // namespace penstock::graph
