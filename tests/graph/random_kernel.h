// Random loop kernels, memory for them, and an interpreter that works element by element, by the definition
// of each instruction.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "penstock/graph/codegen/loop_kernel.h"

namespace penstock::graph::random_kernels {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- memory of any element type ----

inline float from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}
inline std::uint16_t to_bfloat16(float x) {
  if (std::isnan(x)) return 0x7fc0;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
// By the definition of the format, not by bits.
inline float from_half(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const float sign = (bits & 0x8000) ? -1.f : 1.f;
  if (exponent == 31) return mantissa ? kNan : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}
inline std::uint16_t to_half(float x) {
  if (std::isnan(x)) return 0x7e00;
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (size >= 65520.f) return sign | 0x7c00;
  int exponent = size > 0 ? std::max(-14, std::ilogb(size)) : -14;
  const float scaled = std::nearbyint(std::ldexp(size, 10 - exponent));  // ties to even
  auto whole = static_cast<int>(scaled);
  if (whole >= 2048) whole /= 2, ++exponent;
  return static_cast<std::uint16_t>(sign | (whole < 1024 ? whole : ((exponent + 15) << 10) | (whole - 1024)));
}

inline double element(ElementType type, const void* memory, std::int64_t i) {
  switch (type) {
    case ElementType::Bool:
    case ElementType::UInt8:
      return static_cast<const std::uint8_t*>(memory)[i];
    case ElementType::Int8:
      return static_cast<const std::int8_t*>(memory)[i];
    case ElementType::Int16:
      return static_cast<const std::int16_t*>(memory)[i];
    case ElementType::Int32:
      return static_cast<const std::int32_t*>(memory)[i];
    case ElementType::Int64:
      return static_cast<double>(static_cast<const std::int64_t*>(memory)[i]);
    case ElementType::Half:
      return from_half(static_cast<const std::uint16_t*>(memory)[i]);
    case ElementType::BFloat16:
      return from_bfloat16(static_cast<const std::uint16_t*>(memory)[i]);
    case ElementType::Float:
      return static_cast<const float*>(memory)[i];
    case ElementType::Double:
      return static_cast<const double*>(memory)[i];
  }
  return 0;
}
inline void set_element(ElementType type, void* memory, std::int64_t i, double value) {
  switch (type) {
    case ElementType::Bool:
    case ElementType::UInt8:
      static_cast<std::uint8_t*>(memory)[i] = static_cast<std::uint8_t>(value);
      return;
    case ElementType::Int8:
      static_cast<std::int8_t*>(memory)[i] = static_cast<std::int8_t>(value);
      return;
    case ElementType::Int16:
      static_cast<std::int16_t*>(memory)[i] = static_cast<std::int16_t>(value);
      return;
    case ElementType::Int32:
      static_cast<std::int32_t*>(memory)[i] = static_cast<std::int32_t>(value);
      return;
    case ElementType::Int64:
      static_cast<std::int64_t*>(memory)[i] = static_cast<std::int64_t>(value);
      return;
    case ElementType::Half:
      static_cast<std::uint16_t*>(memory)[i] = to_half(static_cast<float>(value));
      return;
    case ElementType::BFloat16:
      static_cast<std::uint16_t*>(memory)[i] = to_bfloat16(static_cast<float>(value));
      return;
    case ElementType::Float:
      static_cast<float*>(memory)[i] = static_cast<float>(value);
      return;
    case ElementType::Double:
      static_cast<double*>(memory)[i] = value;
      return;
  }
}

struct Memory {
  ElementType type = ElementType::Float;
  std::vector<std::uint64_t> words;  // aligned
  Memory() = default;
  Memory(ElementType of, std::int64_t items)
      : type(of), words(static_cast<std::size_t>(items) * bytes_of(of) / 8 + 2, 0x5a5a5a5a5a5a5a5aULL) {}
  void* data() { return words.data(); }
  double at(std::int64_t i) const { return element(type, words.data(), i); }
  void set(std::int64_t i, double value) { set_element(type, words.data(), i, value); }
};

// The largest offset of a buffer, plus one.
inline std::int64_t extent(const LoopKernel& kernel, const LoopBuffer& buffer) {
  std::int64_t last = 0;
  for (std::size_t d = 0; d < kernel.sizes.size(); ++d) last += buffer.strides[d] * (kernel.sizes[d] - 1);
  return last + 1;
}

// ---- the interpreter: double where that has the bits of float (one operation, rounded) ----

inline double computed(const LoopKernel& kernel, const LoopInstruction& each,
                       const std::vector<double>& values) {
  const auto a = [&] { return values[static_cast<std::size_t>(each.operands[0])]; };
  const auto b = [&] { return values[static_cast<std::size_t>(each.operands[1])]; };
  const auto narrowed = [&](double value) {
    switch (each.type) {
      case ElementType::Float:
        return static_cast<double>(static_cast<float>(value));
      case ElementType::Int8:
        return static_cast<double>(static_cast<std::int8_t>(static_cast<std::int64_t>(value)));
      case ElementType::UInt8:
        return static_cast<double>(static_cast<std::uint8_t>(static_cast<std::int64_t>(value)));
      case ElementType::Int16:
        return static_cast<double>(static_cast<std::int16_t>(static_cast<std::int64_t>(value)));
      case ElementType::Int32:
        return static_cast<double>(static_cast<std::int32_t>(static_cast<std::int64_t>(value)));
      default:
        return value;
    }
  };
  switch (each.op) {
    case LoopOp::Number:
      return is_float(each.type) ? each.number : static_cast<double>(each.whole);
    case LoopOp::Convert:
      return each.type == ElementType::Bool ? a() != 0 : narrowed(a());
    case LoopOp::Round:
      return each.rounded == ElementType::Half ? from_half(to_half(static_cast<float>(a())))
                                               : from_bfloat16(to_bfloat16(static_cast<float>(a())));
    case LoopOp::Add:
      return narrowed(a() + b());
    case LoopOp::Subtract:
      return narrowed(a() - b());
    case LoopOp::Multiply:
      return narrowed(a() * b());
    case LoopOp::Divide:
      return narrowed(a() / b());
    case LoopOp::Negate:
      return narrowed(-a());
    case LoopOp::Absolute:
      return narrowed(std::fabs(a()));
    case LoopOp::SquareRoot:
      return narrowed(std::sqrt(a()));
    case LoopOp::Maximum:
      return std::isnan(a()) || std::isnan(b()) ? static_cast<double>(kNan) : std::max(a(), b());
    case LoopOp::Minimum:
      return std::isnan(a()) || std::isnan(b()) ? static_cast<double>(kNan) : std::min(a(), b());
    case LoopOp::Exp:
      return narrowed(std::exp(a()));
    case LoopOp::Log:
      return narrowed(std::log(a()));
    case LoopOp::Tanh:
      return narrowed(std::tanh(a()));
    case LoopOp::Sigmoid:
      return narrowed(1 / (1 + std::exp(-a())));
    case LoopOp::Erf:
      return narrowed(std::erf(a()));
    case LoopOp::Equal:
      return a() == b();
    case LoopOp::NotEqual:
      return a() != b();
    case LoopOp::Less:
      return a() < b();
    case LoopOp::LessEqual:
      return a() <= b();
    case LoopOp::And:
      return a() != 0 && b() != 0;
    case LoopOp::Or:
      return a() != 0 || b() != 0;
    case LoopOp::Not:
      return a() == 0;
    case LoopOp::Select:
      return a() != 0 ? b() : values[static_cast<std::size_t>(each.operands[2])];
    default:
      ADD_FAILURE() << to_text(each.op) << " in\n" << to_text(kernel);
      return 0;
  }
}

class Interpreter {
 public:
  Interpreter(const LoopKernel& kernel, std::vector<Memory>& memory) : kernel_(kernel), memory_(memory) {}

  void run() {
    std::vector<std::int64_t> place(kernel_.sizes.size(), 0);
    std::size_t first = 0, end = place.size();
    if (kernel_.form == LoopForm::Rows) end = kernel_.first_inner_dim();
    if (kernel_.form == LoopForm::Columns) first = kernel_.column_dims;
    each_place(place, first, end, [&] {
      known_.clear();
      if (kernel_.form == LoopForm::Rows) {
        each_place(place, kernel_.first_inner_dim(), place.size(), [&] { store(place); });
      } else {
        store(place);
      }
    });
  }

 private:
  void each_place(std::vector<std::int64_t>& place, std::size_t first, std::size_t end,
                  const std::function<void()>& visit) {
    if (first == end) return visit();
    for (place[first] = 0; place[first] < kernel_.sizes[first]; ++place[first])
      each_place(place, first + 1, end, visit);
    place[first] = 0;
  }
  std::int64_t offset(std::size_t buffer, const std::vector<std::int64_t>& place) const {
    std::int64_t at = 0;
    for (std::size_t d = 0; d < place.size(); ++d) at += kernel_.buffers[buffer].strides[d] * place[d];
    return at;
  }
  std::vector<double> values_at(std::vector<std::int64_t> place, std::size_t end) {
    std::vector<double> values(end);
    for (std::size_t i = 0; i < end; ++i) {
      const LoopInstruction& each = kernel_.instructions[i];
      if (each.op == LoopOp::Load)
        values[i] = memory_[each.buffer].at(offset(each.buffer, place));
      else if (each.op == LoopOp::Position)
        values[i] = static_cast<double>(place.back());
      else
        values[i] = is_reduction(each.op) ? reduced(i, place) : computed(kernel_, each, values);
    }
    return values;
  }
  double reduced(std::size_t i, std::vector<std::int64_t> place) {
    if (const auto found = known_.find(i); found != known_.end()) return found->second;
    const LoopInstruction& each = kernel_.instructions[i];
    const bool columns = kernel_.form == LoopForm::Columns;
    double sum = 0, least = kInfinity, most = -kInfinity;
    bool nan = false;
    each_place(place, columns ? 0 : kernel_.first_inner_dim(), columns ? kernel_.column_dims : place.size(),
               [&] {
                 const double value = values_at(place, i)[static_cast<std::size_t>(each.operands[0])];
                 sum += value;
                 nan |= std::isnan(value);
                 least = std::min(least, value);
                 most = std::max(most, value);
               });
    const double value = each.op == LoopOp::RowMaximum     ? (nan ? kNan : most)
                         : each.op == LoopOp::RowMinimum   ? (nan ? kNan : least)
                         : each.type == ElementType::Float ? static_cast<double>(static_cast<float>(sum))
                                                           : sum;
    known_[i] = value;
    return value;
  }
  void store(const std::vector<std::int64_t>& place) {
    const std::vector<double> values = values_at(place, kernel_.instructions.size());
    for (const LoopStore& each : kernel_.stores)
      memory_[each.buffer].set(offset(each.buffer, place), values[static_cast<std::size_t>(each.value)]);
  }

  const LoopKernel& kernel_;
  std::vector<Memory>& memory_;
  std::map<std::size_t, double> known_;  // of this row or column
};

// ---- random kernels ----

class RandomKernel {
 public:
  explicit RandomKernel(unsigned seed) : random_(seed) {}

  LoopKernel make() {
    kernel_.form = static_cast<LoopForm>(pick(3));
    const std::size_t dims = kernel_.form == LoopForm::Elements ? 1 + pick(3) : 2 + pick(2);
    for (std::size_t d = 0; d < dims; ++d)
      kernel_.sizes.push_back(static_cast<std::int64_t>(d + 1 == dims ? 1 + pick(70) : 1 + pick(6)));
    if (kernel_.form != LoopForm::Columns && pick(12) == 0) {
      std::fill(kernel_.sizes.begin(), kernel_.sizes.end(), 2);
      kernel_.sizes.back() = 5000;  // longer than one sum of floats
    }
    if (kernel_.form == LoopForm::Rows) kernel_.row_dims = 1 + pick(dims);
    if (kernel_.form == LoopForm::Columns) kernel_.column_dims = dims - 1;
    if (kernel_.form == LoopForm::Columns && pick(3) == 0) kernel_.sizes[0] = 300;
    const std::size_t loads = 1 + pick(3);
    for (std::size_t i = 0; i < loads; ++i) {
      // The first has all loops.
      kernel_.buffers.push_back(
          {.type = i == 0 ? ElementType::Float : any_type(), .strides = strides(i > 0)});
      kernel_.add({.op = LoopOp::Load, .buffer = i});
    }
    if (kernel_.form == LoopForm::Rows && kernel_.row_dims == 1 && pick(2))
      kernel_.add({.op = LoopOp::Position});
    const std::size_t steps = 2 + pick(10);
    for (std::size_t i = 0; i < steps; ++i) step();
    if (kernel_.form == LoopForm::Columns)
      for (int sums = 0; sums < 2; ++sums) reduce(LoopOp::ColumnSum);
    add_stores();
    verify(kernel_);
    return kernel_;
  }

 private:
  std::size_t pick(std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_); }
  ElementType any_type() { return static_cast<ElementType>(pick(10)); }
  // Dense in a random order of loops, or without some of them.
  std::vector<std::int64_t> strides(bool may_broadcast) {
    std::vector<std::size_t> order(kernel_.sizes.size());
    std::iota(order.begin(), order.end(), 0);
    if (pick(3) == 0) std::shuffle(order.begin(), order.end(), random_);
    std::vector<std::int64_t> made(order.size(), 0);
    std::int64_t stride = may_broadcast && pick(5) == 0 ? 2 : 1;
    for (std::size_t i = order.size(); i-- > 0;) {
      if (may_broadcast && pick(4) == 0) continue;
      made[order[i]] = stride;
      stride *= kernel_.sizes[order[i]];
    }
    return made;
  }
  ElementType type_of(int value) const { return kernel_.instructions[static_cast<std::size_t>(value)].type; }
  int any() { return static_cast<int>(pick(kernel_.instructions.size())); }
  int add(LoopOp op, int a, int b = kNoOperand, int c = kNoOperand) {
    return kernel_.add({.op = op, .operands = {a, b, c}});
  }
  int as(int value, ElementType type) {
    if (type_of(value) == type) return value;
    if (is_float(type_of(value)) && is_whole_number(type)) value = as(value, ElementType::Bool);
    return kernel_.add({.op = LoopOp::Convert, .type = type, .operands = {value, kNoOperand, kNoOperand}});
  }
  void step() {
    const int a = any();
    const ElementType type = type_of(a);
    const int b = as(any(), type);
    if (kernel_.form == LoopForm::Rows && pick(4) == 0)
      return reduce(static_cast<LoopOp>(static_cast<int>(LoopOp::RowSum) + static_cast<int>(pick(3))));
    if (type == ElementType::Bool) {
      const LoopOp ops[] = {LoopOp::And, LoopOp::Or, LoopOp::Equal};
      if (pick(3) == 0)
        add(LoopOp::Select, a, any_of_type(ElementType::Float), any_of_type(ElementType::Float));
      else if (pick(4) == 0)
        add(LoopOp::Not, a);
      else
        add(ops[pick(3)], a, b);
      return;
    }
    const LoopOp both[] = {LoopOp::Add,       LoopOp::Subtract, LoopOp::Multiply,
                           LoopOp::Maximum,   LoopOp::Minimum,  LoopOp::Less,
                           LoopOp::LessEqual, LoopOp::Equal,    LoopOp::NotEqual};
    const LoopOp alone[] = {LoopOp::Exp, LoopOp::Tanh, LoopOp::Sigmoid,
                            LoopOp::Erf, LoopOp::Log,  LoopOp::SquareRoot};
    const std::size_t which = pick(16);
    if (which == 14 && is_float(type))
      add(LoopOp::Divide, a, b);
    else if (which == 15)
      add(pick(2) ? LoopOp::Negate : LoopOp::Absolute, a);
    else if (which >= 12 && type == ElementType::Float)
      add(alone[pick(6)], a);
    else if (which == 11 && type == ElementType::Float)
      kernel_.add({.op = LoopOp::Round,
                   .operands = {a, kNoOperand, kNoOperand},
                   .rounded = pick(2) ? ElementType::Half : ElementType::BFloat16});
    else if (which == 10)
      as(a, any_computed());
    else if (both[which % 9] == LoopOp::Multiply && is_whole_number(type))
      add(LoopOp::Maximum, a, b);  // products of products would leave what double holds
    else
      add(both[which % 9], a, b);
  }
  ElementType any_computed() {
    const ElementType types[] = {ElementType::Bool, ElementType::Int32, ElementType::Int64,
                                 ElementType::Float, ElementType::Double};
    return types[pick(5)];
  }
  int any_of_type(ElementType type) { return as(any(), type); }
  void reduce(LoopOp op) {
    // Of values that stay small: products of products of whole numbers would leave what double holds.
    const auto fits = [&](int value) {
      const LoopInstruction& each = kernel_.instructions[static_cast<std::size_t>(value)];
      return each.type == ElementType::Float && each.op != LoopOp::ColumnSum;
    };
    int value = any();
    for (int tries = 0; tries < 20 && !fits(value); ++tries) value = any();
    if (kernel_.instructions[static_cast<std::size_t>(value)].op == LoopOp::ColumnSum) value = 0;
    add(op, as(value, ElementType::Float));
  }
  void add_stores() {
    const std::vector<char> varies = varies_in_row(kernel_);
    std::vector<int> candidates;
    for (std::size_t i = 0; i < kernel_.instructions.size(); ++i)
      if (kernel_.form != LoopForm::Columns || kernel_.instructions[i].op == LoopOp::ColumnSum)
        candidates.push_back(static_cast<int>(i));
    const std::size_t stores = kernel_.form == LoopForm::Columns ? candidates.size() : 1 + pick(3);
    for (std::size_t i = 0; i < stores; ++i) {
      const int value =
          kernel_.form == LoopForm::Columns
              ? candidates[i]
              : candidates[candidates.size() - 1 - pick(std::min<std::size_t>(4, candidates.size()))];
      LoopBuffer buffer{.type = type_of(value),
                        .strides = std::vector<std::int64_t>(kernel_.sizes.size(), 0),
                        .written = true};
      if (buffer.type == ElementType::Float && pick(3) == 0)
        buffer.type = pick(2) ? ElementType::Half : ElementType::BFloat16;
      const bool once = kernel_.form == LoopForm::Rows && !varies[static_cast<std::size_t>(value)] && pick(2);
      std::int64_t stride = 1;
      const std::size_t first = kernel_.form == LoopForm::Columns ? kernel_.column_dims : 0;
      const std::size_t end = once ? kernel_.first_inner_dim() : kernel_.sizes.size();
      for (std::size_t d = end; d-- > first;) {
        buffer.strides[d] = stride;
        stride *= kernel_.sizes[d];
      }
      kernel_.buffers.push_back(buffer);
      kernel_.stores.push_back({value, kernel_.buffers.size() - 1});
    }
  }

  std::mt19937 random_;
  LoopKernel kernel_;
};

