#include "penstock/graph/ir/symbolic_table.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::graph {
namespace {

// A number in source code that an operator wrapped in a tensor.
bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.defined() && tensor.dim() == 0 && tensor.unsafeGetTensorImpl()->is_wrapped_number() &&
         tensor.is_cpu() && tensor.has_storage();
}

std::optional<PlainNumber> read_number(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kLong) return *static_cast<const std::int64_t*>(tensor.data_ptr());
  if (tensor.scalar_type() == at::kDouble) return *static_cast<const double*>(tensor.data_ptr());
  return std::nullopt;
}

at::Tensor tensor_of(const PlainNumber& number) {
  at::Tensor tensor;
  if (const auto* whole = std::get_if<std::int64_t>(&number)) {
    tensor = at::empty({}, at::kLong);
    *static_cast<std::int64_t*>(tensor.data_ptr()) = *whole;
  } else {
    tensor = at::empty({}, at::kDouble);
    *static_cast<double*>(tensor.data_ptr()) = std::get<double>(number);
  }
  return tensor;
}

std::string text_of_number(const NumberOrSize& number, const SymbolSet& symbols) {
  return std::visit([&](const auto& expression) { return expression.text(symbols.names()); }, number);
}

std::optional<PlainNumber> number_at(const NumberOrSize& number, const SymbolValues& variables) {
  return std::visit(
      [&](const auto& expression) -> std::optional<PlainNumber> {
        if (const auto value = expression.at(variables)) return PlainNumber(*value);
        return std::nullopt;
      },
      number);
}

// Evaluates a geometry for given values of all variables; sets `why` if some number has no value.
std::optional<StridedLayout> layout_at(const SymbolicGeometry& geometry, const SymbolSet& symbols,
                                       const SymbolValues& variables, std::string* why) {
  StridedLayout layout;
  const auto read = [&](const std::optional<SizeExpression>& expression, std::int64_t* value) {
    const std::optional<std::int64_t> result = expression ? expression->at(variables) : std::nullopt;
    if (result)
      *value = *result;
    else if (why)
      *why = expression ? expression->text(symbols.names()) + " is not a whole number"
                        : "a size has no expression in the symbols";
    return result.has_value();
  };
  layout.sizes.resize(geometry.sizes.size());
  layout.strides.resize(geometry.strides.size());
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i)
    if (!read(geometry.sizes[i], &layout.sizes[i]) || !read(geometry.strides[i], &layout.strides[i]))
      return std::nullopt;
  if (!read(geometry.storage_offset, &layout.storage_offset)) return std::nullopt;
  return layout;
}

std::optional<c10::IValue> constant_at(const SymbolicConstant& constant, const SymbolSet& symbols,
                                       const SymbolValues& variables, std::string* why) {
  std::vector<PlainNumber> numbers;
  for (const NumberOrSize& number : constant.numbers) {
    const auto value = number_at(number, variables);
    if (!value) {
      if (why) *why = text_of_number(number, symbols) + " is not a whole number";
      return std::nullopt;
    }
    numbers.push_back(*value);
  }
  return with_numbers(constant.example, numbers);
}

