#include "penstock/comm/record/json_writer.h"

namespace penstock::comm {

namespace {

// Returns the length of the UTF-8 character at the start of `text`, or 0 if there is none. Rejects what JSON
// readers reject:
// overlong forms, surrogates, and code points past U+10FFFF.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xc2 && first <= 0xdf   ? 2
                             : (first & 0xf0) == 0xe0         ? 3
                             : first >= 0xf0 && first <= 0xf4 ? 4
                                                              : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  const unsigned char second = byte(1);
  if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
      (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
    return 0;
  return length;
}

}  // namespace

Decimal::Decimal(std::uint64_t value, bool negative) noexcept : begin_(digits_.size()) {
  do {
    digits_[--begin_] = static_cast<char>('0' + value % 10);
    value /= 10;
  } while (value > 0);
  if (negative) digits_[--begin_] = '-';
}

Decimal Decimal::of(std::int64_t value) noexcept {
  // Negated as unsigned: the smallest number has no positive counterpart.
  const auto bits = static_cast<std::uint64_t>(value);
  return value < 0 ? Decimal(0 - bits, true) : Decimal(bits);
}

void JsonWriter::before_value() {
  if (comma_) sink_.put(",");
  comma_ = true;
}

JsonWriter& JsonWriter::open(char bracket) {
  before_value();
  sink_.put({&bracket, 1});
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  sink_.put({&bracket, 1});
  comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  before_value();
  quoted(name);
  sink_.put(": ");
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::text(std::string_view value) {
  before_value();
  quoted(value);
  return *this;
}

JsonWriter& JsonWriter::number(std::int64_t value) {
  before_value();
  sink_.put(Decimal::of(value).view());
  return *this;
}

JsonWriter& JsonWriter::count(std::uint64_t value) {
  before_value();
  sink_.put(Decimal(value).view());
  return *this;
}

JsonWriter& JsonWriter::null() {
  before_value();
  sink_.put("null");
  return *this;
}

JsonWriter& JsonWriter::new_line() {
  // The comma ends the current line.
  if (comma_) sink_.put(",");
  comma_ = false;
  sink_.put("\n");
  return *this;
}

void JsonWriter::quoted(std::string_view value) {
  static constexpr char kHex[] = "0123456789abcdef";
  sink_.put("\"");
  while (!value.empty()) {
    const std::size_t length = utf8_length(value);
    const auto c = static_cast<unsigned char>(value[0]);
    if (length == 0) {
      sink_.put("\\ufffd");
    } else if (c == '"' || c == '\\') {
      const char escaped[] = {'\\', value[0]};
      sink_.put({escaped, 2});
    } else if (c < 0x20 || c == 0x7f) {
      const char escaped[] = {'\\', 'u', '0', '0', kHex[c >> 4], kHex[c & 15]};
      sink_.put({escaped, 6});
    } else {
      sink_.put(value.substr(0, length));
    }
    value.remove_prefix(length == 0 ? 1 : length);
  }
  sink_.put("\"");
}

}  // namespace penstock::comm
