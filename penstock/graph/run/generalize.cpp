#include "penstock/graph/run/generalize.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/constant_value.h"
#include "penstock/tensor_subclass.h"

namespace penstock::graph {
namespace {

// ---- the structure of a capture, without sizes ----

void clear_sizes(Geometry& geometry) {
  std::fill(geometry.sizes.begin(), geometry.sizes.end(), 0);
  std::fill(geometry.strides.begin(), geometry.strides.end(), 0);
  geometry.storage_offset = 0;
  geometry.symbolic = kNotSymbolic;
}

ViewAndMutationMeta without_sizes(ViewAndMutationMeta meta) {
  for (OutputInfo& output : meta.outputs) {
    clear_sizes(output.geometry);
    for (ViewStep& step : output.view.steps)
      for (Operand& operand : step.arguments)
        if (operand.kind == Operand::Kind::Constant && numbers_of(operand.constant))
          operand = Operand::of(c10::IValue());
    output.dynamic_dims.clear();
  }
  for (TangentInfo& tangent : meta.tangents) clear_sizes(tangent.geometry);
  meta.symbols_for_backward = 0;
  return meta;
}

bool same_but_for_numbers(const c10::IValue& a, const c10::IValue& b) {
  const auto x = numbers_of(a), y = numbers_of(b);
  if (!x || !y) return same_constant(a, b);
  return a.isList() == b.isList() && a.isTensor() == b.isTensor() &&
         std::equal(x->begin(), x->end(), y->begin(), y->end(),
                    [](const PlainNumber& m, const PlainNumber& n) { return m.index() == n.index(); });
}

// Tensors that the function found: the same one, or a new one with the same values.
bool same_found_tensor(const at::Tensor& a, const at::Tensor& b) {
  if (!has_geometry(a, geometry_of(b))) return false;
  if (a.is_same(b) || a.is_alias_of(b)) return true;
  const at::NoGradGuard no_grad;
  return at::equal(a, b);
}

// Equal except for numbers: parts of one memory, or numbers in tensors.
bool similar_found_tensor(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.device() != b.device() || a.dim() != b.dim()) return false;
  return a.is_alias_of(b) || (number_of(a) && number_of(b)) || same_found_tensor(a, b);
}

std::string name_of_node(const Graph& graph, std::size_t node) {
  return fmt::format("node {} ({})", node, c10::toString(graph.nodes[node].op.operator_name()));
}

// Finds the first difference between two captures other than in numbers.
class StructureComparison {
 public:
  StructureComparison(const FunctionCapture& a, const FunctionCapture& b)
      : a_(a), b_(b), x_(a.joint.graph), y_(b.joint.graph) {}

  std::string run() const {
    if (!a_.guard.same_kind(b_.guard)) return "the inputs are of a different kind";
    if (a_.user_meta().outputs.size() != b_.user_meta().outputs.size())
      return fmt::format("the function returns {} and {} results", a_.user_meta().outputs.size(),
                         b_.user_meta().outputs.size());
    for (std::size_t i = 0; i < x_.nodes.size() && i < y_.nodes.size(); ++i)
      if (std::string difference = compare_nodes(i); !difference.empty()) return difference;
    if (x_.nodes.size() != y_.nodes.size())
      return fmt::format("there are {} and {} nodes", x_.nodes.size(), y_.nodes.size());
    const auto same_meta = [](const ViewAndMutationMeta& a, const ViewAndMutationMeta& b) {
      return without_sizes(a).same_in_every_field(without_sizes(b));
    };
    if (!same_meta(a_.user_meta(), b_.user_meta()) || !same_meta(a_.meta, b_.meta))
      return "the results alias each other or the inputs differently, or different inputs are written";
    const bool same_wrappers =
        std::equal(a_.wrappers.begin(), a_.wrappers.end(), b_.wrappers.begin(), b_.wrappers.end(),
                   [](const WrapperInUse& a, const WrapperInUse& b) {
                     return a.wrapper->same_but_for_sizes(*b.wrapper) &&
                            without_sizes(a.outer).same_in_every_field(without_sizes(b.outer));
                   });
    if (!same_wrappers || a_.primal_written != b_.primal_written ||
        a_.primal_shares_changed != b_.primal_shares_changed)
      return "the inputs share memory differently";
    if (a_.joint.primals != b_.joint.primals || a_.joint.forward_outputs != b_.joint.forward_outputs ||
        a_.joint.tangents.size() != b_.joint.tangents.size() ||
        a_.geometry_after.size() != b_.geometry_after.size() ||
        a_.joint.written_in_backward != b_.joint.written_in_backward)
      return "different results require gradients, or backward writes different inputs";
    return compare_interface();
  }

