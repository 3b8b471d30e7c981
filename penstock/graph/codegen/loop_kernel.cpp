#include "penstock/graph/codegen/loop_kernel.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>

#include "penstock/errors.h"

namespace penstock::graph {
namespace {

struct LoopOpFacts {
  std::string_view text;
  std::size_t operands;
  int cost;
};

const LoopOpFacts& facts_of(LoopOp op) {
  static constexpr LoopOpFacts kFacts[] = {
      {"load", 0, 1},        {"number", 0, 0},      {"position", 0, 1},   {"convert", 1, 1},
      {"round", 1, 3},       {"add", 2, 1},         {"subtract", 2, 1},   {"multiply", 2, 1},
      {"divide", 2, 5},      {"negate", 1, 1},      {"absolute", 1, 1},   {"sqrt", 1, 6},
      {"maximum", 2, 3},     {"minimum", 2, 3},     {"exp", 1, 16},       {"log", 1, 24},
      {"tanh", 1, 30},       {"sigmoid", 1, 22},    {"erf", 1, 24},       {"equal", 2, 1},
      {"not_equal", 2, 1},   {"less", 2, 1},        {"less_equal", 2, 1}, {"and", 2, 1},
      {"or", 2, 1},          {"not", 1, 1},         {"select", 3, 1},     {"row_sum", 1, 1},
      {"row_maximum", 1, 2}, {"row_minimum", 1, 2}, {"column_sum", 1, 1}};
  return kFacts[static_cast<std::size_t>(op)];
}

ElementType result_type(const LoopKernel& kernel, const LoopInstruction& instruction) {
  const auto type_of = [&](std::size_t operand) {
    return kernel.instructions.at(static_cast<std::size_t>(instruction.operands[operand])).type;
  };
  switch (instruction.op) {
    case LoopOp::Load:
      return computed_in(kernel.buffers.at(instruction.buffer).type);
    case LoopOp::Number:
    case LoopOp::Convert:
      return instruction.type;
    case LoopOp::Position:
      return ElementType::Int64;
    case LoopOp::Equal:
    case LoopOp::NotEqual:
    case LoopOp::Less:
    case LoopOp::LessEqual:
    case LoopOp::And:
    case LoopOp::Or:
    case LoopOp::Not:
      return ElementType::Bool;
    case LoopOp::Select:
      return type_of(1);
    case LoopOp::Round:
    case LoopOp::Add:
    case LoopOp::Subtract:
    case LoopOp::Multiply:
    case LoopOp::Divide:
    case LoopOp::Negate:
    case LoopOp::Absolute:
    case LoopOp::SquareRoot:
    case LoopOp::Maximum:
    case LoopOp::Minimum:
    case LoopOp::Exp:
    case LoopOp::Log:
    case LoopOp::Tanh:
    case LoopOp::Sigmoid:
    case LoopOp::Erf:
    case LoopOp::RowSum:
    case LoopOp::RowMaximum:
    case LoopOp::RowMinimum:
    case LoopOp::ColumnSum:
      return type_of(0);
  }
  throw InvariantError("graph: unknown instruction of a loop");
}

bool needs_floats(LoopOp op) {
  return op == LoopOp::Divide || op == LoopOp::SquareRoot || op == LoopOp::Round ||
         (op >= LoopOp::Exp && op <= LoopOp::Erf);
}
bool needs_single(LoopOp op) { return op >= LoopOp::Exp && op <= LoopOp::Erf; }
bool needs_bools(LoopOp op) { return op == LoopOp::And || op == LoopOp::Or || op == LoopOp::Not; }
bool needs_numbers(LoopOp op) {
  return (op >= LoopOp::Add && op <= LoopOp::Minimum) || is_reduction(op) || op == LoopOp::Less ||
         op == LoopOp::LessEqual;
}

// Whether dims `d` and `d + 1` are one dim in all buffers.
bool are_one_loop(const LoopKernel& kernel, std::size_t d) {
  return std::all_of(kernel.buffers.begin(), kernel.buffers.end(), [&](const LoopBuffer& buffer) {
    return buffer.strides[d] == buffer.strides[d + 1] * kernel.sizes[d + 1];
  });
}

void erase_loop(LoopKernel& kernel, std::size_t d) {
  const auto at = static_cast<std::ptrdiff_t>(d);
  kernel.sizes.erase(kernel.sizes.begin() + at);
  for (LoopBuffer& buffer : kernel.buffers) buffer.strides.erase(buffer.strides.begin() + at);
}

}  // namespace

std::string_view to_text(ElementType type) {
  static constexpr std::string_view kTexts[] = {"bool",  "uint8", "int8",     "int16", "int32",
                                                "int64", "half",  "bfloat16", "float", "double"};
  return kTexts[static_cast<std::size_t>(type)];
}

std::size_t bytes_of(ElementType type) {
  static constexpr std::size_t kBytes[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
  return kBytes[static_cast<std::size_t>(type)];
}

std::string_view to_text(LoopOp op) { return facts_of(op).text; }
std::size_t operand_count(LoopOp op) { return facts_of(op).operands; }
int cost_of(LoopOp op) { return facts_of(op).cost; }

LoopInstruction LoopInstruction::of(ElementType type, double number) {
  LoopInstruction instruction{.op = LoopOp::Number, .type = type};
  if (is_float(type))
    instruction.number =
        type == ElementType::Double ? number : static_cast<double>(static_cast<float>(number));
  else
    instruction.whole = static_cast<std::int64_t>(number);
  return instruction;
}

int LoopKernel::add(LoopInstruction instruction) {
  instruction.type = result_type(*this, instruction);
  for (std::size_t i = 0; i < instructions.size(); ++i) {
    const LoopInstruction& known = instructions[i];
    // NaN is not equal to itself, and 0 is equal to -0.
    if (std::bit_cast<std::uint64_t>(known.number) != std::bit_cast<std::uint64_t>(instruction.number))
      continue;
    LoopInstruction same = known;
    same.number = instruction.number = instruction.op == LoopOp::Number ? instruction.number : 0;
    if (instruction.op == LoopOp::Number) {
      if (known.op == LoopOp::Number && known.type == instruction.type && known.whole == instruction.whole)
        return static_cast<int>(i);
      continue;
    }
    if (same == instruction) return static_cast<int>(i);
  }
  instructions.push_back(instruction);
  return static_cast<int>(instructions.size() - 1);
}

std::int64_t LoopKernel::product(std::size_t first, std::size_t end) const {
  std::int64_t product = 1;
  for (std::size_t d = first; d < end; ++d) product *= sizes[d];
  return product;
}

std::size_t LoopKernel::first_inner_dim() const {
  switch (form) {
    case LoopForm::Rows:
      return sizes.size() - row_dims;
    case LoopForm::Columns:
      return column_dims;
    case LoopForm::Elements:
      return sizes.empty() ? 0 : sizes.size() - 1;
  }
  throw InvariantError("graph: unknown form of a loop");
}

std::int64_t LoopKernel::range() const {
  switch (form) {
    case LoopForm::Elements:
      return sizes.size() <= 1 ? elements() : product(0, sizes.size() - 1);
    case LoopForm::Rows:
      return product(0, first_inner_dim());
    case LoopForm::Columns:
      return (product(column_dims, sizes.size()) + kColumnBlock - 1) / kColumnBlock;
  }
  throw InvariantError("graph: unknown form of a loop");
}

std::int64_t LoopKernel::elements_per_unit() const {
  if (form == LoopForm::Elements) return sizes.size() <= 1 ? 1 : sizes.back();
  if (form == LoopForm::Rows) return product(first_inner_dim(), sizes.size());
  return product(0, column_dims) * std::min(kColumnBlock, product(column_dims, sizes.size()));
}

std::int64_t LoopKernel::bytes_moved() const {
  // What no store depends on is not read.
  std::vector<char> needed(instructions.size(), 0), is_read(buffers.size(), 0);
  for (const LoopStore& store : stores) needed[static_cast<std::size_t>(store.value)] = 1;
  for (std::size_t i = instructions.size(); i-- > 0;) {
    if (!needed[i]) continue;
    if (instructions[i].op == LoopOp::Load) is_read[instructions[i].buffer] = 1;
    for (std::size_t o = 0; o < operand_count(instructions[i].op); ++o)
      needed[static_cast<std::size_t>(instructions[i].operands[o])] = 1;
  }
  std::int64_t bytes = 0;
  for (std::size_t b = 0; b < buffers.size(); ++b) {
    const LoopBuffer& buffer = buffers[b];
    if (!buffer.written && !is_read[b]) continue;
    std::int64_t items = 1;
    for (std::size_t d = 0; d < sizes.size(); ++d)
      if (buffer.strides[d] != 0 || sizes[d] == 0) items *= sizes[d];
    bytes += items * static_cast<std::int64_t>(bytes_of(buffer.type));
  }
  return bytes;
}

int LoopKernel::cost_per_element() const {
  const std::vector<char> varies = varies_in_row(*this);
  int cost = 0;
  for (std::size_t i = 0; i < instructions.size(); ++i)
    if (varies[i] || is_reduction(instructions[i].op)) cost += cost_of(instructions[i].op);
  return cost;
}

std::vector<char> varies_in_row(const LoopKernel& kernel) {
  std::vector<char> varies(kernel.instructions.size(), 0);
  const std::size_t inner = kernel.first_inner_dim();
  for (std::size_t i = 0; i < varies.size(); ++i) {
    const LoopInstruction& instruction = kernel.instructions[i];
    if (instruction.op == LoopOp::Load) {
      const LoopBuffer& buffer = kernel.buffers[instruction.buffer];
      varies[i] = std::any_of(buffer.strides.begin() + static_cast<std::ptrdiff_t>(inner),
                              buffer.strides.end(), [](std::int64_t stride) { return stride != 0; });
    } else if (instruction.op == LoopOp::Position) {
      varies[i] = 1;
    } else if (!is_reduction(instruction.op)) {
      for (std::size_t o = 0; o < operand_count(instruction.op); ++o)
        varies[i] |= varies[static_cast<std::size_t>(instruction.operands[o])];
    }
  }
  return varies;
}

void verify(const LoopKernel& kernel) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw InvariantError("graph: a loop kernel " + what);
  };
  const std::size_t dims = kernel.sizes.size();
  require(
      kernel.form == LoopForm::Rows ? kernel.row_dims >= 1 && kernel.row_dims <= dims : kernel.row_dims == 0,
      "has a wrong number of loops in a row");
  require(kernel.form == LoopForm::Columns ? kernel.column_dims >= 1 && kernel.column_dims < dims
                                           : kernel.column_dims == 0,
          "has a wrong number of loops that are summed up");
  require(dims > 0, "has no loop");
  for (const std::int64_t size : kernel.sizes) require(size >= 0, "has a negative size");
  for (const LoopBuffer& buffer : kernel.buffers)
    require(buffer.strides.size() == dims, "has a buffer with another number of strides than loops");
  const std::vector<char> varies = varies_in_row(kernel);
  for (std::size_t i = 0; i < kernel.instructions.size(); ++i) {
    const LoopInstruction& instruction = kernel.instructions[i];
    const std::string name = fmt::format("instruction {} ({})", i, to_text(instruction.op));
    for (std::size_t o = 0; o < 3; ++o) {
      const int operand = instruction.operands[o];
      if (o < operand_count(instruction.op))
        require(operand >= 0 && static_cast<std::size_t>(operand) < i,
                "uses a value before it is computed: " + name);
      else
        require(operand == kNoOperand, "has too many operands: " + name);
    }
    if (instruction.op == LoopOp::Load) {
      require(instruction.buffer < kernel.buffers.size(), "loads from no buffer: " + name);
      require(!kernel.buffers[instruction.buffer].written, "reads what it writes: " + name);
    }
    require(!is_narrow_float(instruction.type), "computes in a narrow type: " + name);
    require(instruction.type == result_type(kernel, instruction), "has a wrong type: " + name);
    const auto type_of = [&](std::size_t o) {
      return kernel.instructions[static_cast<std::size_t>(instruction.operands[o])].type;
    };
    if (instruction.op == LoopOp::Select)
      require(type_of(0) == ElementType::Bool && type_of(1) == type_of(2), "mixes types: " + name);
    else if (operand_count(instruction.op) == 2)
      require(type_of(0) == type_of(1), "mixes types: " + name);
    if (operand_count(instruction.op) > 0) {
      const ElementType first = type_of(0);
      if (needs_floats(instruction.op)) require(is_float(first), "needs floats: " + name);
      if (needs_single(instruction.op) || instruction.op == LoopOp::Round)
        require(first == ElementType::Float, "needs single floats: " + name);
      if (needs_bools(instruction.op)) require(first == ElementType::Bool, "needs bools: " + name);
      if (needs_numbers(instruction.op)) require(first != ElementType::Bool, "needs numbers: " + name);
    }
    if (instruction.op == LoopOp::Round)
      require(is_narrow_float(instruction.rounded), "rounds to no narrow type: " + name);
    if (instruction.op == LoopOp::Convert && is_float(type_of(0)))
      require(is_float(instruction.type) || instruction.type == ElementType::Bool,
              "converts floats to whole numbers: " + name);
    if (instruction.op == LoopOp::Position)
      require(kernel.form == LoopForm::Rows && kernel.row_dims == 1, "has no single loop in a row: " + name);
    if (kernel.form == LoopForm::Columns)
      for (std::size_t o = 0; o < operand_count(instruction.op); ++o)
        require(
            kernel.instructions[static_cast<std::size_t>(instruction.operands[o])].op != LoopOp::ColumnSum,
            "uses a sum of columns: " + name);
    if (is_reduction(instruction.op)) {
      require((instruction.op == LoopOp::ColumnSum) == (kernel.form == LoopForm::Columns) &&
                  kernel.form != LoopForm::Elements,
              "has a reduction of another form: " + name);
    }
  }
  std::vector<char> stored(kernel.buffers.size(), 0);
  for (const LoopStore& store : kernel.stores) {
    require(store.value >= 0 && static_cast<std::size_t>(store.value) < kernel.instructions.size(),
            "stores no value");
    require(store.buffer < kernel.buffers.size() && kernel.buffers[store.buffer].written,
            "stores to a buffer that is not written");
    require(!stored[store.buffer]++, "stores to a buffer twice");
    const LoopBuffer& buffer = kernel.buffers[store.buffer];
    const LoopInstruction& value = kernel.instructions[static_cast<std::size_t>(store.value)];
    require(computed_in(buffer.type) == value.type, "stores another type than computed");
    if (kernel.form == LoopForm::Columns)
      require(value.op == LoopOp::ColumnSum, "stores something else than sums");
    // The loops that a written buffer does not move in must not matter.
    for (std::size_t d = 0; d < dims; ++d) {
      if (buffer.strides[d] != 0 || kernel.sizes[d] <= 1) continue;
      const bool in_row = kernel.form == LoopForm::Rows && d >= kernel.first_inner_dim();
      const bool summed = kernel.form == LoopForm::Columns && d < kernel.column_dims;
      require(summed || (in_row && !varies[static_cast<std::size_t>(store.value)]),
              "writes an element several times");
    }
  }
  for (std::size_t i = 0; i < kernel.buffers.size(); ++i)
    require(kernel.buffers[i].written == static_cast<bool>(stored[i]), "does not write a buffer");
}

