#include "penstock/graph/ir/graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>

#include "penstock/base/describe.h"
#include "penstock/compile_options.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/state_operator.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

// Operators that write arguments without declaring it in their schema, if their argument `training` is set.
struct HiddenWrites {
  std::string_view op;
  std::array<std::size_t, 2> written;
  std::size_t training;
};
constexpr std::array kHiddenWrites = {
    HiddenWrites{"aten::native_batch_norm", {3, 4}, 5},
    HiddenWrites{"aten::cudnn_batch_norm", {3, 4}, 5},
    HiddenWrites{"aten::miopen_batch_norm", {3, 4}, 5},
};

const HiddenWrites* hidden_writes(const Node& node) {
  const std::string& name = node.op.operator_name().name;
  if (name.size() < 15 || !name.ends_with("_batch_norm")) return nullptr;
  for (const HiddenWrites& entry : kHiddenWrites)
    if (name == entry.op && node.op.operator_name().overload_name.empty()) return &entry;
  return nullptr;
}

bool is_true(const Operand& operand) {
  return operand.kind == Operand::Kind::Constant && operand.constant.isBool() && operand.constant.toBool();
}

// The collectives of this library, and the wait for one.
constexpr std::string_view kCollectives[] = {"penstock::all_reduce",
                                             "penstock::all_gather_into_tensor",
                                             "penstock::reduce_scatter_tensor",
                                             "penstock::all_to_all_single",
                                             "penstock::broadcast",
                                             "penstock::all_gather_flat",
                                             "penstock::reduce_scatter_flat",
                                             "penstock::wait_tensor"};

// Operators with side effects by name, without overloads, and their effects. Includes the collectives of this
// library from the start, and the wait for a collective whose result is unused, because it releases what the
// collective holds.
struct SideEffects {
  SideEffects() {
    for (const std::string_view name : kCollectives) effects.emplace(name, kOrdered);
  }

  static constexpr const char* kOrdered = "ordered";
  std::mutex mutex;
  std::map<std::string, std::string, std::less<>> effects;
  static SideEffects& instance() {
    static SideEffects& effects = *new SideEffects;
    return effects;
  }
};

// Whether an operator draws random numbers: those with LibTorch's tag, and those that take a generator, since
// not all have the tag in all versions.
bool draws_random_numbers(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return true;
  // Draws from a state that it is given.
  if (operator_inside(op)) return false;
  for (const c10::Argument& argument : op.schema().arguments()) {
    c10::TypePtr type = argument.type();
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) return true;
  }
  return false;
}

// The position of the probability with which an operator of attention drops; std::nullopt for others. All
// fused ones have the tag, whatever the probability is.
std::optional<std::size_t> place_of_dropout(const c10::OperatorHandle& op) {
  if (!op.operator_name().name.starts_with("aten::")) return std::nullopt;
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "dropout_p") return i;
  return std::nullopt;
}

// Whether an operator of attention drops nothing in any call of the graph: then it draws nothing.
bool drops_nothing(const Node& node) {
  const std::optional<std::size_t> place = place_of_dropout(node.op);
  if (!place || *place >= node.arguments.size()) return false;
  const Operand& dropout = node.arguments[*place];
  return dropout.kind == Operand::Kind::Constant && dropout.symbolic == kNotSymbolic &&
         dropout.constant.isDouble() && dropout.constant.toDouble() == 0;
}

[[noreturn]] void malformed(const Graph& graph, std::size_t node, const std::string& why) {
  throw InvariantError(fmt::format("graph: node {} is malformed: {}; the node is {}", node, why,
                                   to_text(graph, graph.nodes[node])));
}

class Verifier {
 public:
  explicit Verifier(const Graph& graph) : graph_(graph), defined_(graph.values.size(), 0) {}