 private:
  bool same_value(ValueId value) const {
    const Value &a = x_[value], &b = y_[value];
    return a.storage == b.storage && a.geometry.dtype == b.geometry.dtype &&
           a.geometry.device == b.geometry.device && a.geometry.conjugated == b.geometry.conjugated &&
           a.geometry.negated == b.geometry.negated && a.geometry.sizes.size() == b.geometry.sizes.size();
  }

  bool same_operand(const Operand& a, const Operand& b) const {
    if (a.kind != b.kind || a.values != b.values) return false;
    for (const ValueId value : a.values)
      if (value != kNoValue && !same_value(value)) return false;
    return a.kind != Operand::Kind::Constant || same_but_for_numbers(a.constant, b.constant);
  }

  std::string compare_nodes(std::size_t i) const {
    const Node &a = x_.nodes[i], &b = y_.nodes[i];
    if (a.op.operator_name() != b.op.operator_name())
      return fmt::format("node {} is {} and {}", i, c10::toString(a.op.operator_name()),
                         c10::toString(b.op.operator_name()));
    if (a.phase != b.phase || a.grad_enabled != b.grad_enabled)
      return name_of_node(x_, i) + " belongs to a different phase or grad mode";
    for (std::size_t j = 0; j < a.arguments.size(); ++j)
      if (!same_operand(a.arguments[j], b.arguments[j]))
        return fmt::format("argument '{}' of {} is {} and {}", a.op.schema().arguments()[j].name(),
                           name_of_node(x_, i), to_text(a.arguments[j], x_.table.get()),
                           to_text(b.arguments[j]));
    for (std::size_t j = 0; j < a.results.size(); ++j)
      if (!same_operand(a.results[j], b.results[j]))
        return fmt::format("result {} of {} is of a different kind", j, name_of_node(x_, i));
    return {};
  }

  // Compares inputs, constants and outputs of the graph.
  std::string compare_interface() const {
    if (x_.inputs.size() != y_.inputs.size() || x_.constants.size() != y_.constants.size() ||
        x_.outputs.size() != y_.outputs.size())
      return "the graph has different inputs, constants or outputs";
    for (std::size_t i = 0; i < x_.inputs.size(); ++i)
      if (x_.inputs[i].value != y_.inputs[i].value || !same_value(x_.inputs[i].value))
        return fmt::format("input {} is a different value", i);
    for (std::size_t i = 0; i < x_.constants.size(); ++i)
      if (x_.constants[i].value != y_.constants[i].value ||
          !similar_found_tensor(x_.constants[i].tensor, y_.constants[i].tensor))
        return fmt::format(
            "the function creates tensors of {} and {} elements or with different values; create them with "
            "operators (arange, full), take "
            "them from an existing tensor, or pass them as inputs",
            x_.constants[i].tensor.numel(), y_.constants[i].tensor.numel());
    for (std::size_t i = 0; i < x_.outputs.size(); ++i)
      if (!same_operand(x_.outputs[i], y_.outputs[i]))
        return fmt::format("output {} of the graph differs", i);
    return {};
  }

