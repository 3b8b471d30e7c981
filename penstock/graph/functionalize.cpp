#include "penstock/graph/functionalize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/errors.h"
#include "penstock/graph/shape_run.h"
#include "penstock/torch/fake.h"
#include "penstock/torch/operator_traits.h"

namespace penstock::graph {
namespace {

using c10::IValue;

// The elements of a storage that a tensor reaches: [first, end).
struct Reach {
  std::int64_t first = 0, end = 0;
};

Reach reach_of(const Geometry& geometry) {
  Reach reach{geometry.storage_offset, geometry.storage_offset};
  if (geometry.numel() == 0) return reach;
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i) reach.end += (geometry.sizes[i] - 1) * geometry.strides[i];
  ++reach.end;
  return reach;
}

bool same_layout(const Geometry& a, const Geometry& b) { return a.sizes == b.sizes && a.strides == b.strides; }

class Functionalizer {
 public:
  explicit Functionalizer(const Graph& from)
      : from_(from), memories_(static_cast<std::size_t>(from.storages)), values_(from.values.size()) {
    find_writes();
  }

  Graph run() {
    for (const Placeholder& input : from_.inputs) to_.inputs.push_back({define(input.value, to_.new_storage()), input.name});
    for (const ConstantTensor& constant : from_.constants) {
      if (memories_[index_of(from_[constant.value].storage)].written)
        throw StateError(fmt::format("graph: the captured function writes a tensor that it did not get as an input ({} elements); hand the "
                                     "tensor over as an input",
                                     constant.tensor.numel()));
      to_.constants.push_back({define(constant.value, to_.new_storage()), constant.tensor});
    }
    for (const Node& node : from_.nodes) translate(node);
    for (const Operand& output : from_.outputs) to_.outputs.push_back(translate(output));
    verify(to_);
    return std::move(to_);
  }

 private:
  // One storage of the graph with writes.
  struct Memory {
    bool written = false;
    bool flat = false;              // the root is not a dense tensor from the beginning of its memory on that contains all others
    ValueId root = kNoValue;        // the first value of this memory
    ValueId current = kNoValue;     // in the new graph: what the memory holds now, laid out like the root, or flat from `first` on
    std::int64_t first = 0;
    Reach reach;                    // of all its values
    std::uint32_t version = 0;
  };
  // A value of the graph with writes, in the new one.
  struct Translated {
    ValueId value = kNoValue;
    std::uint32_t version = 0;      // of its memory
  };

  Memory& memory_of(ValueId value) { return memories_[index_of(from_[value].storage)]; }

  void find_writes() {
    const auto extend = [&](ValueId value) {
      Memory& memory = memory_of(value);
      const Reach reach = reach_of(from_[value].geometry);
      if (memory.root == kNoValue) {
        memory.root = value;
        memory.reach = reach;
      } else if (reach.end > reach.first) {
        memory.reach.first = std::min(memory.reach.first, reach.first);
        memory.reach.end = std::max(memory.reach.end, reach.end);
      }
    };
    for (const Placeholder& input : from_.inputs) extend(input.value);
    for (const ConstantTensor& constant : from_.constants) extend(constant.value);
    for (const Node& node : from_.nodes) {
      for (const std::size_t argument : written_arguments(node))
        for (const ValueId value : node.arguments[argument].values)
          if (value != kNoValue) memory_of(value).written = true;
      for_each_value(node.results, extend);
    }
    for (Memory& memory : memories_) {
      if (memory.root == kNoValue || !memory.written) continue;
      const Geometry& root = from_[memory.root].geometry;
      memory.flat = root.storage_offset != 0 || memory.reach.first != 0 || memory.reach.end != root.numel() ||
                    reach_of(root).end != root.numel();
    }
  }

  ValueId define(ValueId old, StorageId storage) {
    const ValueId value = to_.new_value(from_[old].geometry, storage);
    adopt(old, value);
    return value;
  }

  // A value of the old graph is `value` of the new one.
  void adopt(ValueId old, ValueId value) {
    Memory& memory = memory_of(old);
    values_[index_of(old)] = {value, memory.version};
    if (memory.root == old) memory.current = value;
  }

  ValueId emit(const c10::OperatorHandle& op, std::vector<Operand> arguments, Geometry geometry, c10::optional<StorageId> storage = c10::nullopt) {
    const ValueId value = to_.new_value(std::move(geometry), storage ? *storage : to_.new_storage());
    to_.nodes.push_back({op, std::move(arguments), {Operand::of(value)}, phase_, grad_enabled_});
    return value;
  }

  static Operand list_of(c10::ArrayRef<std::int64_t> items) { return Operand::of(IValue(items.vec())); }

  static c10::OperatorHandle find(const char* name, const char* overload = "") {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  }

  // Where a value lies in what `current` of its memory is.
  Geometry place_of(ValueId old, const Memory& memory) const {
    Geometry place = from_[old].geometry;
    place.storage_offset -= memory.first;
    return place;
  }

