#include "penstock/graph/codec/graph_encoder.h"

#include <ATen/core/jit_type.h>
#include <fmt/format.h>

#include <type_traits>

#include "penstock/base/describe.h"
#include "penstock/context_codec.h"
#include "penstock/errors.h"
#include "penstock/graph/codec/constant_kind.h"
#include "penstock/operator_traits.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock::graph {
namespace {

// The bytes of a memory, on the CPU.
at::Tensor bytes_of_memory(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const auto size = static_cast<std::int64_t>(tensor.storage().nbytes());
  at::Tensor bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(tensor.device()));
  bytes.set_(tensor.storage(), 0, {size}, {1});
  return bytes.cpu();
}

}  // namespace

void GraphEncoder::refuse(const std::string& what) const {
  throw NotImplemented(
      fmt::format("{}: {} cannot be saved; remove it from the captured function", who_, what));
}

GraphEncoder::Index GraphEncoder::enter(Table& table, ByteWriter& entries, const ByteWriter& entry) {
  const auto [known, is_new] = table.try_emplace(std::string(entry.bytes.begin(), entry.bytes.end()),
                                                 static_cast<Index>(table.size()));
  if (is_new) entries.raw(entry.bytes);
  return known->second;
}

void GraphEncoder::item(at::ScalarType type) {
  const std::optional<std::uint8_t> number = dtype_number(type);
  if (!number) refuse(fmt::format("dtype {}", c10::toString(type)));
  out_.number(*number);
}

void GraphEncoder::item(const StridedLayout& layout) {
  const auto& [sizes, strides, offset] = layout;
  out_.count(sizes.size());
  for (const std::int64_t size : sizes) out_.number(size);
  for (const std::int64_t stride : strides) out_.number(stride);
  out_.number(offset);
}

void GraphEncoder::item(const WrapperGeometry& geometry) {
  struct Members : StridedLayout {
    at::ScalarType dtype;
    at::Device device;
    bool wrapped_number;
  };
  static_assert(sizeof(Members) == sizeof(WrapperGeometry),
                "WrapperGeometry has members that are not stored");
  item(static_cast<const StridedLayout&>(geometry));
  (*this)(geometry.dtype, geometry.device, geometry.wrapped_number);
}

GraphEncoder::Index GraphEncoder::operator_index(const c10::OperatorHandle& op) {
  const auto [known, is_new] =
      operator_of_.try_emplace(penstock::operator_index(op), static_cast<Index>(operator_of_.size()));
  if (is_new) {
    operators_.bytes.text(op.operator_name().name);
    operators_.bytes.text(op.operator_name().overload_name);
  }
  return known->second;
}

GraphEncoder::Index GraphEncoder::geometry_index(const Geometry& geometry) {
  struct Members : StridedLayout {
    at::ScalarType dtype;
    at::Device device;
    bool conjugated, negated;
    SymbolicId symbolic;
  };
  static_assert(sizeof(Members) == sizeof(Geometry), "Geometry has members that are not stored");
  std::swap(out_, geometries_.entry);
  (*this)(static_cast<const StridedLayout&>(geometry), geometry.dtype, geometry.device, geometry.conjugated,
          geometry.negated, geometry.symbolic);
  std::swap(out_, geometries_.entry);
  const Index index = enter(geometries_.known, geometries_.bytes, geometries_.entry);
  geometries_.entry.bytes.clear();
  return index;
}

GraphEncoder::Index GraphEncoder::memory_index(const at::Tensor& tensor) {
  const void* memory = tensor.storage().unsafeGetStorageImpl();
  const auto [known, is_new] = memory_of_.try_emplace(memory, static_cast<Index>(memory_of_.size()));
  if (is_new) {
    held_.push_back(tensor);
    const at::Tensor bytes = bytes_of_memory(tensor);
    memories_.bytes.text(tensor.device().str());
    memories_.bytes.count(bytes.nbytes());
    memories_.bytes.raw({static_cast<const std::uint8_t*>(bytes.data_ptr()), bytes.nbytes()});
  }
  return known->second;
}

GraphEncoder::Index GraphEncoder::tensor_index(const at::Tensor& tensor) {
  constexpr Index kUndefined = 0;
  if (tensors_.known.empty()) {
    ByteWriter undefined;
    undefined.flag(false);
    enter(tensors_.known, tensors_.bytes, undefined);
  }
  if (!tensor.defined()) return kUndefined;
  if (is_wrapper(tensor))
    refuse(fmt::format("a tensor subclass among the constants ({})", payload_of(tensor)->kind()));
  if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor.is_quantized())
    refuse("a constant that is not a dense tensor");
  ByteWriter entry;
  entry.flag(true);
  entry.number(memory_index(tensor));
  entry.number(geometry_index(geometry_of(tensor)));
  entry.flag(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return enter(tensors_.known, tensors_.bytes, entry);
}