  const FunctionCapture &a_, &b_;
  const Graph &x_, &y_;
};

// ---- where numbers occur ----

enum class Role : std::uint8_t { Input, Output, Tangent, WrittenInput, Inner };

// Calls `on_geometry(Geometry&, Role, number)` and `on_constant(Operand&, node, argument)` for everything
// that a run depends on, and for the values inside. For constants among the outputs, `node` is the number of
// nodes; for those of a view that is a result, it is one more. Always in the same order.
template <class Call, class OnGeometry, class OnConstant>
void for_each_place(Call& call, OnGeometry&& on_geometry, OnConstant&& on_constant) {
  call.guard.for_each_geometry(
      [&](std::size_t input, auto& geometry) { on_geometry(geometry, Role::Input, input); });
  for_each_meta(call, [&](auto& meta) {
    for (std::size_t i = 0; i < meta.outputs.size(); ++i)
      if (meta.outputs[i].type == OutputType::Tensor) on_geometry(meta.outputs[i].geometry, Role::Output, i);
    for (std::size_t i = 0; i < meta.tangents.size(); ++i)
      on_geometry(meta.tangents[i].geometry, Role::Tangent, i);
  });
  for (std::size_t i = 0; i < call.joint.tangents.size(); ++i)
    on_geometry(call.joint.tangents[i].geometry, Role::Tangent, i);
  for (std::size_t i = 0; i < call.geometry_after.size(); ++i)
    on_geometry(call.geometry_after[i], Role::WrittenInput, i);
  auto& graph = call.joint.graph;
  const auto inner = [&](ValueId value) {
    on_geometry(graph.values[index_of(value)].geometry, Role::Inner, index_of(value));
  };
  for (const Placeholder& input : graph.inputs) inner(input.value);
  for (const ConstantTensor& constant : graph.constants) inner(constant.value);
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    for_each_value(graph.nodes[i].results, inner);
    for (std::size_t j = 0; j < graph.nodes[i].arguments.size(); ++j)
      if (graph.nodes[i].arguments[j].kind == Operand::Kind::Constant)
        on_constant(graph.nodes[i].arguments[j], i, j);
  }
  for (std::size_t i = 0; i < graph.outputs.size(); ++i)
    if (graph.outputs[i].kind == Operand::Kind::Constant)
      on_constant(graph.outputs[i], graph.nodes.size(), i);
  for_each_meta(call, [&](auto& meta) {
    for (std::size_t i = 0; i < meta.outputs.size(); ++i)
      for (auto& step : meta.outputs[i].view.steps)
        for (auto& operand : step.arguments)
          if (operand.kind == Operand::Kind::Constant) on_constant(operand, graph.nodes.size() + 1, i);
  });
}

std::string name_of_constant(const Graph& graph, std::size_t node, std::size_t argument) {
  if (node == graph.nodes.size()) return fmt::format("output {} of the graph", argument);
  if (node > graph.nodes.size()) return fmt::format("a number of the view that is result {}", argument);
  return fmt::format("argument '{}' of {}", graph.nodes[node].op.schema().arguments()[argument].name(),
                     name_of_node(graph, node));
}

std::string name_of_geometry(Role role, std::size_t number) {
  switch (role) {
    case Role::Input:
      return fmt::format("input {}", number);
    case Role::Output:
      return fmt::format("result {}", number);
    case Role::Tangent:
      return fmt::format("gradient {}", number);
    case Role::WrittenInput:
      return fmt::format("written input {}", number);
    case Role::Inner:
      return fmt::format("%{}", number);
  }
  return "?";
}

// ---- from captures to expressions ----

// Turns the first of several captures into one with symbols.
class Generalization {
 public:
  Generalization(std::vector<FunctionCapture>& samples, const std::vector<std::string>& names,
                 const std::vector<SymbolValues>& points)
      : samples_(samples), points_(points), fitter_(names, points) {
    geometries_.resize(samples.size());
    constants_.resize(samples.size());
    for (std::size_t i = 0; i < samples.size(); ++i)
      for_each_place(
          samples[i],
          [&](Geometry& geometry, Role role, std::size_t number) {
            geometries_[i].push_back({&geometry, role, number});
          },
          [&](Operand& operand, std::size_t node, std::size_t argument) {
            constants_[i].push_back({&operand, node, argument});
          });
  }

