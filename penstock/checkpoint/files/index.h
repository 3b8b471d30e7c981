// index.json: what files a checkpoint has, and the checksums of their blocks. Written last, so a folder without a sound index is
// no checkpoint. docs/checkpoints.md specifies it.
//
// The text of an index is one of a kind: reading accepts exactly what writing gives, including the checksum over the text itself.
// Any changed byte is therefore noticed. Values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::checkpoint {

inline constexpr int kFormatVersion = 1;

struct IndexedFile {
  std::string name;
  std::string section;  // "model", "optimizer" or "state"
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> checksums;  // one per block; the last one may be shorter

  friend bool operator==(const IndexedFile&, const IndexedFile&) = default;
};

struct Index {
  std::int64_t step = 0;
  std::uint64_t block_bytes = 0;
  std::vector<IndexedFile> files;

  friend bool operator==(const Index&, const Index&) = default;
};

std::uint64_t block_count(std::uint64_t bytes, std::uint64_t block_bytes);

std::string to_text(const Index& index);
// Throws CheckpointError for anything but the text of an index; `where` names the file.
Index parse_index(std::string_view text, const std::string& where);

}  // namespace penstock::checkpoint