GraphEncoder::Index GraphEncoder::constant_index(const c10::IValue& value, SymbolicId symbolic,
                                                 const std::string& argument) {
  ByteWriter entry;
  entry.number(symbolic);
  const bool may_refer = !argument.empty() && !contexts_.empty() && value.isString();
  const Bytes text = may_refer ? context_text(argument, value.toStringRef()) : Bytes();
  if (text.empty())
    constant(entry, value);
  else
    entry.raw(text);
  return enter(constants_.known, constants_.bytes, entry);
}

const Bytes& GraphEncoder::context_text(const std::string& argument, const std::string& text) {
  const auto [known, is_new] = context_texts_.try_emplace({argument, text});
  if (!is_new) return known->second;
  for (const PayloadPtr& context : contexts_) {
    const std::string kind(context->kind());
    const auto bytes = find_context_codec(kind)->encode_text(*context, argument, text);
    if (!bytes) continue;
    ByteWriter entry;
    entry.number(static_cast<std::uint8_t>(ConstantKind::ContextText));
    entry.text(kind);
    entry.count(bytes->size());
    entry.raw(*bytes);
    known->second = std::move(entry.bytes);
    break;
  }
  return known->second;
}

void GraphEncoder::constant(ByteWriter& out, const c10::IValue& value) {
  const auto kind = [&](ConstantKind which) { out.number(static_cast<std::uint8_t>(which)); };
  const auto list = [&](const auto& items, const auto& each) {
    out.count(items.size());
    for (const auto& item : items) each(item);
  };
  if (value.isNone()) return kind(ConstantKind::None);
  if (value.isInt()) return kind(ConstantKind::Int), out.number(value.toInt());
  if (value.isDouble()) return kind(ConstantKind::Double), out.number(value.toDouble());
  if (value.isBool()) return kind(ConstantKind::Bool), out.flag(value.toBool());
  if (value.isComplexDouble())
    return kind(ConstantKind::Complex), out.number(value.toComplexDouble().real()),
           out.number(value.toComplexDouble().imag());
  if (value.isString()) return kind(ConstantKind::String), out.text(value.toStringRef());
  if (value.isDevice()) return kind(ConstantKind::Device), out.text(value.toDevice().str());
  if (value.isIntList())
    return kind(ConstantKind::IntList),
           list(value.toIntVector(), [&](std::int64_t item) { out.number(item); });
  if (value.isDoubleList())
    return kind(ConstantKind::DoubleList),
           list(value.toDoubleVector(), [&](double item) { out.number(item); });
  if (value.isBoolList())
    return kind(ConstantKind::BoolList), list(value.toBoolList(), [&](bool item) { out.flag(item); });
  if (value.isTensor()) return kind(ConstantKind::Tensor), out.number(tensor_index(value.toTensor()));
  if (value.isList() && !value.isTensorList()) {
    const c10::impl::GenericList items = value.toList();
    const c10::TypeKind of = items.elementType()->kind();
    if (of != c10::TypeKind::AnyType && of != c10::TypeKind::StringType)
      refuse(fmt::format("a constant that is a list of {}", items.elementType()->str()));
    kind(of == c10::TypeKind::AnyType ? ConstantKind::List : ConstantKind::StringList);
    return list(value.toListRef(), [&](const c10::IValue& item) { constant(out, item); });
  }
  refuse(fmt::format("a constant of kind {}", value.tagKind()));
}

void GraphEncoder::operand_words(const Operand& operand, const std::string& argument) {
  const auto& [kind, constant, values, symbolic] = operand;
  const auto word = [&](std::uint32_t payload) {
    PENSTOCK_INVARIANT(payload < (1U << 30), "a graph is too large for its stored form");
    out_.number(payload << 2 | static_cast<std::uint32_t>(kind));
  };
  const auto id = [](ValueId value) {
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(value) + 1);
  };
  switch (kind) {
    case Operand::Kind::Constant:
      return word(constant_index(constant, symbolic, argument));
    case Operand::Kind::Tensor:
      return word(id(values[0]));
    case Operand::Kind::TensorList:
    case Operand::Kind::OptionalTensorList:
      word(static_cast<std::uint32_t>(values.size()));
      for (const ValueId value : values) out_.number(id(value));
      return;
  }
}

void GraphEncoder::item(const Operand& operand) { operand_words(operand); }