  // Returns an empty string, or what cannot be expressed.
  std::string run() {
    for (std::size_t i = 0; i < geometries_[0].size(); ++i) find_sizes(i);
    for (std::size_t i = 0; i < geometries_[0].size(); ++i)
      if (std::string refused = generalize_geometry(i); !refused.empty()) return refused;
    for (std::size_t i = 0; i < constants_[0].size(); ++i)
      if (std::string refused = generalize_constant(i); !refused.empty()) return refused;
    for (std::size_t i = 0; i < samples_[0].joint.graph.constants.size(); ++i)
      if (std::string refused = generalize_tensor(i); !refused.empty()) return refused;
    table_->symbols = fitter_.symbols();
    for_each_meta(samples_[0], [&](ViewAndMutationMeta& meta) {
      for (OutputInfo& output : meta.outputs) mark_dynamic_dims(output);
    });
    samples_[0].joint.graph.table = table_;
    return {};
  }

 private:
  struct GeometryPlace {
    Geometry* geometry = nullptr;
    Role role = Role::Inner;
    std::size_t number = 0;
  };
  struct ConstantPlace {
    Operand* operand = nullptr;
    std::size_t node = 0, argument = 0;
  };

  template <class Read>
  std::vector<std::int64_t> over_samples(std::size_t place, const Read& read) const {
    std::vector<std::int64_t> values;
    for (const auto& geometries : geometries_) values.push_back(read(*geometries[place].geometry));
    return values;
  }
  static bool all_equal(const std::vector<std::int64_t>& values) {
    return std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end();
  }

  // Sizes first: they may contain quotients, of which strides and constants are products.
  void find_sizes(std::size_t place) {
    for (std::size_t dim = 0; dim < geometries_[0][place].geometry->sizes.size(); ++dim)
      if (const auto sizes =
              over_samples(place, [&](const Geometry& geometry) { return geometry.sizes[dim]; });
          !all_equal(sizes))
        fitter_.fit_size(sizes);
  }

  std::string generalize_geometry(std::size_t place) {
    const GeometryPlace& first = geometries_[0][place];
    const std::size_t rank = first.geometry->sizes.size();
    std::vector<std::vector<std::int64_t>> numbers;
    for (std::size_t dim = 0; dim < rank; ++dim)
      numbers.push_back(over_samples(place, [&](const Geometry& geometry) { return geometry.sizes[dim]; }));
    for (std::size_t dim = 0; dim < rank; ++dim)
      numbers.push_back(over_samples(place, [&](const Geometry& geometry) { return geometry.strides[dim]; }));
    numbers.push_back(over_samples(place, [&](const Geometry& geometry) { return geometry.storage_offset; }));
    if (std::all_of(numbers.begin(), numbers.end(), all_equal)) return {};
    const bool used_by_calls = first.role != Role::Inner;
    const auto [entry, is_new] =
        known_geometries_.try_emplace(numbers, static_cast<SymbolicId>(table_->geometries.size()));
    if (is_new) {
      SymbolicGeometry symbolic;
      for (std::size_t dim = 0; dim < rank; ++dim) symbolic.sizes.push_back(fitter_.fit(numbers[dim]));
      for (std::size_t dim = 0; dim < rank; ++dim)
        symbolic.strides.push_back(fitter_.fit(numbers[rank + dim]));
      symbolic.storage_offset = fitter_.fit(numbers.back());
      table_->geometries.push_back(std::move(symbolic));
    }
    SymbolicGeometry& symbolic = table_->geometries[static_cast<std::size_t>(entry->second)];
    symbolic.used_by_calls |= used_by_calls;
    if (used_by_calls && !is_known(symbolic))
      return fmt::format("{} is {} at {} and {} at {}, for which there is no simple expression",
                         name_of_geometry(first.role, first.number), to_text(*first.geometry), sizes_text(0),
                         to_text(*geometries_[1][place].geometry), sizes_text(1));
    first.geometry->symbolic = entry->second;
    return {};
  }

