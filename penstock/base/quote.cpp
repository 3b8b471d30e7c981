#include "penstock/base/quote.h"

#include <fmt/format.h>

namespace penstock {

std::string quote(std::string_view text, std::size_t at_most) {
  const bool cut = text.size() > at_most;
  std::size_t end = cut ? at_most : text.size();
  // Do not cut in the middle of a character.
  while (cut && end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  std::string shown = "\"";
  for (const char c : printable(text.substr(0, end))) {
    if (c == '\n')
      shown += "\\n";
    else if (c == '\t')
      shown += "\\t";
    else
      shown += c;
  }
  return cut ? shown + fmt::format("...\" ({} bytes)", text.size()) : shown + '"';
}

std::string count_of(unsigned long long count, std::string_view word, std::string_view plural) {
  if (count == 1) return fmt::format("1 {}", word);
  return plural.empty() ? fmt::format("{} {}s", count, word) : fmt::format("{} {}", count, plural);
}

}  // namespace penstock
