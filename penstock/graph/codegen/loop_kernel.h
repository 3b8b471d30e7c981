// Loops over elements as a value: what a generated kernel computes, before it is text of a language.
//
//   LoopKernel kernel;                                     // y = relu(x + row), 8 rows of 64
//   kernel.sizes = {8, 64};
//   kernel.buffers = {{ElementType::Float, {64, 1}}, {ElementType::Float, {0, 1}},
//                     {ElementType::Float, {64, 1}, true}};
//   const int x = kernel.add({.op = LoopOp::Load, .buffer = 0});
//   const int row = kernel.add({.op = LoopOp::Load, .buffer = 1});
//   const int sum = kernel.add({.op = LoopOp::Add, .operands = {x, row}});
//   const int zero = kernel.add(LoopInstruction::of(ElementType::Float, 0));
//   ...
//   kernel.stores = {{sum, 2}};
//   verify(kernel);
//
// A kernel is a nest of loops over `sizes`, outermost first, and instructions for each element, in an order
// in which operands come first. Buffers have one stride in elements for each loop; 0 means that the loop does
// not move in it.
//
// Forms. Elements: every element by itself. Rows: the last `row_dims` loops are a row; reductions compute one
// number for each row, which later instructions may use for its elements again. Columns: the first
// `column_dims` loops are summed up (ColumnSum), and the sums, one for each element of the rest, are stored.
//
// Numbers. Instructions compute in float, double, whole numbers or bool. Half and BFloat16 exist in memory
// alone: loads widen them to float, and Round makes a float one that they can represent.
// Thread safety: that of a value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::graph {

enum class ElementType : std::uint8_t {
  Bool,
  UInt8,
  Int8,
  Int16,
  Int32,
  Int64,
  Half,
  BFloat16,
  Float,
  Double
};
std::string_view to_text(ElementType type);
std::size_t bytes_of(ElementType type);
inline bool is_narrow_float(ElementType type) {
  return type == ElementType::Half || type == ElementType::BFloat16;
}
inline bool is_float(ElementType type) { return type >= ElementType::Half; }
inline bool is_whole_number(ElementType type) {
  return type != ElementType::Bool && type < ElementType::Half;
}
// What instructions compute in for elements of a type: float for the narrow ones, else the type itself.
inline ElementType computed_in(ElementType type) { return is_narrow_float(type) ? ElementType::Float : type; }

enum class LoopOp : std::uint8_t {
  Load,      // of `buffer`
  Number,    // a constant
  Position,  // of the element in its row, from 0, as Int64
  Convert,   // to `type`: between whole numbers as in C++; to Bool: is it not 0
  Round,     // of a float to the nearest one that `rounded` (Half, BFloat16) has, ties to even
  Add,
  Subtract,
  Multiply,
  Divide,  // of floats
  Negate,
  Absolute,
  SquareRoot,
  Maximum,  // NaN if one of the operands is
  Minimum,
  Exp,  // floats only, as all up to Erf
  Log,
  Tanh,
  Sigmoid,
  Erf,
  Equal,  // a Bool, as all up to Not; operands of one type
  NotEqual,
  Less,
  LessEqual,
  And,  // of Bools
  Or,
  Not,
  Select,  // operand 0, a Bool, chooses between operands 1 and 2
  // One number for all elements of a row (Rows).
  RowSum,
  RowMaximum,  // NaN if one of the elements is
  RowMinimum,
  // One number for all elements that differ in the first loops alone (Columns).
  ColumnSum
};
std::string_view to_text(LoopOp op);
inline bool is_reduction(LoopOp op) { return op >= LoopOp::RowSum; }
// How many operands it has.
std::size_t operand_count(LoopOp op);
// Roughly, in additions.
int cost_of(LoopOp op);

inline constexpr int kNoOperand = -1;

struct LoopInstruction {
  LoopOp op = LoopOp::Number;
  ElementType type = ElementType::Float;  // of the result; add() sets it where the operands decide
  std::array<int, 3> operands = {kNoOperand, kNoOperand, kNoOperand};
  std::size_t buffer = 0;                    // of a Load
  double number = 0;                         // of a Number of floats
  std::int64_t whole = 0;                    // of another Number
  ElementType rounded = ElementType::Float;  // of Round

  static LoopInstruction of(ElementType type, double number);
  bool operator==(const LoopInstruction&) const = default;
};

struct LoopBuffer {
  ElementType type = ElementType::Float;
  std::vector<std::int64_t> strides = {};  // in elements, one for each loop
  bool written = false;
};

struct LoopStore {
  int value = kNoOperand;
  std::size_t buffer = 0;
};

enum class LoopForm : std::uint8_t { Elements, Rows, Columns };

struct LoopKernel {
  LoopForm form = LoopForm::Elements;
  std::vector<std::int64_t> sizes;
  std::size_t row_dims = 0;     // of Rows: at least 1
  std::size_t column_dims = 0;  // of Columns: at least 1
  std::vector<LoopBuffer> buffers;
  std::vector<LoopInstruction> instructions;
  std::vector<LoopStore> stores;

  // Adds an instruction, or finds an equal one. Returns its index.
  int add(LoopInstruction instruction);

  // What calls of the kernel divide among threads: elements of a single loop, places of the outer loops, or
  // blocks of columns.
  std::int64_t range() const;
  // Elements that one unit of the range works on.
  std::int64_t elements_per_unit() const;
  // Product of the sizes from loop `first` to before `end`.
  std::int64_t product(std::size_t first, std::size_t end) const;
  std::int64_t elements() const { return product(0, sizes.size()); }
  // The first loop of a row; sizes.size() - 1, or 0, where there is no row.
  std::size_t first_inner_dim() const;
  // Bytes that it reads and writes, each element that it needs of a buffer counted once.
  std::int64_t bytes_moved() const;
  // In additions, for each element.
  int cost_per_element() const;
};

// Columns are computed in blocks of this many.
inline constexpr std::int64_t kColumnBlock = 64;

// Throws InvariantError for a kernel that breaks the rules above.
void verify(const LoopKernel& kernel);

// Joins neighbouring loops that are one loop in all buffers, and drops loops of size 1, except that a kernel
// keeps one loop of each kind that its form needs.
void join_loops(LoopKernel& kernel);

// As text: equal for kernels that do the same.
std::string to_text(const LoopKernel& kernel);

// How each instruction depends on the loops of a row: whether its value differs from element to element.
std::vector<char> varies_in_row(const LoopKernel& kernel);

}  // namespace penstock::graph