  // Handles a tensor that the function found.
  std::string generalize_tensor(std::size_t constant) {
    ConstantTensor& first = samples_[0].joint.graph.constants[constant];
    const auto tensor_in = [&](std::size_t sample) -> const at::Tensor& {
      return samples_[sample].joint.graph.constants[constant].tensor;
    };
    bool differs = false, in_one_memory = true;
    for (std::size_t i = 1; i < samples_.size(); ++i) {
      differs |= !same_found_tensor(first.tensor, tensor_in(i));
      in_one_memory &= first.tensor.is_alias_of(tensor_in(i));
    }
    if (!differs) return {};
    SymbolicTensor symbolic{first.tensor, std::nullopt, {}};
    bool known = true;
    if (in_one_memory) {
      const SymbolicId geometry = samples_[0].joint.graph[first.value].geometry.symbolic;
      PENSTOCK_INVARIANT(geometry != kNotSymbolic,
                         "different parts of the same memory must have different geometries");
      symbolic.part = table_->geometries[static_cast<std::size_t>(geometry)];
      known = is_known(symbolic.part);
    } else {
      std::vector<std::vector<PlainNumber>> numbers;
      for (std::size_t i = 0; i < samples_.size(); ++i) numbers.push_back({*number_of(tensor_in(i))});
      symbolic.number = fit_number(numbers, 0);
      known = symbolic.number.has_value();
    }
    if (!known)
      return fmt::format("constant %{} of the graph has no simple expression in the sizes",
                         index_of(first.value));
    first.symbolic = static_cast<SymbolicId>(table_->tensors.size());
    table_->tensors.push_back(std::move(symbolic));
    return {};
  }

  static bool is_known(const SymbolicGeometry& geometry) {
    const auto known = [](const auto& expression) { return expression.has_value(); };
    return std::all_of(geometry.sizes.begin(), geometry.sizes.end(), known) &&
           std::all_of(geometry.strides.begin(), geometry.strides.end(), known) && geometry.storage_offset;
  }

  std::string generalize_constant(std::size_t place) {
    const ConstantPlace& first = constants_[0][place];
    const auto example = numbers_of(first.operand->constant);
    if (!example) return {};
    std::vector<std::vector<PlainNumber>> samples;
    for (const auto& constants : constants_)
      samples.push_back(*numbers_of(constants[place].operand->constant));
    // Compared bit for bit.
    std::vector<std::int64_t> key{first.operand->constant.isList(), first.operand->constant.isTensor()};
    bool differs = false;
    for (const auto& numbers : samples) {
      differs |= !same_constant(constants_[0][place].operand->constant,
                                with_numbers(first.operand->constant, numbers));
      for (const PlainNumber& number : numbers) {
        key.push_back(static_cast<std::int64_t>(number.index()));
        key.push_back(number.index() == 0 ? std::get<0>(number)
                                          : std::bit_cast<std::int64_t>(std::get<1>(number)));
      }
    }
    if (!differs) return {};
    const auto [entry, is_new] =
        known_constants_.try_emplace(key, static_cast<SymbolicId>(table_->constants.size()));
    if (is_new) {
      SymbolicConstant symbolic{first.operand->constant, {}};
      for (std::size_t i = 0; i < example->size(); ++i) {
        const auto number = fit_number(samples, i);
        if (!number)
          return fmt::format("{} is {} at {} and {} at {}, for which there is no simple expression",
                             name_of_constant(samples_[0].joint.graph, first.node, first.argument),
                             to_text(*first.operand), sizes_text(0), to_text(*constants_[1][place].operand),
                             sizes_text(1));
        symbolic.numbers.push_back(*number);
      }
      table_->constants.push_back(std::move(symbolic));
    }
    first.operand->symbolic = entry->second;
    return {};
  }

  std::optional<NumberOrSize> fit_number(const std::vector<std::vector<PlainNumber>>& samples,
                                         std::size_t i) {
    if (std::holds_alternative<std::int64_t>(samples[0][i])) {
      std::vector<std::int64_t> values;
      for (const auto& numbers : samples) values.push_back(std::get<std::int64_t>(numbers[i]));
      if (auto size = fitter_.fit(values)) return NumberOrSize(std::move(*size));
      return std::nullopt;
    }
    std::vector<double> values;
    for (const auto& numbers : samples) values.push_back(std::get<double>(numbers[i]));
    const bool fixed = std::all_of(values.begin(), values.end(), [&](double value) {
      return std::bit_cast<std::uint64_t>(value) == std::bit_cast<std::uint64_t>(values[0]);
    });
    if (fixed)
      return NumberOrSize(
          NumberExpression{NumberExpression::Form::Multiple, values[0], SizeExpression::constant(1)});
    if (auto number = fitter_.fit(values)) return NumberOrSize(std::move(*number));
    return std::nullopt;
  }

