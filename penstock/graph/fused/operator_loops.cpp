// What each operator is as instructions of a loop kernel.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "penstock/graph/fused/group_lowering.h"

namespace penstock::graph {
namespace {

ElementType result_type(const GroupLowering& group, const Node& node) {
  const auto type = element_type(group.result(node).dtype);
  if (!type) throw NotLoops();
  return *type;
}

// An operand of an operator that computes in a dtype.
int operand_in(GroupLowering& group, const Term& term, ElementType type) {
  // LibTorch's operators differ in where they round a wider tensor without dims.
  if (group.exact() && is_narrow_float(type) && term.type != type) throw NotLoops();
  return group.cast(term, type);
}

// Of one tensor, in the dtype of the result.
template <class Compute>
void unary(GroupLowering& group, const Node& node, const Compute& compute) {
  const ElementType type = result_type(group, node);
  if (type == ElementType::Bool) throw NotLoops();
  const Term& x = group.tensor(node, 0);
  const int value = operand_in(group, x, type);
  group.set(node, 0, compute(value), x.dims);
}
template <LoopOp op>
void unary_op(GroupLowering& group, const Node& node) {
  // MKL's roots are not the nearest numbers.
  if (op == LoopOp::SquareRoot && group.exact() && at::hasMKL()) throw NotLoops();
  unary(group, node, [&](int x) {
    if (op != LoopOp::Negate && op != LoopOp::Absolute && !is_float(group.type_of(x))) throw NotLoops();
    return group.add(op, x);
  });
}
template <LoopOp op>
void single_op(GroupLowering& group, const Node& node) {
  unary(group, node, [&](int x) {
    if (group.type_of(x) != ElementType::Float) throw NotLoops();
    return group.add(op, x);
  });
}

// Of two tensors, in the dtype of the result.
template <class Compute>
void binary(GroupLowering& group, const Node& node, const Compute& compute) {
  const ElementType type = result_type(group, node);
  if (type == ElementType::Bool) throw NotLoops();
  const Term a = group.tensor(node, 0), b = group.tensor(node, 1);
  const int x = operand_in(group, a, type), y = operand_in(group, b, type);
  group.set(node, 0, compute(x, y), group.broadcast({&a, &b}, group.result(node).sizes.size()));
}
// Of a tensor and a number.
template <class Compute>
void with_scalar(GroupLowering& group, const Node& node, const Compute& compute) {
  const ElementType type = result_type(group, node);
  if (type == ElementType::Bool) throw NotLoops();
  const Term& x = group.tensor(node, 0);
  const int value = operand_in(group, x, type), number = group.constant_of(type, group.scalar(node, 1));
  group.set(node, 0, compute(value, number), x.dims);
}

// alpha times an operand.
int scaled(GroupLowering& group, const Node& node, std::size_t argument, int value) {
  const at::Scalar alpha = group.scalar(node, argument);
  if (alpha.toDouble() == 1) return value;
  // LibTorch multiplies and adds at once where the processor can.
  if (group.exact() && is_float(group.type_of(value))) throw NotLoops();
  const ElementType type = group.type_of(value);
  return group.add(
      LoopOp::Multiply, value,
      is_whole_number(type) ? group.constant_of(type, alpha) : group.number_like(value, alpha.toDouble()));
}

void divide_values(GroupLowering& group, const Node& node, bool by_scalar) {
  const auto compute = [&](int x, int y) {
    if (!is_float(group.type_of(x))) throw NotLoops();
    return group.add(LoopOp::Divide, x, y);
  };
  by_scalar ? with_scalar(group, node, compute) : binary(group, node, compute);
}

// The dtype in which two tensors, or a tensor and a number, are compared.
ElementType compared_in(GroupLowering& group, const Node& node, const c10::IValue* number) {
  at::ScalarType with_dims = at::ScalarType::Undefined, without = at::ScalarType::Undefined;
  const auto include = [](at::ScalarType& into, at::ScalarType dtype) {
    into = into == at::ScalarType::Undefined ? dtype : c10::promoteTypes(into, dtype);
  };
  for (std::size_t i = 0; i < (number ? 1u : 2u); ++i) {
    const Geometry& geometry = group.geometry(node.arguments.at(i).value());
    include(geometry.sizes.empty() ? without : with_dims, geometry.dtype);
  }
  const auto combined = [](at::ScalarType higher, at::ScalarType lower) {
    if (higher == at::ScalarType::Undefined) return lower;
    if (lower == at::ScalarType::Undefined || c10::isFloatingType(higher)) return higher;
    return higher == at::kBool || c10::isFloatingType(lower) ? c10::promoteTypes(higher, lower) : higher;
  };
  // A number of the program may be a tensor without dims; then it counts as one of the default dtype.
  if (without == at::kDouble && with_dims != at::ScalarType::Undefined && !c10::isFloatingType(with_dims))
    throw NotLoops();
  at::ScalarType dtype = combined(with_dims, without);
  if (number) {
    const at::Scalar scalar = number->toScalar();
    if (scalar.isBoolean()) throw NotLoops();
    // A number counts as one of the default dtype; captures are guarded against another one.
    if (scalar.isFloatingPoint() && !c10::isFloatingType(dtype))
      dtype = c10::get_default_dtype_as_scalartype();
    if (!scalar.isFloatingPoint() && dtype == at::kBool) dtype = at::kLong;
  }
  const auto type = element_type(dtype);
  if (!type) throw NotLoops();
  return *type;
}

// A number that decides something: in a half type as it is in memory, where it may be infinite.
int decisive(GroupLowering& group, const Term& term) {
  return is_narrow_float(term.type) && !group.is_loaded(term.value) ? group.round(term.value, term.type)
                                                                    : term.value;
}
Term decisive_term(GroupLowering& group, const Term& term) {
  return {decisive(group, term), term.type, term.dims};
}

template <class Compute>
void compare(GroupLowering& group, const Node& node, bool by_scalar, const Compute& compute) {
  const c10::IValue* number = by_scalar ? &group.constant(node, 1) : nullptr;
  if (number && (!number->isScalar() || number->toScalar().isComplex())) throw NotLoops();
  if (!number && node.arguments.at(1).value() == kNoValue) throw NotLoops();
  const Term a = group.tensor(node, 0);
  const ElementType type = compared_in(group, node, number);
  const int x = operand_in(group, decisive_term(group, a), type);
  if (number) {
    const int constant = group.constant_of(type, number->toScalar());
    group.set(node, 0, compute(x, is_narrow_float(type) ? group.round(constant, type) : constant), a.dims);
    return;
  }
  const Term b = group.tensor(node, 1);
  const int y = operand_in(group, decisive_term(group, b), type);
  group.set(node, 0, compute(x, y), group.broadcast({&a, &b}, group.result(node).sizes.size()));
}

template <LoopOp op, bool exchanged, bool by_scalar>
void compare_op(GroupLowering& group, const Node& node) {
  compare(group, node, by_scalar, [&](int x, int y) {
    if (op >= LoopOp::Less && group.type_of(x) == ElementType::Bool) throw NotLoops();
    return exchanged ? group.add(op, y, x) : group.add(op, x, y);
  });
}

template <LoopOp op>
void logical_op(GroupLowering& group, const Node& node) {
  const Term a = group.tensor(node, 0);
  const int x = group.convert(decisive(group, a), ElementType::Bool);
  if (op == LoopOp::Not) {
    group.set(node, 0, group.add(op, x), a.dims);
    return;
  }
  const Term b = group.tensor(node, 1);
  const int y = group.convert(decisive(group, b), ElementType::Bool);
  group.set(node, 0, group.add(op, x, y), group.broadcast({&a, &b}, group.result(node).sizes.size()));
}
// Of bools alone: the same as the logical one.
template <LoopOp op>
void bitwise_op(GroupLowering& group, const Node& node) {
  if (result_type(group, node) != ElementType::Bool) throw NotLoops();
  logical_op<op>(group, node);
}

// `where` with tensors or numbers.
void select_values(GroupLowering& group, const Node& node) {
  const ElementType type = result_type(group, node);
  const Term condition = group.tensor(node, 0);
  if (condition.type != ElementType::Bool) throw NotLoops();
  std::vector<Term> tensors{condition};
  int chosen[2];
  for (std::size_t i = 0; i < 2; ++i) {
    if (node.arguments.at(1 + i).kind == Operand::Kind::Tensor) {
      tensors.push_back(group.tensor(node, 1 + i));
      // Rounded where it is cast, in every mode.
      chosen[i] = group.cast(tensors.back(), type);
    } else {
      chosen[i] = group.constant_of(type, group.scalar(node, 1 + i));
    }
  }
  std::vector<const Term*> terms;
  for (const Term& term : tensors) terms.push_back(&term);
  const int value = group.add(LoopOp::Select, condition.value, chosen[0], chosen[1]);
  group.set(node, 0, value, group.broadcast(terms, group.result(node).sizes.size()));
}

void masked_fill(GroupLowering& group, const Node& node) {
  const ElementType type = result_type(group, node);
  const Term x = group.tensor(node, 0), mask = group.tensor(node, 1);
  if (mask.type != ElementType::Bool || x.type != type) throw NotLoops();
  int filled;
  if (node.arguments.at(2).kind == Operand::Kind::Tensor) {
    const Term with = group.tensor(node, 2);
    if (!with.dims.empty()) throw NotLoops();
    filled = operand_in(group, with, type);
  } else {
    filled = group.constant_of(type, group.scalar(node, 2));
    if (is_narrow_float(type)) filled = group.round(filled, type);
  }
  group.set(node, 0, group.add(LoopOp::Select, mask.value, filled, x.value),
            group.broadcast({&x, &mask}, group.result(node).sizes.size()));
}

int clamped(GroupLowering& group, int x, int low, int high) {
#if defined(__aarch64__)
  // LibTorch's vectors make 0 of -0 there, and its scalars do not.
  if (group.exact()) throw NotLoops();
#endif
  if (low != kNoOperand) x = group.add(LoopOp::Select, group.add(LoopOp::Less, x, low), low, x);
  if (high != kNoOperand) x = group.add(LoopOp::Select, group.add(LoopOp::Less, high, x), high, x);
  return x;
}
// The bounds are arguments `low` and `high`, 0 for none.
template <std::size_t low, std::size_t high>
void clamp_op(GroupLowering& group, const Node& node) {
  const ElementType type = result_type(group, node);
  const Term& x = group.tensor(node, 0);
  if (x.type != type) throw NotLoops();
  const auto bound = [&](std::size_t argument) {
    if (argument == 0 || group.is_none(node, argument)) return kNoOperand;
    if (std::isnan(group.number(node, argument))) throw NotLoops();
    return group.constant_of(type, group.scalar(node, argument));
  };
  const int from = bound(low), to = bound(high);
  if (from == kNoOperand && to == kNoOperand) throw NotLoops();
  group.set(node, 0, clamped(group, x.value, from, to), x.dims);
}

void relu(GroupLowering& group, const Node& node) {
  unary(group, node, [&](int x) { return clamped(group, x, group.number_like(x, 0), kNoOperand); });
}

int one_minus(GroupLowering& group, int x) { return group.add(LoopOp::Subtract, group.number_like(x, 1), x); }
int times(GroupLowering& group, int x, double number) {
  return group.add(LoopOp::Multiply, x, group.number_like(x, number));
}
int product(GroupLowering& group, int x, int y) { return group.add(LoopOp::Multiply, x, y); }
int sum(GroupLowering& group, int x, int y) { return group.add(LoopOp::Add, x, y); }

void require_single(const GroupLowering& group, int x) {
  if (group.type_of(x) != ElementType::Float) throw NotLoops();
}

void silu(GroupLowering& group, const Node& node) {
  unary(group, node, [&](int x) {
    require_single(group, x);
    return product(group, x, group.add(LoopOp::Sigmoid, x));
  });
}
void silu_backward(GroupLowering& group, const Node& node) {
  binary(group, node, [&](int g, int x) {
    require_single(group, x);
    const int s = group.add(LoopOp::Sigmoid, x);
    const int rest = sum(group, group.number_like(x, 1), product(group, x, one_minus(group, s)));
    return product(group, product(group, g, s), rest);
  });
}

constexpr double kRootOfHalf = 0.70710678118654752440, kTwoOverRootOfPi = 1.12837916709551257390,
                 kRootOfTwoOverPi = 0.79788456080286535588, kGeluCubic = 0.044715;

bool is_tanh_form(const GroupLowering& group, const Node& node, std::size_t argument) {
  const c10::IValue& form = group.constant(node, argument);
  if (!form.isString()) throw NotLoops();
  if (form.toStringRef() != "tanh" && form.toStringRef() != "none") throw NotLoops();
  return form.toStringRef() == "tanh";
}
// tanh(...) of the approximated form.
int gelu_tanh(GroupLowering& group, int x) {
  const int cube = product(group, product(group, x, x), x);
  return group.add(LoopOp::Tanh,
                   times(group, sum(group, x, times(group, cube, kGeluCubic)), kRootOfTwoOverPi));
}
void gelu(GroupLowering& group, const Node& node) {
  const bool tanh_form = is_tanh_form(group, node, 1);
  unary(group, node, [&](int x) {
    require_single(group, x);
    const int inner = tanh_form ? gelu_tanh(group, x) : group.add(LoopOp::Erf, times(group, x, kRootOfHalf));
    return product(group, times(group, x, 0.5), sum(group, group.number_like(x, 1), inner));
  });
}
void gelu_backward(GroupLowering& group, const Node& node) {
  const bool tanh_form = is_tanh_form(group, node, 2);
  binary(group, node, [&](int g, int x) {
    require_single(group, x);
    const int one = group.number_like(x, 1), square = product(group, x, x);
    if (!tanh_form) {
      const int share =
          times(group, sum(group, one, group.add(LoopOp::Erf, times(group, x, kRootOfHalf))), 0.5);
      const int density = times(group, group.add(LoopOp::Exp, times(group, square, -0.5)),
                                kTwoOverRootOfPi * kRootOfHalf * 0.5);
      return product(group, g, sum(group, share, product(group, x, density)));
    }
    const int t = gelu_tanh(group, x);
    const int slope = times(group, sum(group, one, times(group, square, 3 * kGeluCubic)), kRootOfTwoOverPi);
    const int left = times(group, sum(group, one, t), 0.5);
    const int right =
        product(group, times(group, x, 0.5), product(group, one_minus(group, product(group, t, t)), slope));
    return product(group, g, sum(group, left, right));
  });
}

void threshold_backward(GroupLowering& group, const Node& node) {
  const ElementType type = result_type(group, node);
  const Term g = group.tensor(node, 0), x = group.tensor(node, 1);
  if (g.type != type || x.type != type) throw NotLoops();
  const int bound = group.constant_of(type, group.scalar(node, 2));
  const int value = group.add(LoopOp::Select, group.add(LoopOp::LessEqual, x.value, bound),
                              group.number_like(x.value, 0), g.value);
  group.set(node, 0, value, group.broadcast({&g, &x}, group.result(node).sizes.size()));
}

// a + value * (b op c)
template <LoopOp op>
void add_combined(GroupLowering& group, const Node& node) {
  const ElementType type = result_type(group, node);
  if (!is_float(type)) throw NotLoops();
  const Term a = group.tensor(node, 0), b = group.tensor(node, 1), c = group.tensor(node, 2);
  const int x = operand_in(group, a, type), y = operand_in(group, b, type), z = operand_in(group, c, type);
  const int right = times(group, group.add(op, y, z), group.number(node, 3));
  group.set(node, 0, sum(group, x, right), group.broadcast({&a, &b, &c}, group.result(node).sizes.size()));
}

void power(GroupLowering& group, const Node& node) {
  const double exponent = group.number(node, 1);
  const ElementType type = result_type(group, node);
  // Of half LibTorch computes powers, not products.
  if (group.exact() && type == ElementType::Half) throw NotLoops();
  unary(group, node, [&](int x) {
    if (exponent == 2) return product(group, x, x);
    if (exponent == 3) {
      const int square = product(group, x, x);
      return product(group, group.exact() && is_narrow_float(type) ? group.round(square, type) : square, x);
    }
    if (group.exact() || !is_float(group.type_of(x))) throw NotLoops();
    const int one = group.number_like(x, 1);
    if (exponent == 0.5) return group.add(LoopOp::SquareRoot, x);
    if (exponent == -0.5) return group.add(LoopOp::Divide, one, group.add(LoopOp::SquareRoot, x));
    if (exponent == -1) return group.add(LoopOp::Divide, one, x);
    if (exponent == -2) return group.add(LoopOp::Divide, one, product(group, x, x));
    throw NotLoops();
  });
}

// Copies and casts.
void copied(GroupLowering& group, const Node& node) {
  const Term& x = group.tensor(node, 0);
  const ElementType type = result_type(group, node);
  group.set(node, 0, group.cast(x, type), x.dims);
}

// Factories of one number.
void filled(GroupLowering& group, const Node& node, const at::Scalar& number) {
  const ElementType type = result_type(group, node);
  LoopInstruction constant = LoopInstruction::of(computed_in(type), number.toDouble());
  if (type == ElementType::Bool)
    constant.whole = number.toDouble() != 0;
  else if (is_whole_number(type))
    constant.whole = number.toLong();
  int value = group.add(constant);
  // Of a narrow dtype the tensor holds the rounded number.
  if (is_narrow_float(type)) value = group.round(value, type);
  // The tensor that `zeros_like` and the others take is an argument, although its elements do not matter.
  const bool is_like = node.op.operator_name().name.ends_with("_like");
  group.set(node, 0, value, is_like ? group.tensor(node, 0).dims : group.fresh_dims(group.result(node)));
}
template <int number>
void filled_with(GroupLowering& group, const Node& node) {
  filled(group, node, at::Scalar(number));
}
void filled_with_argument(GroupLowering& group, const Node& node) {
  filled(group, node, group.scalar(node, 1));
}

// ---- reductions ----

// Which dims an operator reduces: a list of numbers, none or an empty list for all.
std::vector<char> reduced_dims(const GroupLowering& group, const Node& node, std::size_t argument,
                               std::size_t dims) {
  std::vector<char> reduced(dims, 0);
  const c10::IValue& given = group.constant(node, argument);
  std::vector<std::int64_t> listed;
  if (given.isInt())
    listed.push_back(given.toInt());
  else if (given.isIntList())
    listed = given.toIntVector();
  else if (given.isList())
    for (const c10::IValue& element : given.toListRef()) {
      if (!element.isInt()) throw NotLoops();
      listed.push_back(element.toInt());
    }
  else if (!given.isNone())
    throw NotLoops();
  if (listed.empty()) std::fill(reduced.begin(), reduced.end(), 1);
  for (std::int64_t dim : listed) {
    if (dim < 0) dim += static_cast<std::int64_t>(dims);
    if (dim < 0 || dim >= static_cast<std::int64_t>(dims)) throw NotLoops();
    reduced[static_cast<std::size_t>(dim)] = 1;
  }
  return reduced;
}

struct Reduction {
  Axes over;
  std::vector<Axes> dims;  // of the result
  bool rows = true;
};
Reduction reduction_of(const GroupLowering& group, const Node& node, const Term& x,
                       const std::vector<char>& reduced, bool keeps_dims) {
  Reduction made;
  for (std::size_t d = 0; d < x.dims.size(); ++d) {
    if (reduced[d]) made.over.insert(made.over.end(), x.dims[d].begin(), x.dims[d].end());
    if (!reduced[d]) made.dims.push_back(x.dims[d]);
    if (reduced[d] && keeps_dims) made.dims.emplace_back();
  }
  made.rows = GroupLowering::are_inner(group.geometry(node.arguments.at(0).value()), reduced);
  return made;
}

void sum_or_mean(GroupLowering& group, const Node& node, const std::vector<char>& reduced, bool keeps_dims,
                 bool is_mean) {
  const Term x = group.tensor(node, 0);
  const ElementType type = result_type(group, node);
  if (type == ElementType::Bool || (is_mean && !is_float(type))) throw NotLoops();
  const Reduction reduction = reduction_of(group, node, x, reduced, keeps_dims);
  int value = group.reduce(LoopOp::RowSum, group.cast(x, type), reduction.over, reduction.rows);
  if (is_mean) {
    if (!reduction.rows) throw NotLoops();
    value = group.add(LoopOp::Divide, value,
                      group.number_like(value, static_cast<double>(group.space().size_of(reduction.over))));
  }
  group.set(node, 0, value, reduction.dims);
}
template <bool is_mean>
void sum_dims(GroupLowering& group, const Node& node) {
  const std::size_t dims = group.tensor(node, 0).dims.size();
  sum_or_mean(group, node, reduced_dims(group, node, 1, dims), group.constant(node, 2).toBool(), is_mean);
}
template <bool is_mean>
void sum_all(GroupLowering& group, const Node& node) {
  sum_or_mean(group, node, std::vector<char>(group.tensor(node, 0).dims.size(), 1), false, is_mean);
}
template <LoopOp op>
void extreme_dims(GroupLowering& group, const Node& node) {
  const Term x = group.tensor(node, 0);
  if (x.type == ElementType::Bool) throw NotLoops();
  const Reduction reduction = reduction_of(group, node, x, reduced_dims(group, node, 1, x.dims.size()),
                                           group.constant(node, 2).toBool());
  group.set(node, 0, group.reduce(op, x.value, reduction.over, reduction.rows), reduction.dims);
}

// Of softmax and its like: one dim, and what is computed in float.
Axes softmax_axes(const GroupLowering& group, const Node& node, const Term& x, std::size_t argument) {
  const std::vector<char> reduced = reduced_dims(group, node, argument, x.dims.size());
  if (!GroupLowering::are_inner(group.geometry(node.arguments.at(0).value()), reduced)) throw NotLoops();
  for (std::size_t d = 0; d < reduced.size(); ++d)
    if (reduced[d]) return x.dims[d];
  throw NotLoops();
}
void require_rows_of_floats(const GroupLowering& group, const Term& x, const Node& node) {
  if (computed_in(x.type) != ElementType::Float ||
      computed_in(result_type(group, node)) != ElementType::Float)
    throw NotLoops();
}

template <bool is_log>
void softmax(GroupLowering& group, const Node& node) {
  const Term x = group.tensor(node, 0);
  require_rows_of_floats(group, x, node);
  const Axes row = softmax_axes(group, node, x, 1);
  const int shifted =
      group.add(LoopOp::Subtract, x.value, group.reduce(LoopOp::RowMaximum, x.value, row, true));
  const int power = group.add(LoopOp::Exp, shifted);
  const int total = group.reduce(LoopOp::RowSum, power, row, true);
  const int value = is_log ? group.add(LoopOp::Subtract, shifted, group.add(LoopOp::Log, total))
                           : group.add(LoopOp::Multiply, power,
                                       group.add(LoopOp::Divide, group.number_like(total, 1), total));
  group.set(node, 0, value, x.dims);
}
template <bool is_log>
void softmax_backward(GroupLowering& group, const Node& node) {
  const Term g = group.tensor(node, 0), y = group.tensor(node, 1);
  require_rows_of_floats(group, g, node);
  require_rows_of_floats(group, y, node);
  const std::vector<Axes> dims = group.broadcast({&g, &y}, g.dims.size());
  const Axes row = softmax_axes(group, node, y, 2);
  int value;
  if (is_log) {
    const int total = group.reduce(LoopOp::RowSum, g.value, row, true);
    value = group.add(LoopOp::Subtract, g.value, product(group, group.add(LoopOp::Exp, y.value), total));
  } else {
    const int total = group.reduce(LoopOp::RowSum, product(group, g.value, y.value), row, true);
    value = product(group, group.add(LoopOp::Subtract, g.value, total), y.value);
  }
  group.set(node, 0, value, dims);
}

// The gradient of each row is -1 / count at its class, where it has one.
void class_loss_backward(GroupLowering& group, const Node& node) {
  constexpr std::int64_t kNone = 0, kMean = 1;
  const Geometry& geometry = group.result(node);
  const ElementType type = result_type(group, node);
  const std::int64_t reduction = group.constant(node, 4).toInt(), ignored = group.constant(node, 5).toInt();
  if (node.arguments.at(3).value() != kNoValue || computed_in(type) != ElementType::Float ||
      geometry.sizes.size() != 2)
    throw NotLoops();
  if (node.arguments.at(3).kind == Operand::Kind::Constant && !group.is_none(node, 3)) throw NotLoops();
  // The operator takes the scores and the total weight too, though it does not read them in each case.
  const Term gradient = group.tensor(node, 0), scores = group.tensor(node, 1), target = group.tensor(node, 2),
             weight = group.tensor(node, 6);
  if (target.type != ElementType::Int64 || target.dims.size() != 1 ||
      gradient.dims.size() != (reduction == kNone ? 1u : 0u))
    throw NotLoops();
  std::vector<Axes> dims = group.fresh_dims(geometry);
  if (scores.dims.size() != 2 || !weight.dims.empty()) throw NotLoops();
  if (!group.space().unify(dims[0], scores.dims[0]) || !group.space().unify(dims[1], scores.dims[1]))
    throw NotLoops();
  if (!group.space().unify(dims[0], target.dims[0])) throw NotLoops();
  if (reduction == kNone && !group.space().unify(dims[0], gradient.dims[0])) throw NotLoops();
  int scale = group.cast(gradient, ElementType::Float);
  if (reduction == kMean) scale = group.add(LoopOp::Divide, scale, group.cast(weight, ElementType::Float));
  LoopInstruction number{.op = LoopOp::Number, .type = ElementType::Int64};
  number.whole = ignored;
  const int is_class = group.add(LoopOp::Equal, group.position_in(dims[1]), target.value);
  const int counts = group.add(LoopOp::NotEqual, target.value, group.add(number));
  group.set(node, 0,
            group.add(LoopOp::Select, group.add(LoopOp::And, counts, is_class),
                      group.add(LoopOp::Negate, scale), group.number_like(scale, 0)),
            std::move(dims));
}

// ---- views ----

void view_sizes(GroupLowering& group, const Node& node) {
  const Term base = group.tensor(node, 0);
  const Geometry& geometry = group.result(node);
  auto dims = group.space().viewed(base.dims, {geometry.sizes.begin(), geometry.sizes.end()});
  if (!dims) throw NotLoops();
  group.set_view(node, base, std::move(*dims));
}
void view_expanded(GroupLowering& group, const Node& node) {
  const Term base = group.tensor(node, 0);
  const Geometry& geometry = group.result(node);
  std::vector<Axes> dims(geometry.sizes.size());
  const std::size_t more = dims.size() - base.dims.size();
  for (std::size_t d = 0; d < dims.size(); ++d)
    dims[d] = d >= more && !base.dims[d - more].empty() ? base.dims[d - more]
                                                        : group.space().dim(geometry.sizes[d]);
  group.set_view(node, base, std::move(dims));
}
void view_same(GroupLowering& group, const Node& node) {
  const Term base = group.tensor(node, 0);
  group.set_view(node, base, base.dims);
}
void view_transposed(GroupLowering& group, const Node& node) {
  const Term base = group.tensor(node, 0);
  std::vector<Axes> dims = base.dims;
  const auto at = [&](std::int64_t dim) {
    return static_cast<std::size_t>(dim < 0 ? dim + static_cast<std::int64_t>(dims.size()) : dim);
  };
  if (node.op.operator_name().name == "aten::t") {
    if (dims.size() == 2) std::swap(dims[0], dims[1]);
  } else if (node.op.operator_name().name == "aten::transpose") {
    if (!dims.empty())
      std::swap(dims.at(at(group.constant(node, 1).toInt())), dims.at(at(group.constant(node, 2).toInt())));
  } else {
    std::vector<Axes> permuted;
    const c10::IValue& order = group.constant(node, 1);
    if (order.isIntList())
      for (const std::int64_t dim : order.toIntVector()) permuted.push_back(dims.at(at(dim)));
    else if (order.isList())
      for (const c10::IValue& dim : order.toListRef()) permuted.push_back(dims.at(at(dim.toInt())));
    else
      throw NotLoops();
    dims = std::move(permuted);
  }
  group.set_view(node, base, std::move(dims));
}

// ---- the table ----

template <LoopOp op>
void binary_op(GroupLowering& group, const Node& node) {
  binary(group, node, [&](int x, int y) { return group.add(op, x, y); });
}
template <LoopOp op>
void scalar_op(GroupLowering& group, const Node& node) {
  with_scalar(group, node, [&](int x, int y) { return group.add(op, x, y); });
}
// With a factor of the second operand.
template <LoopOp op, bool exchanged>
void sum_op(GroupLowering& group, const Node& node) {
  binary(group, node, [&](int x, int y) {
    if (exchanged) std::swap(x, y);
    const int right = scaled(group, node, 2, y);
    return group.add(op, x, right);
  });
}
template <LoopOp op, bool exchanged>
void sum_scalar(GroupLowering& group, const Node& node) {
  with_scalar(group, node, [&](int x, int y) {
    if (group.number(node, 2) != 1) throw NotLoops();
    return exchanged ? group.add(op, y, x) : group.add(op, x, y);
  });
}
template <bool by_scalar>
void divide(GroupLowering& group, const Node& node) {
  divide_values(group, node, by_scalar);
}
void reciprocal(GroupLowering& group, const Node& node) {
  unary(group, node, [&](int x) {
    if (!is_float(group.type_of(x))) throw NotLoops();
    return group.add(LoopOp::Divide, group.number_like(x, 1), x);
  });
}
void inverse_root(GroupLowering& group, const Node& node) {
  unary(group, node, [&](int x) {
    if (!is_float(group.type_of(x))) throw NotLoops();
    return group.add(LoopOp::Divide, group.number_like(x, 1), group.add(LoopOp::SquareRoot, x));
  });
}
// g * (1 - y * y), g * (1 - y) * y
template <bool is_tanh>
void activation_backward(GroupLowering& group, const Node& node) {
  binary(group, node, [&](int g, int y) {
    if (!is_float(group.type_of(y))) throw NotLoops();
    return is_tanh ? product(group, g, one_minus(group, product(group, y, y)))
                   : product(group, product(group, g, one_minus(group, y)), y);
  });
}

constexpr OperatorRow kOperators[] = {
    {"aten::add.Tensor", &sum_op<LoopOp::Add, false>, true},
    {"aten::add.Scalar", &sum_scalar<LoopOp::Add, false>, true},
    {"aten::sub.Tensor", &sum_op<LoopOp::Subtract, false>, true},
    {"aten::sub.Scalar", &sum_scalar<LoopOp::Subtract, false>, true},
    {"aten::rsub.Tensor", &sum_op<LoopOp::Subtract, true>, true},
    {"aten::rsub.Scalar", &sum_scalar<LoopOp::Subtract, true>, true},
    {"aten::mul.Tensor", &binary_op<LoopOp::Multiply>, true},
    {"aten::mul.Scalar", &scalar_op<LoopOp::Multiply>, true},
    {"aten::div.Tensor", &divide<false>, true},
    {"aten::div.Scalar", &divide<true>, true},
    {"aten::neg", &unary_op<LoopOp::Negate>, true},
    {"aten::abs", &unary_op<LoopOp::Absolute>, true},
    {"aten::sqrt", &unary_op<LoopOp::SquareRoot>, true},
    {"aten::rsqrt", &inverse_root},
    {"aten::reciprocal", &reciprocal},
    {"aten::exp", &single_op<LoopOp::Exp>},
    {"aten::log", &single_op<LoopOp::Log>},
    {"aten::tanh", &single_op<LoopOp::Tanh>},
    {"aten::sigmoid", &single_op<LoopOp::Sigmoid>},
    {"aten::erf", &single_op<LoopOp::Erf>},
    {"aten::pow.Tensor_Scalar", &power, true},
    {"aten::maximum", &binary_op<LoopOp::Maximum>},
    {"aten::minimum", &binary_op<LoopOp::Minimum>},
    {"aten::relu", &relu, true},
    {"aten::clamp", &clamp_op<1, 2>, true},
    {"aten::clamp_min", &clamp_op<1, 0>, true},
    {"aten::clamp_max", &clamp_op<0, 1>, true},
    {"aten::silu", &silu},
    {"aten::silu_backward", &silu_backward},
    {"aten::gelu", &gelu},
    {"aten::gelu_backward", &gelu_backward},
    {"aten::tanh_backward", &activation_backward<true>},
    {"aten::sigmoid_backward", &activation_backward<false>},
    {"aten::threshold_backward", &threshold_backward, true},
    {"aten::addcmul", &add_combined<LoopOp::Multiply>},
    {"aten::addcdiv", &add_combined<LoopOp::Divide>},
    {"aten::eq.Tensor", &compare_op<LoopOp::Equal, false, false>, true},
    {"aten::eq.Scalar", &compare_op<LoopOp::Equal, false, true>, true},
    {"aten::ne.Tensor", &compare_op<LoopOp::NotEqual, false, false>, true},
    {"aten::ne.Scalar", &compare_op<LoopOp::NotEqual, false, true>, true},
    {"aten::lt.Tensor", &compare_op<LoopOp::Less, false, false>, true},
    {"aten::lt.Scalar", &compare_op<LoopOp::Less, false, true>, true},
    {"aten::le.Tensor", &compare_op<LoopOp::LessEqual, false, false>, true},
    {"aten::le.Scalar", &compare_op<LoopOp::LessEqual, false, true>, true},
    {"aten::gt.Tensor", &compare_op<LoopOp::Less, true, false>, true},
    {"aten::gt.Scalar", &compare_op<LoopOp::Less, true, true>, true},
    {"aten::ge.Tensor", &compare_op<LoopOp::LessEqual, true, false>, true},
    {"aten::ge.Scalar", &compare_op<LoopOp::LessEqual, true, true>, true},
    {"aten::logical_not", &logical_op<LoopOp::Not>, true},
    {"aten::logical_and", &logical_op<LoopOp::And>, true},
    {"aten::logical_or", &logical_op<LoopOp::Or>, true},
    {"aten::bitwise_not", &bitwise_op<LoopOp::Not>, true},
    {"aten::bitwise_and.Tensor", &bitwise_op<LoopOp::And>, true},
    {"aten::bitwise_or.Tensor", &bitwise_op<LoopOp::Or>, true},
    {"aten::where.self", &select_values, true},
    {"aten::where.ScalarSelf", &select_values, true},
    {"aten::where.ScalarOther", &select_values, true},
    {"aten::where.Scalar", &select_values, true},
    {"aten::masked_fill.Scalar", &masked_fill, true},
    {"aten::masked_fill.Tensor", &masked_fill, true},
    {"aten::_to_copy", &copied, true},
    {"aten::clone", &copied, true},
    {"aten::full", &filled_with_argument, true},
    {"aten::full_like", &filled_with_argument, true},
    {"aten::zeros", &filled_with<0>, true},
    {"aten::zeros_like", &filled_with<0>, true},
    {"aten::ones", &filled_with<1>, true},
    {"aten::ones_like", &filled_with<1>, true},
    {"aten::sum.dim_IntList", &sum_dims<false>},
    {"aten::sum", &sum_all<false>},
    {"aten::mean.dim", &sum_dims<true>},
    {"aten::mean", &sum_all<true>},
    {"aten::amax", &extreme_dims<LoopOp::RowMaximum>},
    {"aten::amin", &extreme_dims<LoopOp::RowMinimum>},
    {"aten::_softmax", &softmax<false>},
    {"aten::_log_softmax", &softmax<true>},
    {"aten::_softmax_backward_data", &softmax_backward<false>},
    {"aten::_log_softmax_backward_data", &softmax_backward<true>},
    {"aten::nll_loss_backward", &class_loss_backward},
    {"aten::view", &view_sizes, true, true},
    {"aten::_unsafe_view", &view_sizes, true, true},
    {"aten::_reshape_alias", &view_sizes, true, true},
    {"aten::unsqueeze", &view_sizes, true, true},
    {"aten::squeeze", &view_sizes, true, true},
    {"aten::squeeze.dim", &view_sizes, true, true},
    {"aten::squeeze.dims", &view_sizes, true, true},
    {"aten::expand", &view_expanded, true, true},
    {"aten::alias", &view_same, true, true},
    {"aten::detach", &view_same, true, true},
    {"aten::t", &view_transposed, true, true},
    {"aten::transpose.int", &view_transposed, true, true},
    {"aten::permute", &view_transposed, true, true},
};

}  // namespace

const OperatorRow* row_of(const c10::OperatorHandle& op) {
  static const auto* rows = [] {
    auto* by_name = new std::map<std::string, const OperatorRow*, std::less<>>();
    for (const OperatorRow& row : kOperators) by_name->emplace(row.name, &row);
    return by_name;
  }();
  const c10::OperatorName& name = op.operator_name();
  const auto found =
      rows->find(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  return found == rows->end() ? nullptr : found->second;
}

}  // namespace penstock::graph