  ValueId emit_as_strided(ValueId of, Geometry place) {
    static const c10::OperatorHandle op = find("aten::as_strided");
    std::vector<Operand> arguments{Operand::of(of), list_of(place.sizes), list_of(place.strides), Operand::of(IValue(place.storage_offset))};
    return emit(op, std::move(arguments), std::move(place), to_[of].storage);
  }

  // A value of the old graph as it is now.
  ValueId now(ValueId old) {
    Memory& memory = memory_of(old);
    Translated& translated = values_[index_of(old)];
    if (translated.version == memory.version) return translated.value;
    translated.version = memory.version;
    const Geometry& geometry = from_[old].geometry;
    if (!memory.flat && same_layout(geometry, from_[memory.root].geometry) && geometry.dtype == from_[memory.root].geometry.dtype)
      return translated.value = memory.current;
    if (geometry.dtype != from_[memory.root].geometry.dtype)
      throw NotImplemented("graph: memory is written and looked at as another dtype (view with a dtype); take the write or the view out of "
                           "the captured function");
    return translated.value = emit_as_strided(memory.current, place_of(old, memory));
  }

  Operand translate(const Operand& operand) {
    Operand result = operand;
    for (ValueId& value : result.values)
      if (value != kNoValue) value = now(value);
    return result;
  }

  std::vector<Operand> translate(const std::vector<Operand>& operands) {
    std::vector<Operand> result;
    result.reserve(operands.size());
    for (const Operand& operand : operands) result.push_back(translate(operand));
    return result;
  }

  void translate(const Node& node) {
    phase_ = node.phase;
    grad_enabled_ = node.grad_enabled;
    const std::vector<std::size_t> written = written_arguments(node);
    if (!written.empty()) return translate_write(node, written);
    copy(node);
  }

  // A node that writes nothing.
  void copy(const Node& node) {
    const OperatorTraits& traits = traits_of(node.op);
    if (traits.pure_view && node.op.operator_name().name == "aten::as_strided" && memory_of(node.results[0].values[0]).flat &&
        memory_of(node.results[0].values[0]).version > 0) {
      // Its offset counts from the beginning of the memory that the old graph had.
      const ValueId result = node.results[0].values[0];
      Memory& memory = memory_of(result);
      values_[index_of(result)] = {emit_as_strided(memory.current, place_of(result, memory)), memory.version};
      return;
    }
    Node copied{node.op, translate(node.arguments), node.results, node.phase, node.grad_enabled};
    for (std::size_t i = 0; i < copied.results.size(); ++i) {
      const ReturnAlias& alias = traits.returns[i];
      c10::optional<StorageId> storage;
      if (alias.kind == ReturnAlias::Kind::View) {
        const Operand& viewed = copied.arguments[static_cast<std::size_t>(alias.argument)];
        if (viewed.value() != kNoValue) storage = to_[viewed.value()].storage;
      }
      for (ValueId& value : copied.results[i].values)
        if (value != kNoValue) value = define(value, storage ? *storage : to_.new_storage());
    }
    to_.nodes.push_back(std::move(copied));
  }

  void translate_write(const Node& node, const std::vector<std::size_t>& written) {
    const OperatorTraits& traits = traits_of(node.op);
    const std::string& name = node.op.operator_name().name;
    const auto sibling = functional_sibling(node.op);
    if (!sibling || name == "aten::set_" || name == "aten::resize_" || name == "aten::resize_as_")
      throw NotImplemented(fmt::format("graph: {} writes memory and has no functional sibling; take it out of the captured function",
                                       traits.name));
    std::vector<Operand> arguments;
    for (std::size_t i = 0; i < node.arguments.size(); ++i) {
      const bool only_receives = traits.arguments[i].written && node.op.schema().arguments()[i].kwarg_only();
      if (!only_receives) arguments.push_back(translate(node.arguments[i]));
    }
    if (traits_of(*sibling).pure_view) return translate_metadata_write(node, *sibling, std::move(arguments));

    const Stack shapes = run_in_shape(to_, *sibling, arguments);
    Node pure{*sibling, std::move(arguments), {}, node.phase, node.grad_enabled};
    for (const IValue& shape : shapes) pure.results.push_back(new_results(shape));
    const std::vector<Operand> results = pure.results;
    to_.nodes.push_back(std::move(pure));
    // First what the operator itself returns besides what it writes, then what it writes in the order of the arguments: one result each,
    // or one list each.
    std::size_t next = 0;
    for (std::size_t i = 0; i < node.results.size() && next < results.size(); ++i) {
      if (traits.returns[i].kind != ReturnAlias::Kind::Fresh) continue;
      for (std::size_t j = 0; j < node.results[i].values.size(); ++j)
        if (const ValueId value = node.results[i].values[j]; value != kNoValue) adopt(value, results[next].values.at(j));
      ++next;
    }
    if (results.size() - next != written.size())
      throw NotImplemented(fmt::format("graph: {} writes {} arguments, its functional sibling returns {} results; take it out of the "
                                       "captured function",
                                       traits.name, written.size(), results.size() - next));
    for (std::size_t i = 0; i < written.size(); ++i) {
      const Operand& targets = node.arguments[written[i]];
      const Operand& stored = results[next + i];
      PENSTOCK_INVARIANT(targets.values.size() == stored.values.size(), "a functional sibling returned another number of tensors");
      for (std::size_t j = 0; j < targets.values.size(); ++j)
        if (targets.values[j] != kNoValue) store(node, targets.values[j], stored.values[j]);
    }
    // An out= operator may have given its target another shape.
    for (std::size_t i = 0; i < node.results.size(); ++i)
      for (const ValueId value : node.results[i].values)
        if (value != kNoValue && values_[index_of(value)].value == kNoValue)
          throw NotImplemented(fmt::format("graph: {} gives what it writes another shape; hand it a tensor of the right one", traits.name));
  }