  void mark_dynamic_dims(OutputInfo& output) const {
    output.dynamic_dims.clear();
    if (output.geometry.symbolic == kNotSymbolic) return;
    const SymbolicGeometry& symbolic = table_->geometries[static_cast<std::size_t>(output.geometry.symbolic)];
    for (std::size_t dim = 0; dim < symbolic.sizes.size(); ++dim)
      if (!symbolic.sizes[dim]->is_constant()) output.dynamic_dims.push_back(dim);
  }

  std::string sizes_text(std::size_t sample) const {
    std::string text;
    for (std::size_t i = 0; i < points_[sample].size(); ++i)
      text += fmt::format("{}{} = {}", i > 0 ? ", " : "", fitter_.symbols().names()[i], points_[sample][i]);
    return text;
  }

  std::vector<FunctionCapture>& samples_;
  const std::vector<SymbolValues>& points_;
  SizeFitter fitter_;
  std::vector<std::vector<GeometryPlace>> geometries_;  // by sample
  std::vector<std::vector<ConstantPlace>> constants_;
  std::shared_ptr<SymbolicTable> table_ = std::make_shared<SymbolicTable>();
  std::map<std::vector<std::vector<std::int64_t>>, SymbolicId> known_geometries_;
  std::map<std::vector<std::int64_t>, SymbolicId> known_constants_;
};

// Strides of dims of size 1, and of empty tensors, are ignored.
bool equivalent_layout(const LayoutInCall& a, const Geometry& b) {
  if (a.sizes != at::IntArrayRef(b.sizes)) return false;
  if (b.numel() == 0) return true;
  for (std::size_t dim = 0; dim < b.sizes.size(); ++dim)
    if (b.sizes[dim] != 1 && a.strides[dim] != b.strides[dim]) return false;
  return true;
}

// Finds an input with a dynamic dim that shares memory with another one.
std::optional<std::string> shared_memory(const Values& inputs, const std::vector<DynamicSymbol>& symbols,
                                         const Convention& convention) {
  for (const DynamicSymbol& symbol : symbols)
    for (const DynamicSymbol::Place& place : symbol.places) {
      const at::Tensor& tensor = inputs[place.input].toTensor();
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (!inputs[i].isTensor() || !inputs[i].toTensor().defined()) continue;
        const at::Tensor& other = inputs[i].toTensor();
        if (!other.is_same(tensor) && other.has_storage() && tensor.has_storage() &&
            other.is_alias_of(tensor))
          return fmt::format("{} has a dynamic dim and shares memory with {}",
                             convention.name_of(place.input), convention.name_of(i));
      }
    }
  return std::nullopt;
}

}  // namespace

