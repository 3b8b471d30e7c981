// Writes JSON piece by piece into a sink, without allocation, locks or locale: safe in a signal handler.
//
// The caller is responsible for the structure (a key before each value of an object). The writer adds commas
// and escapes and replaces each byte that is not valid UTF-8 by U+FFFD, so the text always parses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace penstock::comm {

class ByteSink {
 public:
  virtual void put(std::string_view bytes) = 0;

 protected:
  ~ByteSink() = default;
};

class StringSink final : public ByteSink {
 public:
  void put(std::string_view bytes) override { text += bytes; }
  std::string text;
};

// Decimal digits of a number, on the stack.
class Decimal {
 public:
  explicit Decimal(std::uint64_t value, bool negative = false) noexcept;
  static Decimal of(std::int64_t value) noexcept;
  std::string_view view() const noexcept { return {digits_.data() + begin_, digits_.size() - begin_}; }

 private:
  std::array<char, 20> digits_{};  // -9223372036854775808 and 18446744073709551615 both have 20 characters
  std::size_t begin_;
};

class JsonWriter {
 public:
  explicit JsonWriter(ByteSink& sink) : sink_(sink) {}
  JsonWriter(const JsonWriter&) = delete;  // a copy would lose track of the commas
  JsonWriter& operator=(const JsonWriter&) = delete;

  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);
  JsonWriter& text(std::string_view value);
  JsonWriter& number(std::int64_t value);
  JsonWriter& count(std::uint64_t value);
  JsonWriter& null();
  JsonWriter& new_line();  // between elements, so that people can read and grep the file

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  void before_value();
  void quoted(std::string_view value);

  ByteSink& sink_;
  bool comma_ = false;  // the next value at this depth follows another one
};

}  // namespace penstock::comm