  void run() {
    for (const Placeholder& input : graph_.inputs)
      define(input.value, [&] { return fmt::format("input '{}'", input.name); });
    const auto a_constant = [] { return std::string("a constant"); };
    for (const ConstantTensor& constant : graph_.constants) {
      define(constant.value, a_constant);
      PENSTOCK_INVARIANT(constant.tensor.defined(), "a constant of the graph has no tensor");
      check_symbols(constant.symbolic, &SymbolicTable::tensors, a_constant);
    }
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) check(i);
    for (std::size_t i = 0; i < graph_.outputs.size(); ++i)
      for (const ValueId value : graph_.outputs[i].values)
        if (value != kNoValue && !is_defined(value))
          throw InvariantError(
              fmt::format("graph: output {} is %{}, which no node defines", i, index_of(value)));
  }

 private:
  bool in_range(ValueId value) const {
    return static_cast<std::int32_t>(value) >= 0 && index_of(value) < defined_.size();
  }
  bool is_defined(ValueId value) const { return in_range(value) && defined_[index_of(value)]; }
  static auto of_node(std::size_t position) {
    return [position] { return fmt::format("node {}", position); };
  }

  // `who()` is the text of what is checked, for messages.
  template <class Entries, class Who>
  void check_symbols(SymbolicId symbolic, Entries SymbolicTable::*entries, const Who& who) const {
    if (symbolic == kNotSymbolic) return;
    const std::size_t known = graph_.table ? (*graph_.table.*entries).size() : 0;
    if (symbolic < 0 || static_cast<std::size_t>(symbolic) >= known)
      throw InvariantError(
          fmt::format("graph: {} refers to entry {} of the symbolic table, which has {} entries", who(),
                      symbolic, known));
  }

  template <class Who>
  void define(ValueId value, const Who& who) {
    if (!in_range(value)) throw InvariantError(fmt::format("graph: {} has no value", who()));
    if (defined_[index_of(value)])
      throw InvariantError(fmt::format("graph: {} defines %{} again", who(), index_of(value)));
    if (index_of(graph_[value].storage) >= static_cast<std::size_t>(graph_.storages))
      throw InvariantError(fmt::format("graph: %{} is in storage {}, but there are only {}", index_of(value),
                                       index_of(graph_[value].storage), graph_.storages));
    check_symbols(graph_[value].geometry.symbolic, &SymbolicTable::geometries, who);
    defined_[index_of(value)] = 1;
  }

  void check(std::size_t position) {
    const Node& node = graph_.nodes[position];
    const OperatorTraits& traits = traits_of(node.op);
    if (node.arguments.size() != traits.arguments.size())
      malformed(
          graph_, position,
          fmt::format("it has {} arguments, the schema {}", node.arguments.size(), traits.arguments.size()));
    if (node.results.size() != traits.returns.size())
      malformed(graph_, position,
                fmt::format("it has {} results, the schema {}", node.results.size(), traits.returns.size()));
    for_each_value(node.arguments, [&](ValueId value) {
      if (!is_defined(value))
        malformed(graph_, position,
                  fmt::format("%{} is used before it is defined", static_cast<std::int32_t>(value)));
    });
    for (const Operand& operand : node.arguments)
      if (operand.symbolic != kNotSymbolic)
        check_symbols(operand.symbolic, &SymbolicTable::constants, of_node(position));
    for (std::size_t i = 0; i < node.results.size(); ++i) check_result(position, node, traits.returns[i], i);
  }

  void check_result(std::size_t position, const Node& node, const ReturnAlias& alias, std::size_t result) {
    const Operand* source = alias.kind == ReturnAlias::Kind::Fresh
                                ? nullptr
                                : &node.arguments[static_cast<std::size_t>(alias.argument)];
    const Operand& operand = node.results[result];
    for (std::size_t i = 0; i < operand.values.size(); ++i) {
      const ValueId value = operand.values[i];
      if (value == kNoValue) continue;
      if (source && alias.kind == ReturnAlias::Kind::Same && i < source->values.size() &&
          source->values[i] == value)
        continue;
      define(value, of_node(position));
      if (source && source->kind == Operand::Kind::Tensor && source->values[0] != kNoValue &&
          graph_[source->values[0]].storage != graph_[value].storage)
        malformed(
            graph_, position,
            fmt::format("%{} should share the memory of %{}", index_of(value), index_of(source->values[0])));
    }
  }

  const Graph& graph_;
  std::vector<char> defined_;
};

}  // namespace

std::int64_t Geometry::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