Generalized capture_for_all_sizes(const Function& function, const Values& inputs,
                                  const Convention& convention, std::vector<DynamicSymbol> symbols) {
  if (const auto shared = shared_memory(inputs, symbols, convention)) return {{}, *shared};
  // A subclass has sizes of its own in addition to those of its inner tensors.
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].isTensor() && inputs[i].toTensor().defined() && is_wrapper(inputs[i].toTensor()))
      return {{},
              fmt::format("{} is a tensor of kind {}", convention.name_of(i),
                          payload_of(inputs[i].toTensor())->kind())};
  const std::vector<SymbolValues> candidates = sample_sizes(inputs, symbols, sizes_of(symbols, inputs));
  std::vector<std::string> names;
  for (const DynamicSymbol& symbol : symbols) names.push_back(symbol.name);
  if (candidates.size() < 2)
    return {
        {},
        fmt::format("the ranges of {} allow fewer than two sizes larger than 1 other than those of this call",
                    fmt::join(names, ", "))};
  const SymbolicTable only_names{SymbolSet(names), {}, {}};
  const std::size_t enough = 2 * symbols.size() + 3;  // points to fit expressions to
  std::vector<SymbolValues> points;
  std::vector<FunctionCapture> samples;
  std::string thrown;
  for (const SymbolValues& point : candidates) {
    if (points.size() == enough) break;
    try {
      samples.push_back(capture_function(function, inputs_at(inputs, symbols, point), convention));
    } catch (const std::exception& error) {
      // The function may not accept all sizes: only even ones, or those its tables cover.
      const std::string message = error.what();
      if (thrown.empty())
        thrown = fmt::format("at {} it throws: {}", only_names.text_of(point),
                             message.substr(0, message.find('\n')));
      continue;
    }
    if (samples.back().joint.subclasses)
      return {{}, "one of its results or their gradients is a tensor subclass"};
    points.push_back(point);
    if (const std::string difference = StructureComparison(samples[0], samples.back()).run();
        !difference.empty())
      return {{},
              fmt::format("it behaves differently at {} than at {}: {}", only_names.text_of(point),
                          only_names.text_of(points[0]), difference)};
  }
  if (points.size() < std::min<std::size_t>(symbols.size() + 2, candidates.size())) return {{}, thrown};
  Generalization generalization(samples, names, points);
  if (std::string refused = generalization.run(); !refused.empty()) return {{}, std::move(refused)};
  samples[0].symbols = std::move(symbols);
  return {std::move(samples[0]), {}};
}

std::string difference_at(const FunctionCapture& dynamic, const FunctionCapture& fixed,
                          const BoundSizes& sizes) {
  if (std::string difference = StructureComparison(dynamic, fixed).run(); !difference.empty())
    return difference;
  std::vector<const Geometry*> geometries;
  std::vector<const Operand*> constants;
  for_each_place(
      fixed, [&](const Geometry& geometry, Role, std::size_t) { geometries.push_back(&geometry); },
      [&](const Operand& operand, std::size_t, std::size_t) { constants.push_back(&operand); });
  for (std::size_t i = 0; i < dynamic.joint.graph.constants.size(); ++i) {
    const ConstantTensor& constant = dynamic.joint.graph.constants[i];
    const at::Tensor& expected = constant.symbolic == kNotSymbolic
                                     ? constant.tensor
                                     : sizes.tensors[static_cast<std::size_t>(constant.symbolic)];
    if (!same_found_tensor(expected, fixed.joint.graph.constants[i].tensor))
      return fmt::format("constant %{} of the graph differs", index_of(constant.value));
  }
  const SymbolicTable* table = dynamic.joint.graph.table.get();
  std::string difference;
  std::size_t geometry_number = 0, constant_number = 0;
  for_each_place(
      dynamic,
      [&](const Geometry& geometry, Role role, std::size_t number) {
        const Geometry& actual = *geometries[geometry_number++];
        // The guard has compared inputs; values inside follow from the operators and their arguments.
        if (!difference.empty() || role == Role::Input || role == Role::Inner) return;
        const LayoutInCall layout = layout_in_call(geometry, &sizes);
        const bool is_made_by_call =
            role == Role::WrittenInput ||
            (role == Role::Output && !(is_fresh(dynamic.meta.outputs[number].kind) &&
                                       is_fresh(dynamic.user_meta().outputs[number].kind)));
        const bool same = equivalent_layout(layout, actual) &&
                          (!is_made_by_call || (layout.strides == at::IntArrayRef(actual.strides) &&
                                                layout.storage_offset == actual.storage_offset));
        if (!same)
          difference = fmt::format("{} is {}, expected {}", name_of_geometry(role, number), to_text(actual),
                                   to_text(geometry, table));
      },
      [&](const Operand& operand, std::size_t node, std::size_t argument) {
        const Operand& actual = *constants[constant_number++];
        if (!difference.empty()) return;
        const c10::IValue& expected = operand.symbolic == kNotSymbolic
                                          ? operand.constant
                                          : sizes.constants[static_cast<std::size_t>(operand.symbolic)];
        if (!same_constant(expected, actual.constant))
          difference =
              fmt::format("{} is {}, expected {}", name_of_constant(dynamic.joint.graph, node, argument),
                          to_text(actual), to_text(operand, table));
      });
  return difference;
}

}  // namespace penstock::graph
