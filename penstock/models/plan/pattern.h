// Block patterns: one letter per block, '|' where a stage ends.
//
//   parse_pattern("AA|AA|A");      // five blocks, stages begin at 2 and 4
//   parse_pattern("AAAA");         // four blocks, no cuts: the stages are chosen elsewhere
//
// A is an attention block, M state space, E experts, F feed-forward. Spaces are ignored.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace penstock::models {

enum class BlockKind { Attention, StateSpace, Experts, FeedForward };

// 'A', 'M', 'E' or 'F'.
char letter_of(BlockKind kind);
// "attention", "state space", "experts" or "feed-forward".
const char* name_of(BlockKind kind);

struct BlockPattern {
  std::vector<BlockKind> blocks;
  std::vector<int> boundaries;  // the first blocks of stages 1, 2, ...; empty: no cuts
  bool has_cuts() const { return !boundaries.empty(); }
  int stages() const { return static_cast<int>(boundaries.size()) + 1; }
  bool operator==(const BlockPattern&) const = default;
};

// Throws ConfigError with the position of an unknown letter, an empty stage or an empty pattern.
BlockPattern parse_pattern(std::string_view text);
std::string to_text(const BlockPattern& pattern);

}  // namespace penstock::models