  Operand new_results(const IValue& shape) {
    if (shape.isTensor()) return Operand::of(shape.toTensor().defined() ? to_.new_value(geometry_of(shape.toTensor())) : kNoValue);
    Operand operand;
    operand.kind = Operand::Kind::TensorList;
    for (const IValue& element : shape.toListRef()) operand.values.push_back(to_.new_value(geometry_of(element.toTensor())));
    return operand;
  }

  // `value` is written over `target`.
  void store(const Node& node, ValueId target, ValueId value) {
    static const c10::OperatorHandle to_copy = find("aten::_to_copy"), scatter = find("aten::as_strided_scatter"), clone = find("aten::clone"),
                                     expand = find("aten::expand");
    const Geometry& wanted = from_[target].geometry;
    if (to_[value].geometry.dtype != wanted.dtype) {
      Geometry converted = to_[value].geometry;
      converted.dtype = wanted.dtype;
      value = emit(to_copy,
                   {Operand::of(value), Operand::of(IValue(static_cast<std::int64_t>(wanted.dtype))), Operand::of(IValue()), Operand::of(IValue()),
                    Operand::of(IValue()), Operand::of(IValue(false)), Operand::of(IValue())},
                   std::move(converted));
    }
    if (to_[value].geometry.sizes != wanted.sizes) {
      if (to_[value].geometry.sizes.size() > wanted.sizes.size())
        throw NotImplemented(fmt::format("graph: {} writes a result of another shape than its target", c10::toString(node.op.operator_name())));
      Geometry expanded = geometry_of(make_fake_strided(to_[value].geometry.sizes, to_[value].geometry.strides).expand(wanted.sizes));
      expanded.dtype = wanted.dtype;
      expanded.device = wanted.device;
      value = emit(expand, {Operand::of(value), list_of(wanted.sizes), Operand::of(IValue(false))}, std::move(expanded), to_[value].storage);
    }
    Memory& memory = memory_of(target);
    const Geometry& root = from_[memory.root].geometry;
    if (!memory.flat && wanted.dtype == root.dtype && same_layout(wanted, root) && same_layout(to_[value].geometry, root)) {
      memory.current = value;
    } else {
      if (wanted.dtype != root.dtype)
        throw NotImplemented(fmt::format("graph: {} writes memory through a view of another dtype", c10::toString(node.op.operator_name())));
      if (memory.flat && memory.version == 0) {
        // All that is seen of the memory, in a row.
        Geometry row;
        row.sizes = {memory.reach.end - memory.reach.first};
        row.strides = {1};
        row.storage_offset = memory.reach.first;
        row.dtype = root.dtype;
        row.device = root.device;
        const ValueId seen = emit_as_strided(values_[index_of(memory.root)].value, row);
        row.storage_offset = 0;
        memory.current = emit(clone, {Operand::of(seen), Operand::of(IValue())}, row);
        memory.first = memory.reach.first;
      }
      const Geometry place = place_of(target, memory);
      memory.current = emit(scatter,
                            {Operand::of(memory.current), Operand::of(value), list_of(place.sizes), list_of(place.strides),
                             Operand::of(IValue(place.storage_offset))},
                            to_[memory.current].geometry);
    }
    ++memory.version;
  }

  // transpose_ and its like: another look at the same memory.
  void translate_metadata_write(const Node& node, const c10::OperatorHandle& sibling, std::vector<Operand> arguments) {
    const ValueId before = node.arguments[0].value(), after = node.results[0].value();
    if (after == before) return;
    if (Memory& memory = memory_of(after); memory.flat && memory.version > 0 && sibling.operator_name().name == "aten::as_strided") {
      values_[index_of(after)] = {emit_as_strided(memory.current, place_of(after, memory)), memory.version};
      return;
    }
    const StorageId storage = to_[arguments[0].value()].storage;
    const ValueId value = emit(sibling, std::move(arguments), from_[after].geometry, storage);
    values_[index_of(after)] = {value, memory_of(after).version};
  }

  const Graph& from_;
  Graph to_;
  std::vector<Memory> memories_;
  std::vector<Translated> values_;
  Phase phase_ = Phase::Forward;
  bool grad_enabled_ = true;
};

}  // namespace

Graph functionalize(const Graph& graph) { return Functionalizer(graph).run(); }

Graph functionalize(Graph&& graph) {
  if (count_writes(graph) > 0) return Functionalizer(graph).run();
  return std::move(graph);
}

}  // namespace penstock::graph