void join_loops(LoopKernel& kernel) {
  // Loops [first, end) are of one kind; `keep`: at least this many remain.
  const auto join = [&](std::size_t first, std::size_t& end, std::size_t keep) {
    for (std::size_t d = first; d < end && end - first > keep;) {
      if (kernel.sizes[d] == 1) {
        erase_loop(kernel, d);
        --end;
      } else if (d + 1 < end && are_one_loop(kernel, d)) {
        kernel.sizes[d + 1] *= kernel.sizes[d];
        erase_loop(kernel, d);
        --end;
      } else {
        ++d;
      }
    }
  };
  std::size_t end = kernel.sizes.size();
  switch (kernel.form) {
    case LoopForm::Elements:
      join(0, end, 1);
      return;
    case LoopForm::Rows: {
      const std::size_t first = kernel.first_inner_dim();
      join(first, end, 1);
      kernel.row_dims = end - first;
      end = first;
      join(0, end, 0);
      return;
    }
    case LoopForm::Columns: {
      join(kernel.column_dims, end, 1);
      join(0, kernel.column_dims, 1);
      return;
    }
  }
}

std::string to_text(const LoopKernel& kernel) {
  std::string text =
      fmt::format("{} [{}]",
                  kernel.form == LoopForm::Elements ? "elements"
                  : kernel.form == LoopForm::Rows   ? fmt::format("rows of {}", kernel.row_dims)
                                                    : fmt::format("columns of {}", kernel.column_dims),
                  fmt::join(kernel.sizes, ", "));
  for (std::size_t i = 0; i < kernel.buffers.size(); ++i)
    text +=
        fmt::format("\n  buffer {}: {} [{}]{}", i, to_text(kernel.buffers[i].type),
                    fmt::join(kernel.buffers[i].strides, ", "), kernel.buffers[i].written ? " written" : "");
  for (std::size_t i = 0; i < kernel.instructions.size(); ++i) {
    const LoopInstruction& instruction = kernel.instructions[i];
    text += fmt::format("\n  %{}: {} = {}", i, to_text(instruction.type), to_text(instruction.op));
    if (instruction.op == LoopOp::Load) text += fmt::format(" buffer {}", instruction.buffer);
    if (instruction.op == LoopOp::Number)
      text += is_float(instruction.type) ? fmt::format(" {:a}", instruction.number)
                                         : fmt::format(" {}", instruction.whole);
    if (instruction.op == LoopOp::Round) text += fmt::format(" {}", to_text(instruction.rounded));
    for (std::size_t o = 0; o < operand_count(instruction.op); ++o)
      text += fmt::format("{}%{}", o == 0 ? " " : ", ", instruction.operands[o]);
  }
  for (const LoopStore& store : kernel.stores)
    text += fmt::format("\n  store %{} in buffer {}", store.value, store.buffer);
  return text + "\n";
}

}  // namespace penstock::graph
