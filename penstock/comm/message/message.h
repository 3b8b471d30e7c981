// Typed messages: metadata (shapes, plans, errors) exchanged between processes as checked bytes, never as
// code.
//
//   MessageWriter writer(kShapes, 2);                       // kind and version of the fields that follow
//   writer.write(rank).write(shape).write(name);
//   std::vector<std::uint8_t> bytes = writer.finish();
//
//   MessageReader reader(bytes, kShapes, {1, 2});           // throws on damage, wrong kind or version
//   const auto rank = reader.read<std::int32_t>();
//   ...
//   reader.expect_end();
//
// Supported types: integers of fixed width, bool, float, double, text, and vectors, optionals and
// pairs of supported types. Add a struct by defining two functions in its own namespace:
//
//   void encode(comm::MessageWriter& writer, const Shape& shape) {
//     writer.write(shape.sizes).write(shape.dtype);
//   }
//   void decode(comm::MessageReader& reader, Shape& shape) { reader.read(shape.sizes).read(shape.dtype); }
//
// Equal values give equal bytes on every machine, so the bytes may be used as a key. Floating-point values
// are copied bit by bit: 0.0 and -0.0 differ, and NaNs keep their payload. The format is specified in
// docs/messages.md.
//
// Every error of the sender or the wire is a MismatchError that names the byte offset. Reading
// never touches memory outside the message and never allocates more in advance than the message has bytes.
// Thread safety: use a writer or reader from one thread.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::comm {

inline constexpr std::size_t kMessageHeaderBytes = 24;
inline constexpr std::size_t kDefaultMaxMessageBytes = std::size_t{64} << 20;

// The type of a message: four printable ASCII characters, "SHAP".
class MessageKind {
 public:
  // Throws ValueError for other characters; in a constant expression that is a compile error.
  constexpr explicit MessageKind(const char (&code)[5]) {
    for (std::size_t i = 0; i < code_.size(); ++i) {
      if (code[i] <= ' ' || code[i] > '~')
        throw ValueError("message kind: expected four printable ASCII characters, like \"SHAP\"");
      code_[i] = code[i];
    }
  }
  constexpr bool operator==(const MessageKind&) const = default;
  constexpr std::string_view code() const { return {code_.data(), code_.size()}; }

 private:
  std::array<char, 4> code_{};
};

// Versions of a kind that a reader supports, both ends included.
struct VersionRange {
  std::uint16_t oldest = 0;
  std::uint16_t newest = 0;
};

// Integers of a width that is part of the type. Character types are text, not numbers.
template <class T>
concept WireInteger =
    std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char> && !std::same_as<T, wchar_t> &&
    !std::same_as<T, char8_t> && !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;

class MessageWriter {
 public:
  // `max_bytes` limits the whole message, header included; a write that would exceed it throws and adds
  // nothing.
  MessageWriter(MessageKind kind, std::uint16_t version, std::size_t max_bytes = kDefaultMaxMessageBytes);

  template <class T>
  MessageWriter& write(const T& value) {
    encode(*this, value);
    return *this;
  }

  // Returns the message. Every later call throws StateError.
  std::vector<std::uint8_t> finish();

  // For `encode`: raw bytes, and the number of elements that follow.
  void append(std::span<const std::uint8_t> bytes);
  void append_count(std::size_t count);

  std::size_t size() const { return bytes_.size(); }  // header included

 private:
  MessageKind kind_;
  std::uint16_t version_;
  std::size_t max_bytes_;
  bool finished_ = false;
  std::vector<std::uint8_t> bytes_;
};

class MessageReader {
 public:
  // Checks the whole frame: size, magic, format, length, checksum, then kind and version. `bytes` must
  // outlive the reader.
  MessageReader(std::span<const std::uint8_t> bytes, MessageKind kind, VersionRange understood,
                std::size_t max_bytes = kDefaultMaxMessageBytes);
  MessageReader(std::vector<std::uint8_t>&&, MessageKind, VersionRange, std::size_t = 0) = delete;

  // The sender's version, within the supported range; a decoder may branch on it.
  std::uint16_t version() const { return version_; }
  std::size_t offset() const { return offset_; }  // of the next field, counted from the start of the message
  std::size_t remaining() const { return bytes_.size() - offset_; }

  template <class T>
  MessageReader& read(T& value) {
    decode(*this, value);
    return *this;
  }
  template <class T>
  T read() {
    T value{};
    decode(*this, value);
    return value;
  }