Geometry geometry_of(const at::Tensor& tensor) {
  Geometry geometry;
  geometry.sizes.append(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.append(tensor.strides().begin(), tensor.strides().end());
  geometry.storage_offset = tensor.storage_offset();
  geometry.dtype = tensor.scalar_type();
  geometry.device = tensor.device();
  geometry.conjugated = tensor.is_conj();
  geometry.negated = tensor.is_neg();
  return geometry;
}

bool has_geometry(const at::Tensor& tensor, const Geometry& geometry) {
  return tensor.sizes() == at::IntArrayRef(geometry.sizes) &&
         tensor.strides() == at::IntArrayRef(geometry.strides) &&
         tensor.storage_offset() == geometry.storage_offset && tensor.scalar_type() == geometry.dtype &&
         tensor.device() == geometry.device && tensor.is_conj() == geometry.conjugated &&
         tensor.is_neg() == geometry.negated;
}

bool overlaps_itself(const Geometry& geometry) {
  // From the innermost dim outwards, each stride must exceed the extent of the dims inside.
  c10::SmallVector<std::pair<std::int64_t, std::int64_t>, 5> dims;  // stride, size
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i) {
    if (geometry.sizes[i] == 0) return false;
    if (geometry.sizes[i] > 1) dims.emplace_back(geometry.strides[i], geometry.sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 0;
  bool nested = true;
  for (const auto& [stride, size] : dims) {
    if (stride == 0) return true;
    nested &= stride > reach;
    reach += stride * (size - 1);
  }
  if (nested) return false;
  constexpr std::int64_t kExactLimit = 1 << 20;
  if (geometry.numel() > kExactLimit || reach > 64 * kExactLimit || geometry.numel() > reach + 1) return true;
  std::vector<std::int64_t> places{0};
  for (const auto& [stride, size] : dims) {
    const std::size_t inside = places.size();
    for (std::int64_t i = 1; i < size; ++i)
      for (std::size_t j = 0; j < inside; ++j) places.push_back(places[j] + i * stride);
  }
  std::sort(places.begin(), places.end());
  return std::adjacent_find(places.begin(), places.end()) != places.end();
}

ValueId Graph::new_value(Geometry geometry, StorageId storage) {
  Value& value = values.emplace_back();
  value.geometry = std::move(geometry);
  value.storage = storage;
  return ValueId{static_cast<std::int32_t>(values.size() - 1)};
}

std::vector<std::size_t> written_arguments(const Node& node) {
  std::vector<std::size_t> written;
  const OperatorTraits& traits = traits_of(node.op);
  if (traits.mutates)
    for (std::size_t i = 0; i < traits.arguments.size(); ++i)
      if (traits.arguments[i].written) written.push_back(i);
  if (const HiddenWrites* hidden = hidden_writes(node); hidden && is_true(node.arguments[hidden->training]))
    for (const std::size_t argument : hidden->written)
      if (node.arguments[argument].value() != kNoValue) written.push_back(argument);
  return written;
}

bool writes(const Node& node) { return traits_of(node.op).mutates || !written_arguments(node).empty(); }

bool has_side_effect(const Node& node) {
  const OperatorTraits& traits = traits_of(node.op);
  if (traits.returns.empty()) return !traits.mutates;
  const std::string& name = node.op.operator_name().name;
  if (name.starts_with("aten::")) return false;
  if (name.starts_with("penstock_effect::")) return true;
  SideEffects& effects = SideEffects::instance();
  const std::lock_guard lock(effects.mutex);
  return effects.effects.contains(name);
}

std::string effect_of(const Node& node) {
  SideEffects& effects = SideEffects::instance();
  const std::lock_guard lock(effects.mutex);
  const auto found = effects.effects.find(node.op.operator_name().name);
  return found == effects.effects.end() ? SideEffects::kOrdered : found->second;
}

void register_side_effect(const std::string& op, const std::string& effect) {
  if (effect.empty() || effect.find_first_of("[]\n") != std::string::npos)
    throw ValueError(describe(fmt::format("graph: the effect of {}", op), "'" + effect + "'",
                              "a name without brackets", "leave it out for the usual one"));
  SideEffects& effects = SideEffects::instance();
  const std::lock_guard lock(effects.mutex);
  effects.effects.insert_or_assign(op, effect);
}

bool is_random(const Node& node) {
  enum class Known : std::uint8_t { No, Random, RandomWithDropout, Other };
  // By operator_index(). Each thread has its own: several passes ask about every node, without a lock.
  static thread_local std::vector<Known> known;
  const std::size_t index = operator_index(node.op);
  if (index >= known.size()) known.resize(index + 64, Known::No);
  if (known[index] == Known::No)
    known[index] = !draws_random_numbers(node.op) ? Known::Other
                   : place_of_dropout(node.op)    ? Known::RandomWithDropout
                                                  : Known::Random;
  return known[index] == Known::Random || (known[index] == Known::RandomWithDropout && !drops_nothing(node));
}

bool is_collective(const Node& node) {
  const std::string& name = node.op.operator_name().name;
  return name.starts_with("penstock::") &&
         std::find(std::begin(kCollectives), std::end(kCollectives), name) != std::end(kCollectives);
}

std::size_t count_writes(const Graph& graph) {
  return static_cast<std::size_t>(
      std::count_if(graph.nodes.begin(), graph.nodes.end(), [](const Node& node) { return writes(node); }));
}

void verify(const Graph& graph) { Verifier(graph).run(); }

std::size_t remove_dead_nodes(Graph& graph) {
  // A write is visible through any value of its storage that is used later, so liveness covers storages as
  // well as values.
  std::vector<char> value_lives(graph.values.size(), 0),
      storage_lives(static_cast<std::size_t>(graph.storages), 0);
  const auto use = [&](ValueId value) {
    value_lives[index_of(value)] = 1;
    storage_lives[index_of(graph[value].storage)] = 1;
  };
  for (const Placeholder& input : graph.inputs) storage_lives[index_of(graph[input.value].storage)] = 1;
  for (const ConstantTensor& constant : graph.constants)
    storage_lives[index_of(graph[constant.value].storage)] = 1;
  for_each_value(graph.outputs, use);
  std::vector<char> keep(graph.nodes.size(), 0);
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    const Node& node = graph.nodes[i];
    bool lives = must_run(node);
    for_each_value(node.results, [&](ValueId value) { lives |= value_lives[index_of(value)] != 0; });
    if (!lives)
      for (const std::size_t argument : written_arguments(node))
        for (const ValueId value : node.arguments[argument].values)
          lives |= value != kNoValue && storage_lives[index_of(graph[value].storage)] != 0;
    if (!lives) continue;
    keep[i] = 1;
    for_each_value(node.arguments, use);
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    if (keep[i]) {
      if (kept != i) graph.nodes[kept] = std::move(graph.nodes[i]);
      ++kept;
    }
  const std::size_t removed = graph.nodes.size() - kept;
  graph.nodes.erase(graph.nodes.begin() + static_cast<std::ptrdiff_t>(kept), graph.nodes.end());
  return removed;
}

}  // namespace penstock::graph
