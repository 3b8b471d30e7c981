#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>
#include <string>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/symbolic_table.h"

namespace penstock::graph {
namespace {

std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

bool is_contiguous(const Geometry& geometry) {
  std::int64_t expected = 1;
  for (std::size_t i = geometry.sizes.size(); i-- > 0;) {
    if (geometry.sizes[i] != 1 && geometry.strides[i] != expected) return false;
    expected *= geometry.sizes[i];
  }
  return true;
}

std::string constant_text(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return "none";
    if (tensor.dim() == 0 && tensor.is_cpu()) {
      std::ostringstream number;
      number << tensor.item();
      return number.str();
    }
    return "tensor";
  }
  if (value.isNone()) return "none";
  if (value.isString()) return fmt::format("\"{}\"", value.toStringRef());
  std::ostringstream text;
  text << value;
  return text.str();
}

std::string name_text(ValueId value) {
  return value == kNoValue ? "none" : fmt::format("%{}", index_of(value));
}

std::string typed_text(const Graph& graph, ValueId value) {
  return value == kNoValue
             ? "none"
             : fmt::format("%{}: {}", index_of(value), to_text(graph[value].geometry, graph.table.get()));
}

std::string result_text(const Graph& graph, const Operand& operand) {
  if (operand.kind == Operand::Kind::Constant) return "_";
  if (operand.kind == Operand::Kind::Tensor) return typed_text(graph, operand.values[0]);
  std::string text = "[";
  for (std::size_t i = 0; i < operand.values.size(); ++i)
    text += (i > 0 ? ", " : "") + typed_text(graph, operand.values[i]);
  return text + "]";
}

}  // namespace

std::string to_text(const Geometry& geometry, const SymbolicTable* table) {
  const LayoutText layout = layout_text(geometry, table);
  std::string text = fmt::format("{}[{}]", dtype_text(geometry.dtype), layout.sizes);
  if (!is_contiguous(geometry)) text += fmt::format(" strides [{}]", layout.strides);
  if (geometry.storage_offset != 0) text += " from " + layout.storage_offset;
  if (geometry.conjugated) text += " conjugated";
  if (geometry.negated) text += " negated";
  if (!geometry.device.is_cpu()) text += " on " + geometry.device.str();
  return text;
}

std::string to_text(const Operand& operand, const SymbolicTable* table) {
  if (operand.symbolic != kNotSymbolic && table) return constant_text(*table, operand.symbolic);
  if (operand.kind == Operand::Kind::Constant) return constant_text(operand.constant);
  if (operand.kind == Operand::Kind::Tensor) return name_text(operand.values[0]);
  std::string text = "[";
  for (std::size_t i = 0; i < operand.values.size(); ++i)
    text += (i > 0 ? ", " : "") + name_text(operand.values[i]);
  return text + "]";
}

std::string to_text(const Graph& graph, const Node& node) {
  std::string text;
  for (std::size_t i = 0; i < node.results.size(); ++i)
    text += (i > 0 ? ", " : "") + result_text(graph, node.results[i]);
  if (!node.results.empty()) text += " = ";
  text += c10::toString(node.op.operator_name()) + "(";
  for (std::size_t i = 0; i < node.arguments.size(); ++i)
    text += (i > 0 ? ", " : "") + to_text(node.arguments[i], graph.table.get());
  return text + ")";
}

std::string to_text(const Graph& graph) {
  std::string text = "graph(";
  for (std::size_t i = 0; i < graph.inputs.size(); ++i) {
    const Placeholder& input = graph.inputs[i];
    text += fmt::format("{}%{} {}: {}", i > 0 ? ", " : "", index_of(input.value), input.name,
                        to_text(graph[input.value].geometry, graph.table.get()));
  }
  text += ") {\n";
  for (const ConstantTensor& constant : graph.constants)
    text += fmt::format("  %{}: {} = constant\n", index_of(constant.value),
                        to_text(graph[constant.value].geometry, graph.table.get()));
  bool backward = false;
  for (const Node& node : graph.nodes) {
    if (node.phase == Phase::Backward && !backward) text += "  # backward\n";
    backward = node.phase == Phase::Backward;
    text += "  " + to_text(graph, node) + "\n";
  }
  text += "  return (";
  for (std::size_t i = 0; i < graph.outputs.size(); ++i)
    text += (i > 0 ? ", " : "") + to_text(graph.outputs[i], graph.table.get());
  return text + ")\n}\n";
}

}  // namespace penstock::graph
