#include "penstock/graph/ir/functionalize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/ir/shape_inference.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

using c10::IValue;

std::int64_t item_size(at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

// The bytes of a storage that a tensor can access: [first, end).
struct Reach {
  std::int64_t first = 0, end = 0;
};

Reach reach_of(const Geometry& geometry) {
  const std::int64_t item = item_size(geometry.dtype);
  Reach reach{geometry.storage_offset * item, geometry.storage_offset * item};
  if (geometry.numel() == 0) return reach;
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i)
    reach.end += (geometry.sizes[i] - 1) * geometry.strides[i] * item;
  reach.end += item;
  return reach;
}

// The element type of memory that is accessed as several dtypes. Integers, because copying them preserves
// every bit.
at::ScalarType cell_of_size(std::int64_t bytes) {
  switch (bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

bool same_layout(const Geometry& a, const Geometry& b) {
  return a.sizes == b.sizes && a.strides == b.strides;
}

// Dense, from the beginning of its memory, the last dim innermost.
bool is_row_major(const Geometry& geometry) {
  std::int64_t stride = 1;
  for (std::size_t i = geometry.sizes.size(); i-- > 0;) {
    if (geometry.strides[i] != stride) return false;
    stride *= std::max<std::int64_t>(geometry.sizes[i], 1);
  }
  return geometry.storage_offset == 0 && !geometry.conjugated && !geometry.negated;
}

// Operators that LibTorch computes by products of matrices.
bool is_matrix_product(const std::string& name) {
  return name == "aten::mm" || name == "aten::bmm" || name == "aten::addmm" || name == "aten::addmm_" ||
         name == "aten::baddbmm" || name == "aten::baddbmm_";
}

// Whether LibTorch computes a product into this memory by columns. One into rows is computed as the
// transpose, by exchanged factors, which may have other bits.
bool is_computed_by_columns(const Geometry& geometry) {
  if (geometry.sizes.size() < 2) return false;  // an out= of another shape, which is an error later
  const std::size_t last = geometry.sizes.size() - 1;
  const std::int64_t rows = geometry.sizes[last - 1], columns = geometry.sizes[last];
  if (rows < 2 || columns < 2) return false;
  return geometry.strides[last] != 1 || geometry.strides[last - 1] < columns;
}

class Functionalizer {
 public:
  Functionalizer(const Graph& from, std::size_t forward_outputs)
      : from_(from),
        forward_outputs_(forward_outputs),
        memories_(static_cast<std::size_t>(from.storages)),
        values_(from.values.size()) {
    find_writes();
  }

  Graph run() {
    for (const Placeholder& input : from_.inputs)
      to_.inputs.push_back({define(input.value, to_.new_storage()), input.name});
    for (const ConstantTensor& constant : from_.constants) {
      if (memories_[index_of(from_[constant.value].storage)].written)
        throw StateError(
            fmt::format("graph: the captured function writes a tensor that is not one of its inputs ({} "
                        "elements); pass the "
                        "tensor as an input",
                        constant.tensor.numel()));
      to_.constants.push_back({define(constant.value, to_.new_storage()), constant.tensor});
    }
    for (const Node& node : from_.nodes) {
      if (node.phase == Phase::Backward) return_forward();
      translate(node);
    }
    return_forward();
    for (std::size_t i = to_.outputs.size(); i < from_.outputs.size(); ++i)
      to_.outputs.push_back(translate(from_.outputs[i]));
    verify(to_);
    return std::move(to_);
  }

 private:
  // Emits the outputs of forward, before backward writes anything.
  void return_forward() {
    phase_ = Phase::Forward;
    while (to_.outputs.size() < forward_outputs_)
      to_.outputs.push_back(translate(from_.outputs[to_.outputs.size()]));
  }

  // One storage of the graph with writes. A flat one becomes a row when it is written: the raw memory,
  // without lazy conjugates and negatives.
  struct Memory {
    bool written = false;
    // The root is not a dense tensor that starts at the beginning of its memory, contains all other values
    // and has their dtype.
    bool flat = false;
    bool mixed = false;       // values are of several dtypes
    ValueId root = kNoValue;  // the first value of this memory
    // In the new graph: the current contents, laid out like the root, or a row from byte `first` on.
    ValueId current = kNoValue;
    std::int64_t first = 0;
    std::int64_t smallest = 0, largest = 0;  // bytes of an element, over all its values
    Reach reach;                             // of all its values
    std::uint32_t version = 0;
  };
  // A value of the graph with writes, in the new graph.
  struct Translated {
    ValueId value = kNoValue;
    std::uint32_t version = 0;  // of its memory
  };

  Memory& memory_of(ValueId value) { return memories_[index_of(from_[value].storage)]; }

  void find_writes() {
    const auto extend = [&](ValueId value) {
      Memory& memory = memory_of(value);
      const Reach reach = reach_of(from_[value].geometry);
      const Geometry& geometry = from_[value].geometry;
      const std::int64_t item = item_size(geometry.dtype);
      if (memory.root == kNoValue) {
        memory.root = value;
        memory.reach = reach;
        memory.smallest = memory.largest = item;
      } else if (reach.end > reach.first) {
        memory.reach.first = std::min(memory.reach.first, reach.first);
        memory.reach.end = std::max(memory.reach.end, reach.end);
      }
      memory.mixed |= geometry.dtype != from_[memory.root].geometry.dtype;
      memory.flat |= geometry.conjugated || geometry.negated;
      memory.smallest = std::min(memory.smallest, item);
      memory.largest = std::max(memory.largest, item);
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
      const std::int64_t dense = root.numel() * item_size(root.dtype);
      memory.flat |= memory.mixed || root.storage_offset != 0 || memory.reach.first != 0 ||
                     memory.reach.end != dense || reach_of(root).end != dense;
    }
  }

  ValueId define(ValueId old, StorageId storage) {
    const ValueId value = to_.new_value(from_[old].geometry, storage);
    adopt(old, value);
    return value;
  }

  // Records that a value of the old graph is `value` in the new one.
  void adopt(ValueId old, ValueId value) {
    Memory& memory = memory_of(old);
    values_[index_of(old)] = {value, memory.version};
    if (memory.root == old) memory.current = value;
  }

  ValueId emit(const c10::OperatorHandle& op, std::vector<Operand> arguments, Geometry geometry,
               c10::optional<StorageId> storage = c10::nullopt) {
    const ValueId value = to_.new_value(std::move(geometry), storage ? *storage : to_.new_storage());
    to_.nodes.push_back({op, std::move(arguments), {Operand::of(value)}, phase_, grad_enabled_});
    return value;
  }

  static Operand list_of(c10::ArrayRef<std::int64_t> items) { return Operand::of(IValue(items.vec())); }

  static c10::OperatorHandle find(const char* name, const char* overload = "") {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  }

  // The position of a value in the row of its memory, interpreted as a row of the value's dtype.
  Geometry place_of(ValueId old, const Memory& memory) const {
    Geometry place = from_[old].geometry;
    place.storage_offset -= memory.first / item_size(place.dtype);
    place.conjugated = place.negated = false;
    return place;
  }

  ValueId emit_as_strided(ValueId of, Geometry place) {
    static const c10::OperatorHandle op = find("aten::as_strided");
    std::vector<Operand> arguments{Operand::of(of), list_of(place.sizes), list_of(place.strides),
                                   Operand::of(IValue(place.storage_offset))};
    return emit(op, std::move(arguments), std::move(place), to_[of].storage);
  }

  // The same elements, or their conjugates and negatives, without copying.
  ValueId emit_bits(ValueId of, bool conjugate, bool negate) {
    static const c10::OperatorHandle conj = find("aten::_conj"), neg = find("aten::_neg_view");
    if (conjugate) {
      Geometry geometry = to_[of].geometry;
      geometry.conjugated = !geometry.conjugated;
      of = emit(conj, {Operand::of(of)}, std::move(geometry), to_[of].storage);
    }
    if (negate) {
      Geometry geometry = to_[of].geometry;
      geometry.negated = !geometry.negated;
      of = emit(neg, {Operand::of(of)}, std::move(geometry), to_[of].storage);
    }
    return of;
  }

  // Reinterprets a one-dim contiguous tensor as another dtype.
  ValueId emit_row_of(ValueId row, at::ScalarType dtype) {
    static const c10::OperatorHandle view = find("aten::view", "dtype");
    Geometry geometry = to_[row].geometry;
    if (geometry.dtype == dtype) return row;
    geometry.sizes[0] = geometry.sizes[0] * item_size(geometry.dtype) / item_size(dtype);
    geometry.dtype = dtype;
    return emit(view, {Operand::of(row), Operand::of(IValue(static_cast<std::int64_t>(dtype)))},
                std::move(geometry), to_[row].storage);
  }

  ValueId emit_view(ValueId of, c10::SmallVector<std::int64_t, 5> sizes) {
    static const c10::OperatorHandle view = find("aten::view");
    Geometry geometry = to_[of].geometry;
    geometry.sizes = std::move(sizes);
    geometry.strides.assign(geometry.sizes.size(), 1);
    for (std::size_t i = geometry.sizes.size(); i-- > 1;)
      geometry.strides[i - 1] = geometry.strides[i] * std::max<std::int64_t>(geometry.sizes[i], 1);
    std::vector<Operand> arguments{Operand::of(of), list_of(geometry.sizes)};
    return emit(view, std::move(arguments), std::move(geometry), to_[of].storage);
  }

  // The current contents of a value in a flat memory that was written.
  ValueId emit_read(ValueId old, const Memory& memory) {
    const Geometry& geometry = from_[old].geometry;
    const ValueId row = memory.mixed ? emit_row_of(memory.current, geometry.dtype) : memory.current;
    return emit_bits(emit_as_strided(row, place_of(old, memory)), geometry.conjugated, geometry.negated);
  }

  // Creates the row of a flat memory at its first write, covering all accessed bytes.
  void make_row(Memory& memory) {
    static const c10::OperatorHandle clone = find("aten::clone"), pad = find("aten::constant_pad_nd");
    const Geometry& root = from_[memory.root].geometry;
    const std::int64_t item = item_size(root.dtype);
    // Contains whole elements of every dtype it is accessed as, and of the root's.
    memory.first = memory.reach.first / memory.largest * memory.largest;
    Geometry row;
    row.sizes = {(memory.reach.end - memory.first + item - 1) / item};
    row.strides = {1};
    row.storage_offset = memory.first / item;
    row.dtype = root.dtype;
    row.device = root.device;
    row.conjugated = root.conjugated;
    row.negated = root.negated;
    const ValueId seen =
        emit_bits(emit_as_strided(values_[index_of(memory.root)].value, row), root.conjugated, root.negated);
    row.storage_offset = 0;
    row.conjugated = row.negated = false;
    memory.current = emit(clone, {Operand::of(seen), Operand::of(IValue())}, std::move(row));
    if (!memory.mixed) return;
    memory.current = emit_row_of(memory.current, cell_of_size(memory.smallest));
    Geometry padded = to_[memory.current].geometry;
    const std::int64_t whole = memory.largest / memory.smallest,
                       missing = (whole - padded.sizes[0] % whole) % whole;
    if (missing == 0) return;
    padded.sizes[0] += missing;
    memory.current = emit(pad, {Operand::of(memory.current), list_of({0, missing}), Operand::of(IValue(0))},
                          std::move(padded));
  }

  // Elements at the same address are written with equal values (otherwise the operator would have thrown):
  // as_strided_scatter gets each once.
  ValueId emit_first_at_each_place(ValueId value, Geometry& place) {
    static const c10::OperatorHandle slice = find("aten::slice", "Tensor");
    for (std::size_t dim = 0; dim < place.sizes.size(); ++dim) {
      if (place.strides[dim] != 0 || place.sizes[dim] <= 1) continue;
      Geometry first = to_[value].geometry;
      place.sizes[dim] = first.sizes[dim] = 1;
      value = emit(slice,
                   {Operand::of(value), Operand::of(IValue(static_cast<std::int64_t>(dim))),
                    Operand::of(IValue(0)), Operand::of(IValue(1)), Operand::of(IValue(1))},
                   std::move(first), to_[value].storage);
    }
    return value;
  }

  void emit_scatter(Memory& memory, ValueId value, const Geometry& place) {
    static const c10::OperatorHandle scatter = find("aten::as_strided_scatter");
    memory.current = emit(scatter,
                          {Operand::of(memory.current), Operand::of(value), list_of(place.sizes),
                           list_of(place.strides), Operand::of(IValue(place.storage_offset))},
                          to_[memory.current].geometry);
  }

  // Writes `value`, which has the sizes and dtype of `target`, into the row of its memory.
  void scatter_into_row(Memory& memory, ValueId target, ValueId value) {
    static const c10::OperatorHandle clone = find("aten::clone");
    if (memory.version == 0) make_row(memory);
    Geometry place = place_of(target, memory);
    value = emit_first_at_each_place(value, place);
    value = emit_bits(value, from_[target].geometry.conjugated, from_[target].geometry.negated);
    if (memory.mixed) {
      // Each element as its cells, in an extra dim.
      const at::ScalarType cell = cell_of_size(memory.smallest);
      const std::int64_t cells = item_size(place.dtype) / memory.smallest;
      Geometry dense = place;
      dense.storage_offset = 0;
      dense.strides.assign(dense.sizes.size(), 1);
      for (std::size_t i = dense.sizes.size(); i-- > 1;)
        dense.strides[i - 1] = dense.strides[i] * std::max<std::int64_t>(dense.sizes[i], 1);
      const std::int64_t elements = dense.numel();
      value = emit(
          clone,
          {Operand::of(value), Operand::of(IValue(static_cast<std::int64_t>(at::MemoryFormat::Contiguous)))},
          std::move(dense));
      value = emit_row_of(emit_view(value, {elements}), cell);
      for (std::int64_t& stride : place.strides) stride *= cells;
      place.storage_offset *= cells;
      place.sizes.push_back(cells);
      place.strides.push_back(1);
      value = emit_view(value, place.sizes);
    }
    emit_scatter(memory, value, place);
  }

  // The current value in the new graph of a value of the old graph.
  ValueId now(ValueId old) {
    Memory& memory = memory_of(old);
    Translated& translated = values_[index_of(old)];
    if (translated.version == memory.version) return translated.value;
    translated.version = memory.version;
    if (!memory.flat && same_layout(from_[old].geometry, from_[memory.root].geometry))
      return translated.value = memory.current;
    return translated.value = emit_read(old, memory);
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

  // Copies a node that writes nothing.
  void copy(const Node& node) {
    const OperatorTraits& traits = traits_of(node.op);
    if (traits.pure_view && node.op.operator_name().name == "aten::as_strided" &&
        memory_of(node.results[0].values[0]).flat && memory_of(node.results[0].values[0]).version > 0) {
      // Its offset is relative to the beginning of the memory in the old graph.
      const ValueId result = node.results[0].values[0];
      Memory& memory = memory_of(result);
      values_[index_of(result)] = {emit_read(result, memory), memory.version};
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
    const auto sibling = functional_counterpart(node.op);
    if (!sibling || name == "aten::set_" || name == "aten::resize_" || name == "aten::resize_as_")
      throw NotImplemented(fmt::format(
          "graph: {} writes memory and has no functional counterpart; remove it from the captured function",
          traits.name));
    std::vector<Operand> arguments;
    for (std::size_t i = 0; i < node.arguments.size(); ++i) {
      const bool only_receives = traits.arguments[i].written && node.op.schema().arguments()[i].kwarg_only();
      if (!only_receives) arguments.push_back(translate(node.arguments[i]));
    }
    if (traits_of(*sibling).pure_view) return translate_metadata_write(node, *sibling, std::move(arguments));

    const bool by_columns = is_matrix_product(name) && written.size() == 1 &&
                            is_computed_by_columns(from_[node.arguments[written[0]].value()].geometry) &&
                            transpose_product(arguments);
    const Stack shapes = run_on_fake_arguments(to_, *sibling, arguments);
    Node pure{*sibling, std::move(arguments), {}, node.phase, node.grad_enabled};
    for (const IValue& shape : shapes) pure.results.push_back(new_results(shape));
    std::vector<Operand> results = pure.results;
    to_.nodes.push_back(std::move(pure));
    if (by_columns) results[0] = Operand::of(emit_transposed(results[0].value()));
    // First the operator's own results that it does not write, then the written arguments in order: one
    // result or one list each.
    std::size_t next = 0;
    for (std::size_t i = 0; i < node.results.size() && next < results.size(); ++i) {
      if (traits.returns[i].kind != ReturnAlias::Kind::Fresh) continue;
      for (std::size_t j = 0; j < node.results[i].values.size(); ++j)
        if (const ValueId value = node.results[i].values[j]; value != kNoValue)
          adopt(value, results[next].values.at(j));
      ++next;
    }
    if (results.size() - next != written.size())
      throw NotImplemented(fmt::format(
          "graph: {} writes {} arguments, its functional counterpart returns {} results; remove it from the "
          "captured function",
          traits.name, written.size(), results.size() - next));
    for (std::size_t i = 0; i < written.size(); ++i) {
      const Operand& targets = node.arguments[written[i]];
      const Operand& stored = results[next + i];
      PENSTOCK_INVARIANT(targets.values.size() == stored.values.size(),
                         "a functional counterpart returned a different number of tensors");
      for (std::size_t j = 0; j < targets.values.size(); ++j)
        if (targets.values[j] != kNoValue) store(node, targets.values[j], stored.values[j]);
    }
    // An out= operator may have resized its target.
    for (std::size_t i = 0; i < node.results.size(); ++i)
      for (const ValueId value : node.results[i].values)
        if (value != kNoValue && values_[index_of(value)].value == kNoValue)
          throw NotImplemented(fmt::format(
              "graph: {} changes the shape of the tensor it writes; pass a tensor of the right shape",
              traits.name));
  }

  Operand new_results(const IValue& shape) {
    if (shape.isTensor())
      return Operand::of(shape.toTensor().defined() ? to_.new_value(geometry_of(shape.toTensor()))
                                                    : kNoValue);
    Operand operand;
    operand.kind = Operand::Kind::TensorList;
    for (const IValue& element : shape.toListRef())
      operand.values.push_back(to_.new_value(geometry_of(element.toTensor())));
    return operand;
  }

  // Stores `value` as the new contents of `target`.
  void store(const Node& node, ValueId target, ValueId value) {
    static const c10::OperatorHandle to_copy = find("aten::_to_copy"), expand = find("aten::expand");
    const Geometry& wanted = from_[target].geometry;
    if (to_[value].geometry.dtype != wanted.dtype) {
      Geometry converted = to_[value].geometry;
      converted.dtype = wanted.dtype;
      value = emit(to_copy,
                   {Operand::of(value), Operand::of(IValue(static_cast<std::int64_t>(wanted.dtype))),
                    Operand::of(IValue()), Operand::of(IValue()), Operand::of(IValue()),
                    Operand::of(IValue(false)), Operand::of(IValue())},
                   std::move(converted));
    }
    if (to_[value].geometry.sizes != wanted.sizes) {
      if (to_[value].geometry.sizes.size() > wanted.sizes.size())
        throw NotImplemented(fmt::format("graph: {} writes a result whose shape differs from its target",
                                         c10::toString(node.op.operator_name())));
      Geometry expanded = geometry_of(
          make_fake_strided(to_[value].geometry.sizes, to_[value].geometry.strides).expand(wanted.sizes));
      expanded.dtype = wanted.dtype;
      expanded.device = wanted.device;
      value = emit(expand, {Operand::of(value), list_of(wanted.sizes), Operand::of(IValue(false))},
                   std::move(expanded), to_[value].storage);
    }
    Memory& memory = memory_of(target);
    const Geometry& root = from_[memory.root].geometry;
    if (memory.flat) {
      scatter_into_row(memory, target, value);
    } else if (same_layout(wanted, root) && same_layout(to_[value].geometry, root) &&
               !to_[value].geometry.conjugated && !to_[value].geometry.negated) {
      memory.current = value;
    } else if (wanted.numel() == root.numel() && is_row_major(wanted) && is_row_major(root) &&
               is_row_major(to_[value].geometry)) {
      // All of the memory in its order, through a view of other sizes (`matmul(x, w).add_(bias)`): nothing of
      // what was there remains, and the target is the value itself.
      memory.current = emit_view(value, root.sizes);
      ++memory.version;
      values_[index_of(target)] = {value, memory.version};
      return;
    } else {
      Geometry place = wanted;
      value = emit_first_at_each_place(value, place);
      emit_scatter(memory, value, place);
    }
    ++memory.version;
  }

  ValueId emit_transposed(ValueId of) {
    static const c10::OperatorHandle transpose = find("aten::transpose", "int");
    Geometry geometry = to_[of].geometry;
    const std::size_t last = geometry.sizes.size() - 1;
    std::swap(geometry.sizes[last - 1], geometry.sizes[last]);
    std::swap(geometry.strides[last - 1], geometry.strides[last]);
    return emit(
        transpose,
        {Operand::of(of), Operand::of(IValue(std::int64_t{-2})), Operand::of(IValue(std::int64_t{-1}))},
        std::move(geometry), to_[of].storage);
  }

  // The counterpart of a product that is written by columns makes rows. The transpose of the product, of
  // transposed and exchanged factors, is the same call of BLAS. Returns false where what is added is
  // broadcast.
  bool transpose_product(std::vector<Operand>& arguments) {
    const std::size_t factors = arguments.size() == 2 ? 0 : 1;  // before them, what is added
    const std::size_t dims = to_[arguments[factors].value()].geometry.sizes.size();
    if (factors == 1 && to_[arguments[0].value()].geometry.sizes.size() != dims) return false;
    for (std::size_t i = 0; i < factors + 2; ++i)
      arguments[i] = Operand::of(emit_transposed(arguments[i].value()));
    std::swap(arguments[factors], arguments[factors + 1]);
    return true;
  }

  // transpose_ and similar operators: another view of the same memory.
  void translate_metadata_write(const Node& node, const c10::OperatorHandle& sibling,
                                std::vector<Operand> arguments) {
    const ValueId before = node.arguments[0].value(), after = node.results[0].value();
    if (after == before) return;
    if (Memory& memory = memory_of(after);
        memory.flat && memory.version > 0 && sibling.operator_name().name == "aten::as_strided") {
      values_[index_of(after)] = {emit_read(after, memory), memory.version};
      return;
    }
    const StorageId storage = to_[arguments[0].value()].storage;
    const ValueId value = emit(sibling, std::move(arguments), from_[after].geometry, storage);
    values_[index_of(after)] = {value, memory_of(after).version};
  }

  const Graph& from_;
  const std::size_t forward_outputs_;
  Graph to_;
  std::vector<Memory> memories_;
  std::vector<Translated> values_;
  Phase phase_ = Phase::Forward;
  bool grad_enabled_ = true;
};

}  // namespace

Graph functionalize(const Graph& graph, std::size_t forward_outputs) {
  return Functionalizer(graph, forward_outputs).run();
}

Graph functionalize(Graph&& graph, std::size_t forward_outputs) {
  if (count_writes(graph) > 0) return Functionalizer(graph, forward_outputs).run();
  return std::move(graph);
}

}  // namespace penstock::graph
