// Encodes numbers and strings as bytes, and decodes them with every length checked; and the frame around the
// bytes of a file: what it is, its version, its length, its checksum.
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
  // `name` and `remedy` are for messages: "graph file step.psgraph", "write it again with save_graph".
  ByteReader(std::span<const std::uint8_t> bytes, std::string name, std::string remedy = {})
      : bytes_(bytes), name_(std::move(name)), remedy_(std::move(remedy)) {}

  template <class T>
  requires(std::is_arithmetic_v<T>) T number() {
    if (sizeof(T) > remaining()) fail("unexpected end of file");
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
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

  const std::string& name() const { return name_; }
  const std::string& remedy() const { return remedy_; }

  // Throws ValueError with the name of the file and the byte offset.
  [[noreturn]] void fail(const std::string& why) const;

 private:
  std::span<const std::uint8_t> bytes_;
  std::string name_, remedy_;
  std::size_t at_ = 0;
};

using Bytes = std::vector<std::uint8_t>;

// What a kind of file begins with.
struct FileKind {
  std::string_view magic;  // 8 characters
  std::string_view text;   // "a graph file"
  std::uint32_t version = 0;
};
inline constexpr std::size_t kFrameBytes = 8 + 4 + 8 + 8;

// The fields behind a frame: magic, version (u32), number of bytes that follow (u64), their XXH64 (u64).
Bytes framed(const FileKind& kind, std::span<const std::uint8_t> fields);
// Returns the fields inside a frame. Throws ValueError for another kind of file, another version, another
// length or a wrong checksum; `name` and `remedy` are those of a ByteReader.
std::span<const std::uint8_t> unframed(const FileKind& kind, std::span<const std::uint8_t> bytes,
                                       const std::string& name, const std::string& remedy);

}  // namespace penstock::graph
