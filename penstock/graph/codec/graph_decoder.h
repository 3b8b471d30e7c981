// Reads what a GraphEncoder has written.
//
//   GraphDecoder decoder(bytes, "compile cache: 0123.entry", "it is made again");
//   decoder(joint, meta, names);
//   decoder.expect_end();
//
// Bytes that are not what an encoder wrote are a ValueError with the name and the byte offset: nothing is
// read outside of them, and no more memory is allocated than a multiple of their size. An operator that this
// LibTorch does not have is one, too. Sound bytes with contexts of subclasses that this process does not have
// (a kind without a codec, a mesh) are a StateError; a graph whose text refers to contexts may wait for other
// processes (ContextCodec::decode_text). Graphs are verified. Indices that refer from one item to another (a
// base_index, a flat_index) are checked by who knows both (capture_codec.h). Thread safety: one thread at a
// time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/context_codec.h"
#include "penstock/graph/cache/byte_stream.h"
#include "penstock/graph/codec/constant_kind.h"
#include "penstock/graph/codec/fields.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/subclass_record.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/graph/ir/view_replay.h"

namespace penstock::graph {

class GraphDecoder {
 public:
  static constexpr bool kReads = true;

  // Reads the tables. `samples`: tensors of the process that contexts of subclasses may refer to (the mesh of
  // a DTensor): the inputs of the call.
  GraphDecoder(std::span<const std::uint8_t> bytes, std::string name, std::string remedy,
               std::vector<at::Tensor> samples = {});

  template <class... Items>
  void operator()(Items&... items) {
    (item(items), ...);
  }
  void expect_end();
  // From here on graphs are checked only for indices that do not exist: the executor verifies what it is
  // given.
  void leave_verification_to_executor() { verifies_ = false; }
  [[noreturn]] void fail(const std::string& why) const { in_.fail(why); }

  void item(bool& value) { value = in_.flag(); }
  void item(std::string& text) { text = in_.text(); }
  template <class Number>
  requires(std::is_arithmetic_v<Number>) void item(Number& value) { value = in_.number<Number>(); }
  template <class Enum>
  requires(std::is_enum_v<Enum>) void item(Enum& value) {
    using Plain = std::underlying_type_t<Enum>;
    const auto number = in_.number<Plain>();
    // An enum without names (an identifier) may have any value.
    if constexpr (requires { last_of(value); })
      if (number > static_cast<Plain>(last_of(value))) fail("invalid enumerator");
    value = static_cast<Enum>(number);
  }
  template <class T>
  void item(std::optional<T>& value) {
    value.reset();
    if (in_.flag()) item(value.emplace());
  }
  template <class T>
  void item(std::vector<T>& list) {
    list.clear();
    for (std::size_t left = in_.count(); left > 0; --left) {
      if constexpr (std::is_same_v<T, ViewStep>) {
        list.push_back(view_step());
      } else {
        T each{};
        item(each);
        list.push_back(std::move(each));
      }
    }
  }
  template <class A, class B>
  void item(std::pair<A, B>& both) {
    item(both.first);
    item(both.second);
  }
  template <class... Types>
  void item(std::variant<Types...>& either) {
    read_alternative(either, in_.number<std::uint8_t>(), std::index_sequence_for<Types...>{});
  }
  template <HasFields T>
  void item(T& value) {
    fields(*this, value);
    if constexpr (std::is_same_v<T, InputInfo>) check(value);
    if constexpr (std::is_same_v<T, SymbolicTable>) check(value);
  }
  void item(at::ScalarType& type);
  void item(at::Device& device);
  void item(StridedLayout& layout);
  void item(WrapperGeometry& geometry);
  void item(Geometry& geometry) { geometry = entry(geometries_); }
  void item(c10::IValue& value) { value = value_of(entry(constants_)); }
  void item(at::Tensor& tensor) { tensor = entry(tensors_); }
  void item(Operand& operand);
  void item(Graph& graph);
  void item(SizeExpression& expression);
  void item(SymbolSet& symbols);
  void item(FlattenRecord& record);

 private:
  // ContextCodec::encode_text.
  struct ContextText {
    std::string kind;
    Bytes bytes;
  };
  struct Constant {
    c10::IValue value;
    SymbolicId symbolic = kNotSymbolic;
    std::optional<ContextText> text;  // the value is known when it is asked for
  };

  template <class T>
  T& entry(std::vector<T>& table) {
    const auto index = in_.number<std::uint32_t>();
    if (index >= table.size()) fail("an entry of a table that does not exist");
    return table[index];
  }
  template <class Variant, std::size_t... I>
  void read_alternative(Variant& either, std::uint8_t index, std::index_sequence<I...>) {
    const bool found = ((index == I && (item(either.template emplace<I>()), true)) || ...);
    if (!found) fail("an alternative that does not exist");
  }
  void read_tables();
  Geometry read_geometry();
  void read_constant(Constant& constant);
  c10::IValue read_value(ConstantKind kind, int depth);
  ConstantKind read_kind();
  const c10::IValue& value_of(Constant& constant) const;
  const ContextCodec& codec_of(const std::string& kind) const;
  // Calls a codec, which throws its own errors.
  template <class Decode>
  auto by_codec(const Decode& decode) const;
  at::Tensor read_memory();
  at::Tensor read_tensor();
  ViewStep view_step();
  void read_operand(Operand& operand, std::size_t values);
  void check(const InputInfo& info) const;
  void check(const SymbolicTable& table) const;
  void check(const SizeExpression& expression, std::size_t variables) const;
  std::int64_t natural();
  std::size_t dims();

  ByteReader in_;
  std::vector<at::Tensor> samples_;
  bool verifies_ = true;
  int depth_ = 0;  // of nested records
  std::vector<c10::OperatorHandle> operators_;
  std::vector<Geometry> geometries_;
  std::vector<Constant> constants_;
  std::vector<at::Tensor> memories_;  // bytes
  std::vector<at::Tensor> tensors_;
  std::vector<std::shared_ptr<const SymbolicTable>> tables_;
};

}  // namespace penstock::graph
