#include "penstock/models/plan/pattern.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <cstddef>
#include <optional>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

struct Letter {
  BlockKind kind;
  char letter;
  const char* name;
};
constexpr std::array<Letter, 4> kLetters{{{BlockKind::Attention, 'A', "attention"},
                                          {BlockKind::StateSpace, 'M', "state space"},
                                          {BlockKind::Experts, 'E', "experts"},
                                          {BlockKind::FeedForward, 'F', "feed-forward"}}};

std::optional<BlockKind> kind_of(char letter) {
  for (const Letter& each : kLetters)
    if (each.letter == letter) return each.kind;
  return std::nullopt;
}

}  // namespace

char letter_of(BlockKind kind) { return kLetters.at(static_cast<std::size_t>(kind)).letter; }
const char* name_of(BlockKind kind) { return kLetters.at(static_cast<std::size_t>(kind)).name; }

BlockPattern parse_pattern(std::string_view text) {
  BlockPattern pattern;
  const auto where = [&](std::size_t at) {
    return fmt::format("pattern \"{}\", character {}", text, at + 1);
  };
  std::size_t stage_begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char letter = text[i];
    if (letter == ' ') continue;
    if (const auto kind = kind_of(letter)) {
      pattern.blocks.push_back(*kind);
    } else if (letter == '|') {
      if (pattern.blocks.size() == stage_begin)
        throw ConfigError(describe(where(i), "a stage without blocks", "at least one letter before '|'"));
      stage_begin = pattern.blocks.size();
      pattern.boundaries.push_back(static_cast<int>(stage_begin));
    } else {
      const std::string shown = std::isprint(static_cast<unsigned char>(letter)) != 0
                                    ? std::string(1, letter)
                                    : fmt::format("\\x{:02x}", static_cast<unsigned char>(letter));
      throw ConfigError(describe(
          where(i), fmt::format("'{}'", shown),
          "A (attention), M (state space), E (experts), F (feed-forward) or '|' for the end of a stage"));
    }
  }
  if (pattern.blocks.empty())
    throw ConfigError(describe(fmt::format("pattern \"{}\"", text), "no blocks",
                               "letters A, M, E and F, for example AAAA or AE|ME"));
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
    text += letter_of(pattern.blocks[i]);
  }
  return text;
}

}  // namespace penstock::models