  // Throws if fields are left over, that is, if the sender wrote more than this reader knows.
  void expect_end() const;

  // For `decode`: returns the next bytes (valid as long as the message).
  std::span<const std::uint8_t> take(std::size_t count);
  // For `decode`: returns a count of elements of at least `minimum_bytes` each, checked against the remaining
  // bytes before any allocation.
  std::size_t take_count(std::size_t minimum_bytes);

  // For `decode`: throws for the field at `offset`, whose bytes are intact but whose value is not allowed (an
  // unknown enum value, ...). Without a remedy the message asks for the same build on all ranks.
  [[noreturn]] void refuse(std::size_t offset, std::string_view what, std::string_view actual,
                           std::string_view expected, std::string_view remedy = {}) const;

 private:
  std::span<const std::uint8_t> bytes_;
  MessageKind kind_;
  std::uint16_t version_ = 0;
  std::size_t offset_ = 0;
};

// FNV-1a, 64 bits: a change of any single byte always changes it. `seed` continues an earlier call.
std::uint64_t message_checksum(std::span<const std::uint8_t> bytes, std::uint64_t seed = 0xcbf29ce484222325u);

// ---- encoding of each type ----

template <WireInteger T>
void encode(MessageWriter& writer, T value) {
  const auto bits = static_cast<std::make_unsigned_t<T>>(value);
  std::array<std::uint8_t, sizeof(T)> bytes;
  for (std::size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<std::uint8_t>(bits >> (8 * i));
  writer.append(bytes);
}
template <WireInteger T>
void decode(MessageReader& reader, T& value) {
  const auto bytes = reader.take(sizeof(T));
  std::make_unsigned_t<T> bits = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    bits = static_cast<std::make_unsigned_t<T>>(bits | static_cast<std::make_unsigned_t<T>>(bytes[i])
                                                           << (8 * i));
  value = static_cast<T>(bits);
}

// A template, to prevent implicit conversion of pointers to bool.
template <std::same_as<bool> T>
void encode(MessageWriter& writer, T value) {
  encode(writer, static_cast<std::uint8_t>(value ? 1 : 0));
}
void decode(MessageReader& reader, bool& value);  // throws for values other than 0 and 1

template <std::same_as<float> T>
void encode(MessageWriter& writer, T value) {
  encode(writer, std::bit_cast<std::uint32_t>(value));
}
template <std::same_as<double> T>
void encode(MessageWriter& writer, T value) {
  encode(writer, std::bit_cast<std::uint64_t>(value));
}
void decode(MessageReader& reader, float& value);
void decode(MessageReader& reader, double& value);

void encode(MessageWriter& writer, std::string_view text);  // any bytes; UTF-8 by convention, not checked
void decode(MessageReader& reader, std::string& text);

template <class First, class Second>
void encode(MessageWriter& writer, const std::pair<First, Second>& value) {
  writer.write(value.first).write(value.second);
}
template <class First, class Second>
void decode(MessageReader& reader, std::pair<First, Second>& value) {
  reader.read(value.first).read(value.second);
}

template <class T>
void encode(MessageWriter& writer, const std::optional<T>& value) {
  writer.write(value.has_value());
  if (value) writer.write(*value);
}
template <class T>
void decode(MessageReader& reader, std::optional<T>& value) {
  value.reset();
  if (reader.read<bool>()) value = reader.read<T>();
}

template <class T>
void encode(MessageWriter& writer, const std::vector<T>& values) {
  writer.append_count(values.size());
  const std::size_t before = writer.size();
  if constexpr (std::same_as<T, std::uint8_t>) {
    writer.append(values);
  } else {
    for (const auto& value : values) writer.write(static_cast<const T&>(value));
  }
  PENSTOCK_INVARIANT(
      writer.size() - before >= values.size(),
      "an element of a vector must occupy at least one byte, or its count could not be checked");
}
template <class T>
void decode(MessageReader& reader, std::vector<T>& values) {
  const std::size_t count = reader.take_count(std::is_arithmetic_v<T> ? sizeof(T) : 1);
  values.clear();
  if constexpr (std::same_as<T, std::uint8_t>) {
    const auto bytes = reader.take(count);
    values.assign(bytes.begin(), bytes.end());
  } else {
    // An element may be larger in memory than in the message: reserve no more than the message size allows.
    values.reserve(std::min(count, reader.remaining() / sizeof(T)));
    for (std::size_t i = 0; i < count; ++i) values.push_back(reader.read<T>());
  }
}

}  // namespace penstock::comm