void GraphEncoder::item(const ViewStep& step) {
  const auto& [op, arguments, viewed, result, element] = step;
  out_.number(operator_index(op));
  (*this)(arguments, viewed, result, element);
}

GraphEncoder::Index GraphEncoder::table_index(const std::shared_ptr<const SymbolicTable>& table) {
  if (!table) return 0;
  const auto [known, is_new] = table_of_.try_emplace(table.get(), static_cast<Index>(tables_.size() + 1));
  if (is_new) tables_.push_back(table);
  return known->second;
}

void GraphEncoder::item(const Graph& graph) {
  const auto& [inputs, constants, nodes, outputs, values, storages, table] = graph;
  out_.number(table_index(table));
  out_.number(storages);
  out_.count(values.size());
  for (const auto& [geometry, storage] : values) {
    out_.number(geometry_index(geometry));
    out_.number(static_cast<std::int32_t>(storage));
  }
  out_.count(inputs.size());
  for (const auto& [value, name] : inputs) (*this)(value, name);
  out_.count(constants.size());
  for (const auto& [value, tensor, symbolic] : constants) (*this)(value, tensor, symbolic);
  out_.count(nodes.size());
  for (const auto& [op, arguments, results, phase, grad_enabled] : nodes) {
    out_.number(operator_index(op) << 2 | static_cast<std::uint32_t>(phase) << 1 |
                static_cast<std::uint32_t>(grad_enabled));
    PENSTOCK_INVARIANT(arguments.size() < 0x10000 && results.size() < 0x10000,
                       "a node with too many operands");
    out_.number(static_cast<std::uint32_t>(arguments.size()) << 16 |
                static_cast<std::uint32_t>(results.size()));
    const auto& schema = op.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i)
      i < schema.size() ? operand_words(arguments[i], schema[i].name()) : operand_words(arguments[i]);
    for (const Operand& operand : results) operand_words(operand);
  }
  item(outputs);
}

void GraphEncoder::item(const SizeExpression& expression) {
  (*this)(expression.terms(), expression.divisor());
}

void GraphEncoder::item(const SymbolSet& symbols) {
  const std::vector<std::string> names(
      symbols.names().begin(), symbols.names().begin() + static_cast<std::ptrdiff_t>(symbols.symbols()));
  (*this)(names, symbols.quotients());
}

void GraphEncoder::item(const FlattenRecord& record) {
  out_.flag(record.is_subclass());
  if (!record.is_subclass()) return item(record.plain());
  const auto& [first_flat, count, attributes, outer, like] = record.subclass();
  const std::string kind(like->kind());
  const ContextCodec* codec = find_context_codec(kind);
  if (!codec)
    throw NotImplemented(fmt::format(
        "{}: a tensor subclass of kind {} cannot be saved, because its context has no form in bytes; call "
        "register_context_codec for it at the start of the program",
        who_, kind));
  if (codec->encode_text) contexts_.push_back(like);
  (*this)(kind, first_flat, count, attributes, outer, codec->encode(*like));
}

void GraphEncoder::refer_to(const FlattenRecord& record) {
  if (!record.is_subclass()) return;
  const SubclassMeta& meta = record.subclass();
  const ContextCodec* codec = find_context_codec(std::string(meta.kind()));
  if (codec && codec->encode_text) contexts_.push_back(meta.like);
  for (const auto& [name, attribute] : meta.attributes) refer_to(attribute);
}

void GraphEncoder::refer_to(const SubclassLayout& layout) {
  for (const auto* records :
       {&layout.inputs, &layout.forward_outputs, &layout.tangents, &layout.input_gradients})
    for (const FlattenRecord& record : *records) refer_to(record);
}

Bytes GraphEncoder::finish() {
  ByteWriter body;
  std::swap(body, out_);
  // Tables of symbols have examples among the constants and tensors.
  for (std::size_t i = 0; i < tables_.size(); ++i) item(*tables_[i]);
  ByteWriter symbols;
  std::swap(symbols, out_);
  const auto table = [&](std::size_t size, const ByteWriter& entries) {
    out_.count(size);
    out_.raw(entries.bytes);
  };
  table(operator_of_.size(), operators_.bytes);
  table(geometries_.known.size(), geometries_.bytes);
  table(memory_of_.size(), memories_.bytes);
  table(tensors_.known.size(), tensors_.bytes);
  table(constants_.known.size(), constants_.bytes);
  table(tables_.size(), symbols);
  out_.raw(body.bytes);
  Bytes all = std::move(out_.bytes);
  *this = GraphEncoder(std::move(who_));
  return all;
}

}  // namespace penstock::graph
