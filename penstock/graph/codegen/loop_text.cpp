#include "penstock/graph/codegen/loop_text.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "penstock/errors.h"

namespace penstock::graph {

std::string_view memory_type(ElementType type) {
  static constexpr std::string_view kTypes[] = {"u8",  "u8",  "i8",  "i16",   "i32",
                                                "i64", "u16", "u16", "float", "double"};
  return kTypes[static_cast<std::size_t>(type)];
}
std::string_view value_type(ElementType type) {
  return type == ElementType::Bool ? std::string_view("bool") : memory_type(type);
}

std::string number_text(const LoopInstruction& number) {
  if (number.type == ElementType::Bool) return number.whole != 0 ? "true" : "false";
  if (!is_float(number.type)) {
    if (number.whole == std::numeric_limits<std::int64_t>::min()) return "(-9223372036854775807ll - 1)";
    return fmt::format("({}){}ll", value_type(number.type), number.whole);
  }
  const bool single = number.type == ElementType::Float;
  const char* suffix = single ? "f" : "";
  if (std::isnan(number.number)) return fmt::format("__builtin_nan{}(\"\")", suffix);
  if (std::isinf(number.number))
    return fmt::format("{}__builtin_inf{}()", number.number < 0 ? "-" : "", suffix);
  return fmt::format("{:a}{}", number.number, suffix);
}

std::string index_text(std::string_view variable, std::int64_t stride) {
  if (stride == 0) return "0";
  return stride == 1 ? std::string(variable) : fmt::format("{} * {}ll", variable, stride);
}

std::string operand_text(const LoopInstruction& instruction, std::size_t operand) {
  return fmt::format("v{}", instruction.operands.at(operand));
}

std::string instruction_text(const LoopKernel& kernel, std::size_t i) {
  const LoopInstruction& instruction = kernel.instructions.at(i);
  const auto a = [&] { return operand_text(instruction, 0); };
  const auto b = [&] { return operand_text(instruction, 1); };
  const auto binary = [&](std::string_view sign) { return fmt::format("{} {} {}", a(), sign, b()); };
  const auto call = [&](std::string_view function) { return fmt::format("{}({})", function, a()); };
  const std::string_view suffix = instruction.type == ElementType::Double ? "" : "f";
  // Whole numbers narrower than int are computed as int.
  const auto cut = [&](const std::string& text) {
    return is_whole_number(instruction.type) ? fmt::format("({})({})", value_type(instruction.type), text)
                                             : text;
  };
  switch (instruction.op) {
    case LoopOp::Number:
      return number_text(instruction);
    case LoopOp::Convert:
      return instruction.type == ElementType::Bool
                 ? (kernel.instructions[static_cast<std::size_t>(instruction.operands[0])].type ==
                            ElementType::Bool
                        ? a()
                        : a() + " != 0")
                 : fmt::format("({}){}", value_type(instruction.type), a());
    case LoopOp::Round:
      return instruction.rounded == ElementType::Half ? fmt::format("from_half(to_half({}))", a())
                                                      : fmt::format("from_bfloat16(to_bfloat16({}))", a());
    case LoopOp::Add:
      return cut(binary("+"));
    case LoopOp::Subtract:
      return cut(binary("-"));
    case LoopOp::Multiply:
      return cut(binary("*"));
    case LoopOp::Divide:
      return binary("/");
    case LoopOp::Negate:
      return cut("-" + a());
    case LoopOp::Absolute:
      if (!is_float(instruction.type)) return cut(fmt::format("{0} < 0 ? -{0} : {0}", a()));
      return fmt::format("__builtin_fabs{}({})", suffix, a());
    case LoopOp::SquareRoot:
      return fmt::format("__builtin_sqrt{}({})", suffix, a());
    case LoopOp::Maximum:
      return fmt::format("({0} > {1}) | ({0} != {0}) ? {0} : {1}", a(), b());
    case LoopOp::Minimum:
      return fmt::format("({0} < {1}) | ({0} != {0}) ? {0} : {1}", a(), b());
    case LoopOp::Exp:
      return call("exp_of");
    case LoopOp::Log:
      return call("log_of");
    case LoopOp::Tanh:
      return call("tanh_of");
    case LoopOp::Sigmoid:
      return call("sigmoid_of");
    case LoopOp::Erf:
      return call("erf_of");
    case LoopOp::Equal:
      return binary("==");
    case LoopOp::NotEqual:
      return binary("!=");
    case LoopOp::Less:
      return binary("<");
    case LoopOp::LessEqual:
      return binary("<=");
    case LoopOp::And:
      return binary("&");
    case LoopOp::Or:
      return binary("|");
    case LoopOp::Not:
      return "!" + a();
    case LoopOp::Select:
      return fmt::format("{} ? {} : {}", a(), b(), operand_text(instruction, 2));
    case LoopOp::Load:
    case LoopOp::Position:
    case LoopOp::RowSum:
    case LoopOp::RowMaximum:
    case LoopOp::RowMinimum:
    case LoopOp::ColumnSum:
      break;
  }
  throw InvariantError("graph: loads, positions and reductions are no expressions");
}

std::string loaded_text(ElementType type, const std::string& item) {
  switch (type) {
    case ElementType::Bool:
      return item + " != 0";
    case ElementType::BFloat16:
      return fmt::format("from_bfloat16({})", item);
    case ElementType::Half:
      return fmt::format("from_half({})", item);
    default:
      return item;
  }
}

std::string stored_text(ElementType type, const std::string& value) {
  switch (type) {
    case ElementType::Bool:
      return "(u8)" + value;
    case ElementType::BFloat16:
      return fmt::format("to_bfloat16({})", value);
    case ElementType::Half:
      return fmt::format("to_half({})", value);
    default:
      return value;
  }
}

}  // namespace penstock::graph