std::optional<at::Tensor> tensor_at(const SymbolicTensor& tensor, const SymbolSet& symbols,
                                    const SymbolValues& variables, std::string* why) {
  if (tensor.number) {
    if (const auto number = number_at(*tensor.number, variables)) return tensor_of(*number);
    if (why) *why = text_of_number(*tensor.number, symbols) + " is not a whole number";
    return std::nullopt;
  }
  const auto layout = layout_at(tensor.part, symbols, variables, why);
  if (!layout) return std::nullopt;
  // It must stay inside the memory at both ends.
  std::int64_t end = layout->storage_offset;
  bool inside = end >= 0;
  for (std::size_t i = 0; i < layout->sizes.size(); ++i) {
    inside &= layout->sizes[i] >= 0 && layout->strides[i] >= 0;
    end += std::max<std::int64_t>(layout->sizes[i] - 1, 0) * layout->strides[i];
  }
  if (!inside ||
      static_cast<std::size_t>(end + 1) * tensor.example.itemsize() > tensor.example.storage().nbytes()) {
    if (why) *why = "a tensor that the function uses is too small";
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  return tensor.example.as_strided(layout->sizes, layout->strides, layout->storage_offset);
}

SymbolValues variables_or_throw(const SymbolicTable& table, const SymbolValues& values) {
  if (values.size() != table.symbols.symbols())
    throw ValueError(
        describe("graph: number of sizes to bind", std::to_string(values.size()),
                 fmt::format("{} for {}", table.symbols.symbols(), fmt::join(table.symbols.names(), ", ")),
                 "give one for each symbol"));
  auto variables = table.symbols.variables_at(values);
  if (!variables)
    throw ValueError(fmt::format("graph: no sizes for {}: out of range", table.text_of(values)));
  return std::move(*variables);
}

// Replaces the symbols in geometries and constants.
class Binding {
 public:
  Binding(const SymbolicTable& table, const SymbolValues& values)
      : table_(table), values_(values), variables_(variables_or_throw(table, values)) {}

  // A size inside the graph without an expression keeps its value from the example.
  void bind(Geometry& geometry, bool may_be_unknown) const {
    if (geometry.symbolic == kNotSymbolic) return;
    std::string why;
    const auto layout = layout_at(table_.geometries.at(static_cast<std::size_t>(geometry.symbolic)),
                                  table_.symbols, variables_, &why);
    geometry.symbolic = kNotSymbolic;
    if (layout) {
      geometry.sizes = layout->sizes;
      geometry.strides = layout->strides;
      geometry.storage_offset = layout->storage_offset;
    } else if (!may_be_unknown) {
      refuse(why);
    }
  }
  void bind(ConstantTensor& constant) const {
    if (constant.symbolic == kNotSymbolic) return;
    std::string why;
    auto tensor = tensor_at(table_.tensors.at(static_cast<std::size_t>(constant.symbolic)), table_.symbols,
                            variables_, &why);
    if (!tensor) refuse(why);
    constant.tensor = std::move(*tensor);
    constant.symbolic = kNotSymbolic;
  }
  void bind(Operand& operand) const {
    if (operand.symbolic == kNotSymbolic) return;
    std::string why;
    auto constant = constant_at(table_.constants.at(static_cast<std::size_t>(operand.symbolic)),
                                table_.symbols, variables_, &why);
    if (!constant) refuse(why);
    operand.constant = std::move(*constant);
    operand.symbolic = kNotSymbolic;
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw ValueError(fmt::format("graph: the graph cannot be evaluated for {}: {}; bind other sizes",
                                 table_.text_of(values_), why));
  }

  const SymbolicTable& table_;
  const SymbolValues& values_;
  const SymbolValues variables_;
};

std::string text_or_unknown(const std::optional<SizeExpression>& expression, const SymbolSet& symbols) {
  return expression ? expression->text(symbols.names()) : "?";
}

}  // namespace

std::optional<std::vector<PlainNumber>> numbers_of(const c10::IValue& constant) {
  if (constant.isInt()) return std::vector<PlainNumber>{constant.toInt()};
  if (constant.isDouble()) return std::vector<PlainNumber>{constant.toDouble()};
  if (constant.isIntList()) {
    const std::vector<std::int64_t> items = constant.toIntVector();
    return std::vector<PlainNumber>(items.begin(), items.end());
  }
  if (constant.isDoubleList()) {
    const std::vector<double> items = constant.toDoubleVector();
    return std::vector<PlainNumber>(items.begin(), items.end());
  }
  if (constant.isTensor())
    if (is_wrapped_number(constant.toTensor()))
      if (const auto number = read_number(constant.toTensor())) return std::vector<PlainNumber>{*number};
  return std::nullopt;
}

std::optional<PlainNumber> number_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() != 0 || !tensor.is_cpu() || !tensor.has_storage())
    return std::nullopt;
  return read_number(tensor);
}

c10::IValue with_numbers(const c10::IValue& example, const std::vector<PlainNumber>& numbers) {
  if (example.isInt()) return std::get<std::int64_t>(numbers.at(0));
  if (example.isDouble()) return std::get<double>(numbers.at(0));
  if (example.isTensor()) {
    at::Tensor tensor = tensor_of(numbers.at(0));
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }
  if (example.isIntList()) {
    std::vector<std::int64_t> items;
    for (const PlainNumber& number : numbers) items.push_back(std::get<std::int64_t>(number));
    return c10::IValue(items);
  }
  PENSTOCK_INVARIANT(example.isDoubleList(), "a symbolic constant is a number or a list of numbers");
  std::vector<double> items;
  for (const PlainNumber& number : numbers) items.push_back(std::get<double>(number));
  return c10::IValue(items);
}

