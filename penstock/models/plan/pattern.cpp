#include "penstock/models/plan/pattern.h"

#include <fmt/format.h>

#include <cctype>
#include <cstddef>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {

BlockPattern parse_pattern(std::string_view text) {
  BlockPattern pattern;
  const auto where = [&](std::size_t at) {
    return fmt::format("pattern \"{}\", character {}", text, at + 1);
  };
  std::size_t stage_begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char letter = text[i];
    if (letter == ' ') continue;
    if (letter == 'A') {
      pattern.blocks.push_back(BlockKind::Attention);
    } else if (letter == '|') {
      if (pattern.blocks.size() == stage_begin)
        throw ConfigError(describe(where(i), "a stage without blocks", "at least one letter before '|'"));
      stage_begin = pattern.blocks.size();
      pattern.boundaries.push_back(static_cast<int>(stage_begin));
    } else if (letter == 'M' || letter == 'E') {
      throw NotImplemented(describe(where(i), letter == 'M' ? "M (state space)" : "E (experts)",
                                    "A (attention)", "blocks of this kind are not available yet: use A"));
    } else {
      const std::string shown = std::isprint(static_cast<unsigned char>(letter)) != 0
                                    ? std::string(1, letter)
                                    : fmt::format("\\x{:02x}", static_cast<unsigned char>(letter));
      throw ConfigError(
          describe(where(i), fmt::format("'{}'", shown), "A for a block or '|' for the end of a stage"));
    }
  }
  if (pattern.blocks.empty())
    throw ConfigError(
        describe(fmt::format("pattern \"{}\"", text), "no blocks", "letters A, for example AAAA or AA|AA"));
  if (pattern.blocks.size() == stage_begin)
    throw ConfigError(
        describe(where(text.size() - 1), "a last stage without blocks", "at least one letter after '|'"));
  return pattern;
}

std::string to_text(const BlockPattern& pattern) {
  std::string text;
  std::size_t next = 0;
  for (std::size_t i = 0; i < pattern.blocks.size(); ++i) {
    if (next < pattern.boundaries.size() && pattern.boundaries[next] == static_cast<int>(i)) {
      text += '|';
      ++next;
    }
    text += 'A';
  }
  return text;
}

}  // namespace penstock::models
