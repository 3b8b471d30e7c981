#include "penstock/base/quote.h"

#include <fmt/format.h>


namespace penstock {

namespace {

unsigned byte_at(std::string_view text, std::size_t at) { return static_cast<unsigned char>(text[at]); }

// Length of the UTF-8 character at `at`; 0 for bytes that are none, for overlong forms and surrogates, and for U+0080 to U+009F,
// which terminals take for commands.
std::size_t character(std::string_view text, std::size_t at) {
  const unsigned first = byte_at(text, at);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xc2 && first <= 0xdf ? 2 : (first & 0xf0) == 0xe0 ? 3 : first >= 0xf0 && first <= 0xf4 ? 4 : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte_at(text, at + i) & 0xc0) != 0x80) return 0;
  const unsigned second = byte_at(text, at + 1);
  const bool bad = (first == 0xc2 && second < 0xa0) || (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                   (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  return bad ? 0 : length;
}

// Appends what is shown for the character at `at` and returns how many bytes that took.
std::size_t append_shown(std::string& shown, std::string_view text, std::size_t at, bool one_line) {
  const std::size_t length = character(text, at);
  const unsigned byte = byte_at(text, at);
  if (byte == '\n' || byte == '\t') {
    shown += one_line ? (byte == '\n' ? "\\n" : "\\t") : std::string(1, text[at]);
    return 1;
  }
  if (length == 0 || byte < 0x20 || byte == 0x7f) {
    shown += fmt::format("\\x{:02x}", byte);
    return 1;
  }
  shown += text.substr(at, length);
  return length;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  for (std::size_t at = 0; at < text.size();) at += append_shown(shown, text, at, /*one_line=*/false);
  return shown;
}

std::string quote(std::string_view text, std::size_t at_most) {
  std::string shown = "\"";
  std::size_t at = 0;
  while (at < text.size() && shown.size() <= at_most) at += append_shown(shown, text, at, /*one_line=*/true);
  if (at < text.size()) return shown + fmt::format("...\" ({} bytes)", text.size());
  return shown + '"';
}

std::string count_of(unsigned long long count, std::string_view word, std::string_view plural) {
  if (count == 1) return fmt::format("1 {}", word);
  return plural.empty() ? fmt::format("{} {}s", count, word) : fmt::format("{} {}", count, plural);
}

}  // namespace penstock
