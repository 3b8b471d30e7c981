// Encodes numbers and strings as bytes, and decodes them with every length checked. For the files of this
// folder.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace penstock::graph {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

class ByteWriter {
 public:
  template <class T>
  requires(std::is_arithmetic_v<T>) void number(T value) {
    const auto* from = reinterpret_cast<const std::uint8_t*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
  }
  void count(std::size_t value) { number(static_cast<std::uint64_t>(value)); }
  void flag(bool value) { number(static_cast<std::uint8_t>(value)); }
  void text(std::string_view value) {
    count(value.size());
    bytes.insert(bytes.end(), value.begin(), value.end());
  }
  void raw(std::span<const std::uint8_t> value) { bytes.insert(bytes.end(), value.begin(), value.end()); }

  std::vector<std::uint8_t> bytes;
};

class ByteReader {
 public:
  ByteReader(std::span<const std::uint8_t> bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {}

  template <class T>
  requires(std::is_arithmetic_v<T>) T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  // The number of entries that follow, of at least `least` bytes each.
  std::size_t count(std::size_t least = 1) {
    const auto value = number<std::uint64_t>();
    if (value > remaining() / least) fail("more entries than the file has bytes for");
    return static_cast<std::size_t>(value);
  }
  bool flag() {
    const auto value = number<std::uint8_t>();
    if (value > 1) fail("a flag that is neither 0 nor 1");
    return value != 0;
  }
  // An enumerator; rejects values above `last`.
  template <class Enum>
  Enum choice(Enum last) {
    const auto value = number<std::uint8_t>();
    if (value > static_cast<std::uint8_t>(last)) fail("invalid enumerator");
    return static_cast<Enum>(value);
  }
  std::string text() {
    const std::size_t size = count();
    const std::span<const std::uint8_t> from = take(size);
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  std::span<const std::uint8_t> take(std::size_t size) {
    if (size > remaining()) fail("unexpected end of file");
    const std::span<const std::uint8_t> taken = bytes_.subspan(at_, size);
    at_ += size;
    return taken;
  }
  std::size_t remaining() const { return bytes_.size() - at_; }
  std::size_t position() const { return at_; }

  // Throws ValueError with the name of the file and the byte offset.
  [[noreturn]] void fail(const std::string& why) const;

 private:
  std::span<const std::uint8_t> bytes_;
  std::string name_;
  std::size_t at_ = 0;
};

}  // namespace penstock::graph