inline std::vector<Memory> memory_for(const LoopKernel& kernel, unsigned seed, bool with_odd_values) {
  std::mt19937 random(seed);
  std::vector<Memory> all;
  for (const LoopBuffer& buffer : kernel.buffers) {
    Memory memory(buffer.type, extent(kernel, buffer));
    for (std::int64_t i = 0; i < extent(kernel, buffer); ++i) {
      const int any = static_cast<int>(random() % 1000);
      double value = static_cast<double>(any - 500) / 64;
      if (buffer.type == ElementType::Bool)
        value = any % 2;
      else if (is_whole_number(buffer.type))
        value = any % 9 - (buffer.type == ElementType::UInt8 ? 0 : 4);
      else if (with_odd_values && any < 30)
        value = any < 8 ? kNan : any < 16 ? kInfinity : any < 24 ? -kInfinity : -0.0;
      memory.set(i, value);
    }
    all.push_back(std::move(memory));
  }
  return all;
}

inline bool is_near(double a, double b, ElementType type, double scale) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (a == b) return true;
  // Powers of powers: a rounding decides what overflows.
  if (std::max(std::fabs(a), std::fabs(b)) > 1e30 ||
      (type == ElementType::Half && std::max(std::fabs(a), std::fabs(b)) > 6e4))
    return true;
  const double relative = type == ElementType::Half ? 2e-3 : type == ElementType::BFloat16 ? 1.6e-2 : 1e-4;
  return std::fabs(a - b) <= relative * std::max({std::fabs(a), std::fabs(b), scale});
}

inline unsigned random_count() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 200;
}

// Whether no instruction whose result may jump, where an operand differs in its last bit, has an operand that
// generated code computes with another rounding than the interpreter.
inline bool is_stable(const LoopKernel& kernel) {
  std::vector<char> inexact;
  for (const LoopInstruction& each : kernel.instructions) {
    bool from = false;
    for (std::size_t o = 0; o < operand_count(each.op); ++o)
      from |= inexact[static_cast<std::size_t>(each.operands[o])] != 0;
    const bool jumps = (each.op >= LoopOp::Equal && each.op <= LoopOp::Select) ||
                       each.op == LoopOp::Convert || each.op == LoopOp::Round || each.op == LoopOp::Divide ||
                       each.op == LoopOp::Log || each.op == LoopOp::SquareRoot || each.op == LoopOp::Subtract;
    if (from && jumps) return false;
    inexact.push_back(from || (each.op >= LoopOp::Exp && each.op <= LoopOp::Erf) ||
                      each.op == LoopOp::RowSum || each.op == LoopOp::ColumnSum);
  }
  return true;
}

}  // namespace penstock::graph::random_kernels
