// Writes graphs, and what belongs to them, as bytes; graph_decoder.h reads them.
//
//   GraphEncoder encoder("compile cache");
//   encoder(joint, meta, names);                 // anything that fields.h describes, in this order
//   const Bytes bytes = encoder.finish();
//
// What occurs many times is written once, in tables in front: operators by name, geometries, constants,
// tensors by the memory that they use, tables of symbols. The same tensor, or table, of several graphs is the
// same again after reading. Every bit is kept: also strides, offsets, lazy conjugates and the payload of a
// NaN. Text that only this process understands, such as the name of a process group, is written as the
// contexts of subclasses say (penstock/context_codec.h); they must be written, or referred to, before it.
//
// Throws NotImplemented, naming it, for what has no form in bytes: constants that are objects (generators),
// subclasses among constants, kinds of subclasses without a codec.
// Thread safety: one thread at a time.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/graph/cache/byte_stream.h"
#include "penstock/graph/codec/fields.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/subclass_record.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/graph/ir/view_replay.h"

namespace penstock::graph {

class GraphEncoder {
 public:
  static constexpr bool kReads = false;

  // `who` begins messages.
  explicit GraphEncoder(std::string who) : who_(std::move(who)) {}

  template <class... Items>
  void operator()(const Items&... items) {
    (item(items), ...);
  }
  // Text in graphs from here on may refer to the contexts of these tensors, which are not written.
  void refer_to(const SubclassLayout& layout);
  // The tables, then everything that was written. The encoder is empty afterwards.
  Bytes finish();

  void item(bool value) { out_.flag(value); }
  void item(const std::string& text) { out_.text(text); }
  template <class Number>
  requires(std::is_arithmetic_v<Number>) void item(Number value) { out_.number(value); }
  template <class Enum>
  requires(std::is_enum_v<Enum>) void item(Enum value) {
    out_.number(static_cast<std::underlying_type_t<Enum>>(value));
  }
  template <class T>
  void item(const std::optional<T>& value) {
    out_.flag(value.has_value());
    if (value) item(*value);
  }
  template <class T>
  void item(const std::vector<T>& list) {
    out_.count(list.size());
    for (const T& each : list) item(each);
  }
  template <class A, class B>
  void item(const std::pair<A, B>& both) {
    item(both.first);
    item(both.second);
  }
  template <class... Types>
  void item(const std::variant<Types...>& either) {
    out_.number(static_cast<std::uint8_t>(either.index()));
    std::visit([this](const auto& value) { item(value); }, either);
  }
  template <HasFields T>
  void item(const T& value) {
    fields(*this, value);
  }
  void item(at::ScalarType type);
  void item(const at::Device& device) { out_.text(device.str()); }
  void item(const StridedLayout& layout);
  void item(const WrapperGeometry& geometry);
  void item(const Geometry& geometry) { out_.number(geometry_index(geometry)); }
  void item(const c10::IValue& value) { out_.number(constant_index(value, kNotSymbolic)); }
  void item(const at::Tensor& tensor) { out_.number(tensor_index(tensor)); }
  void item(const Operand& operand);
  void item(const ViewStep& step);
  void item(const Graph& graph);
  void item(const SizeExpression& expression);
  void item(const SymbolSet& symbols);
  void item(const FlattenRecord& record);

 private:
  using Index = std::uint32_t;
  using Table = std::unordered_map<std::string, Index>;

  Index operator_index(const c10::OperatorHandle& op);
  Index geometry_index(const Geometry& geometry);
  Index constant_index(const c10::IValue& value, SymbolicId symbolic, const std::string& argument = {});
  Index tensor_index(const at::Tensor& tensor);
  Index memory_index(const at::Tensor& tensor);
  Index table_index(const std::shared_ptr<const SymbolicTable>& table);
  void constant(ByteWriter& out, const c10::IValue& value);
  // `argument`: what the operand is for its operator; empty if it is none.
  void operand_words(const Operand& operand, const std::string& argument = {});
  void refer_to(const FlattenRecord& record);
  // The entry of text that a context has bytes for; empty if none has.
  const Bytes& context_text(const std::string& argument, const std::string& text);
  // Adds an entry to a table unless it is there.
  static Index enter(Table& table, ByteWriter& entries, const ByteWriter& entry);
  [[noreturn]] void refuse(const std::string& what) const;

  std::string who_;
  ByteWriter out_;
  struct Entries {
    ByteWriter bytes, entry;  // all entries; the one that is being written
    Table known;
  };
  Entries operators_, geometries_, constants_, tensors_, memories_;
  std::unordered_map<std::size_t, Index> operator_of_;  // by operator_index()
  std::unordered_map<const void*, Index> memory_of_, table_of_;
  std::vector<std::shared_ptr<const SymbolicTable>> tables_;
  std::vector<at::Tensor> held_;      // so that no memory is used again under the same address
  std::vector<PayloadPtr> contexts_;  // those with text of their own
  std::map<std::pair<std::string, std::string>, Bytes> context_texts_;  // by argument and text
};

}  // namespace penstock::graph
