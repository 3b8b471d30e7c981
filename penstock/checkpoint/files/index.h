// index.json: the files of a checkpoint and the checksums of their blocks. Written last, so a folder without
// a valid index is not a checkpoint. Specified in docs/checkpoints.md.
//
// The text of an index is canonical: reading accepts exactly what writing produces, including the checksum
// over the text itself. Any changed byte is therefore detected.
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
  std::vector<std::uint64_t> checksums;  // one per block; the last block may be shorter

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
// Throws CheckpointError for malformed text; `where` names the file.
Index parse_index(std::string_view text, const std::string& where);

}  // namespace penstock::checkpoint