c10::intrusive_ptr<BoundSizes> SymbolicTable::at(const SymbolValues& values, std::string* why) const {
  const auto variables = symbols.variables_at(values);
  if (!variables) {
    if (why) *why = "a size is out of range";
    return {};
  }
  auto bound = c10::make_intrusive<BoundSizes>();
  bound->values = values;
  bound->constants.reserve(constants.size());
  for (const SymbolicConstant& constant : constants) {
    auto value = constant_at(constant, symbols, *variables, why);
    if (!value) return {};
    bound->constants.push_back(std::move(*value));
  }
  bound->layouts.resize(geometries.size());
  for (std::size_t i = 0; i < geometries.size(); ++i) {
    if (!geometries[i].used_by_calls) continue;
    auto layout = layout_at(geometries[i], symbols, *variables, why);
    if (!layout) return {};
    bound->layouts[i] = std::move(*layout);
  }
  for (const SymbolicTensor& tensor : tensors) {
    auto value = tensor_at(tensor, symbols, *variables, why);
    if (!value) return {};
    bound->tensors.push_back(std::move(*value));
  }
  return bound;
}

std::string SymbolicTable::text_of(const SymbolValues& values) const {
  std::string text;
  for (std::size_t i = 0; i < values.size(); ++i)
    text += fmt::format("{}{} = {}", i > 0 ? ", " : "", i < symbols.symbols() ? symbols.names()[i] : "?",
                        values[i]);
  return text;
}

Graph bind(const Graph& graph, const SymbolValues& values) {
  Graph bound = graph;
  bound.table.reset();
  if (!graph.table) {
    if (!values.empty())
      throw ValueError(describe("graph: number of sizes to bind", std::to_string(values.size()), "none",
                                "the graph has no symbols"));
    return bound;
  }
  const Binding binding(*graph.table, values);
  for (Value& value : bound.values) binding.bind(value.geometry, /*may_be_unknown=*/true);
  for (ConstantTensor& constant : bound.constants) binding.bind(constant);
  for (Node& node : bound.nodes)
    for (Operand& operand : node.arguments) binding.bind(operand);
  for (Operand& output : bound.outputs) binding.bind(output);
  verify(bound);
  return bound;
}

JointGraph bind(const JointGraph& joint, const SymbolValues& values) {
  JointGraph bound{bind(joint.graph, values),
                   joint.primals,
                   joint.forward_outputs,
                   joint.tangents,
                   joint.written_in_backward,
                   joint.written_in_graph,
                   {},
                   joint.states};
  if (!joint.graph.table) return bound;
  const Binding binding(*joint.graph.table, values);
  for (TangentInfo& tangent : bound.tangents) binding.bind(tangent.geometry, /*may_be_unknown=*/false);
  return bound;
}

ViewAndMutationMeta bind(const ViewAndMutationMeta& meta, const SymbolicTable& table,
                         const SymbolValues& values) {
  ViewAndMutationMeta bound = meta;
  const Binding binding(table, values);
  for (OutputInfo& output : bound.outputs) {
    binding.bind(output.geometry, /*may_be_unknown=*/false);
    for (ViewStep& step : output.view.steps)
      for (Operand& operand : step.arguments) binding.bind(operand);
    output.dynamic_dims.clear();
  }
  for (TangentInfo& tangent : bound.tangents) binding.bind(tangent.geometry, /*may_be_unknown=*/false);
  bound.symbols_for_backward = 0;
  return bound;
}

LayoutText layout_text(const Geometry& geometry, const SymbolicTable* table) {
  if (geometry.symbolic == kNotSymbolic || !table)
    return {fmt::format("{}", fmt::join(geometry.sizes, ", ")),
            fmt::format("{}", fmt::join(geometry.strides, ", ")), std::to_string(geometry.storage_offset)};
  const SymbolicGeometry& symbolic = table->geometries.at(static_cast<std::size_t>(geometry.symbolic));
  LayoutText text;
  for (std::size_t i = 0; i < symbolic.sizes.size(); ++i) {
    text.sizes += (i > 0 ? ", " : "") + text_or_unknown(symbolic.sizes[i], table->symbols);
    text.strides += (i > 0 ? ", " : "") + text_or_unknown(symbolic.strides[i], table->symbols);
  }
  text.storage_offset = text_or_unknown(symbolic.storage_offset, table->symbols);
  return text;
}

std::string constant_text(const SymbolicTable& table, SymbolicId constant) {
  const SymbolicConstant& symbolic = table.constants.at(static_cast<std::size_t>(constant));
  std::string text;
  for (std::size_t i = 0; i < symbolic.numbers.size(); ++i)
    text += (i > 0 ? ", " : "") + text_of_number(symbolic.numbers[i], table.symbols);
  return symbolic.example.isList() ? "[" + text + "]" : text;
}

}  // namespace penstock::graph
