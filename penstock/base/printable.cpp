#include "penstock/base/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace penstock {

namespace {

// Length in bytes of the UTF-8 character at the beginning of `text`; 0 if there is no valid one: a stray
// byte, an overlong encoding, half of a surrogate pair, or a code point above U+10FFFF.
std::size_t character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return 0;
  for (std::size_t i = 1; i < bytes; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f) ||
      (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) > 0x8f))
    return 0;
  return bytes;
}

bool is_control(std::string_view character) {
  const auto first = static_cast<std::uint8_t>(character[0]);
  if (character.size() == 1) return (first < 0x20 && first != '\n' && first != '\t') || first == 0x7f;
  return character.size() == 2 && first == 0xc2 &&
         static_cast<std::uint8_t>(character[1]) < 0xa0;  // C1 controls
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(bytes, 1));
    if (bytes > 0 && !is_control(character)) {
      out += character;
    } else {
      for (const char c : character)
        fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<std::uint8_t>(c));
    }
    text.remove_prefix(character.size());
  }
  return out;
}

std::string shortened(std::string_view text, std::size_t most) {
  if (text.size() <= most) return std::string(text);
  const auto continues = [&](std::size_t i) {
    return i < text.size() && (static_cast<std::uint8_t>(text[i]) & 0xc0) == 0x80;
  };
  std::size_t head = most * 2 / 3, tail = text.size() - (most - head);
  while (head > 0 && continues(head)) --head;
  while (continues(tail)) ++tail;
  return fmt::format("{} ... ({} bytes) ... {}", text.substr(0, head), text.size(), text.substr(tail));
}

}  // namespace penstock
