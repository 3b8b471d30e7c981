// "algebraic": removes operators whose result has the bits of their argument.
//
//   x * 1, x / 1                 real numbers
//   x - 0                        real numbers; x + 0 of whole ones alone, since -0.0 + 0 is +0.0
//   x + (-0.0)                   floating-point numbers
//   -(-x)                        real numbers
//   a copy (clone, contiguous)   whatever it is of
//
// Only if the result has the dtype, sizes, strides and offset of the argument, and nobody can tell that both
// are in one memory from then on (VisibleMemory::may_put). Complex numbers are left alone: (a + bi) * 1 is
// computed with 0 * b, which is a NaN for an infinite b.
#include <cmath>
#include <optional>
#include <utility>

#include "penstock/graph/passes/replacement.h"
#include "penstock/graph/passes/standard_passes.h"

namespace penstock::graph {
namespace {

constexpr std::string_view kAlgebraicOperators[] = {
    "aten::mul.Tensor", "aten::mul.Scalar", "aten::div.Tensor", "aten::div.Scalar", "aten::add.Tensor",
    "aten::add.Scalar", "aten::sub.Tensor", "aten::sub.Scalar", "aten::neg",        "aten::clone"};
enum AlgebraicOperator {
  kMul,
  kMulScalar,
  kDiv,
  kDivScalar,
  kAdd,
  kAddScalar,
  kSub,
  kSubScalar,
  kNeg,
  kClone
};

// A constant number among the arguments of an operator.
struct ConstantNumber {
  bool whole = false;
  double value = 0;  // of a whole one: exact where it matters, at 0 and 1

  bool is_one() const { return value == 1; }
  bool is_zero() const { return value == 0 && (whole || !std::signbit(value)); }
  bool is_minus_zero() const { return !whole && value == 0 && std::signbit(value); }
};

std::optional<ConstantNumber> number_in(const Operand& operand) {
  if (operand.kind != Operand::Kind::Constant || operand.symbolic != kNotSymbolic) return std::nullopt;
  const c10::IValue& constant = operand.constant;
  if (constant.isInt()) return ConstantNumber{true, static_cast<double>(constant.toInt())};
  if (constant.isDouble()) return ConstantNumber{false, constant.toDouble()};
  if (!constant.isTensor() || !constant.toTensor().defined()) return std::nullopt;
  const at::Tensor& tensor = constant.toTensor();
  if (!tensor.unsafeGetTensorImpl()->is_wrapped_number() || !tensor.is_cpu() || tensor.dim() != 0)
    return std::nullopt;
  if (tensor.scalar_type() == at::kLong)
    return ConstantNumber{true, static_cast<double>(*tensor.data_ptr<std::int64_t>())};
  if (tensor.scalar_type() == at::kDouble) return ConstantNumber{false, *tensor.data_ptr<double>()};
  return std::nullopt;
}

class Simplifier {
 public:
  Simplifier(Graph& graph, PassRole role)
      : graph_(graph),
        role_(role),
        memory_(graph),
        replaced_(graph),
        operators_(kAlgebraicOperators),
        negated_(graph.values.size(), kNoValue) {}

  void run() {
    std::vector<char> gone(graph_.nodes.size(), 0);
    bool any = false;
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node& node = graph_.nodes[i];
      replaced_.translate(node.arguments);
      const int op = operators_.of(node.op);
      if (op < 0 || node.results.size() != 1 || node.results[0].value() == kNoValue) continue;
      const ValueId result = node.results[0].value(), same = unchanged(node, op);
      if (same == kNoValue || graph_[same].geometry != graph_[result].geometry ||
          !holds_for_all_sizes(graph_, graph_[result].geometry) ||
          !memory_.may_put(graph_, role_, same, result))
        continue;
      replaced_.put(same, result);
      any = true;
      gone[i] = 1;
    }
    if (!any) return;
    replaced_.finish();
    erase_nodes(graph_, gone);
  }

 private:
  // The tensor that has the bits of the node's result, if it also has its geometry.
  ValueId unchanged(const Node& node, int op) {
    const ValueId x = node.arguments[0].value();
    if (op == kClone) return x;
    if (op == kNeg) {
      negated_[index_of(node.results[0].value())] = x;
      return is_real(x) ? negated_[index_of(x)] : kNoValue;
    }
    // The number of a product or sum may also be the first argument.
    const bool swapped = x == kNoValue && (op == kMul || op == kAdd);
    const ValueId tensor = swapped ? node.arguments[1].value() : x;
    if (tensor == kNoValue || !is_real(tensor)) return kNoValue;
    const std::optional<ConstantNumber> number = number_in(node.arguments[swapped ? 0 : 1]);
    if (!number) return kNoValue;
    switch (op) {
      case kMul:
      case kMulScalar:
      case kDiv:
      case kDivScalar:
        return number->is_one() ? tensor : kNoValue;
      default:
        break;
    }
    // `alpha` is a factor of the second argument, which must be the number.
    const std::optional<ConstantNumber> alpha = number_in(node.arguments[2]);
    if (!alpha || !alpha->is_one()) return kNoValue;
    const bool floating = c10::isFloatingType(graph_[tensor].geometry.dtype);
    if (!floating) return number->is_zero() && number->whole ? tensor : kNoValue;
    const bool adds = op == kAdd || op == kAddScalar;
    return (adds ? number->is_minus_zero() : number->is_zero()) ? tensor : kNoValue;
  }

  bool is_real(ValueId value) const {
    if (value == kNoValue) return false;
    const Geometry& geometry = graph_[value].geometry;
    const bool whole = c10::isIntegralType(geometry.dtype, /*includeBool=*/false);
    return (whole || c10::isFloatingType(geometry.dtype)) && !geometry.negated;
  }

  Graph& graph_;
  PassRole role_;
  VisibleMemory memory_;
  Replacement replaced_;
  OperatorNumbers operators_;
  std::vector<ValueId> negated_;  // by value: of the result of aten::neg, its argument
};

class Algebraic final : public GraphPass {
 public:
  std::string_view name() const override { return "algebraic"; }
  bool takes_symbols() const override { return true; }
  Graph run(Graph graph, const PassContext& context) const override {
    Simplifier(graph, context.role).run();
    return graph;
  }
};

}  // namespace

PassPointer algebraic_pass() { return std::make_shared<const Algebraic>(); }

}  // namespace penstock::graph
