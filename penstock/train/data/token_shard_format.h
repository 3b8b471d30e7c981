// The binary format of a token shard, version 1 (also in docs/data.md). All numbers are little-endian.
//
//   offset  bytes  field
//        0      8  magic "PNSKTOKS"
//        8      4  version, 1
//       12      4  bytes of a token: 1, 2 or 4
//       16      8  vocabulary: every token is below it
//       24      8  tokens
//       32      8  documents
//       40      8  bytes of a block: a power of two from 64 to 2^30
//       48      4  the token that ends a document
//       52      4  0
//       56      8  checksum of the table of block checksums
//       64      8  checksum of the bytes 0 to 63
//       72  body: the tokens, zeros up to a multiple of 8, then for each document (end, key), 8 bytes each
//                  table: 8 bytes for each block of the body, its checksum; the last block may be short
//
// Document d consists of the tokens [end of d-1, end of d); no document is empty, and the last one ends at
// the number of tokens. The key is the checksum of the document's path; it decides between training and
// validation. Nothing follows the table: a file of another size is refused. All checksums are
// checksum64() of penstock/base/checksum.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace penstock::train {

inline constexpr std::size_t kShardHeaderBytes = 72;
inline constexpr std::uint64_t kShardBlockBytes = std::uint64_t{1} << 20;
inline constexpr std::uint32_t kShardVersion = 1;
// Larger than any file, and small enough that sizes computed from it cannot overflow.
inline constexpr std::uint64_t kMostShardTokens = std::uint64_t{1} << 48;

struct TokenShardHeader {
  std::uint32_t token_bytes = 2;
  std::uint64_t vocabulary = 0;
  std::uint64_t tokens = 0;
  std::uint64_t documents = 0;
  std::uint64_t block_bytes = kShardBlockBytes;
  std::uint32_t end_of_document = 0;
  std::uint64_t table_checksum = 0;

  // Offsets of the parts.
  std::uint64_t documents_offset() const { return kShardHeaderBytes + (tokens * token_bytes + 7) / 8 * 8; }
  std::uint64_t table_offset() const { return documents_offset() + 16 * documents; }
  std::uint64_t body_bytes() const { return table_offset() - kShardHeaderBytes; }
  std::uint64_t blocks() const { return (body_bytes() + block_bytes - 1) / block_bytes; }
  std::uint64_t file_bytes() const { return table_offset() + 8 * blocks(); }

  friend bool operator==(const TokenShardHeader&, const TokenShardHeader&) = default;
};

// Returns 1, 2 or 4: the smallest size that holds every token. Throws ValueError for a vocabulary of 0 or
// above 2^32.
std::uint32_t least_token_bytes(std::uint64_t vocabulary);

// Throws ValueError unless every field is in range (the checks of `decode_shard_header`, for a writer).
void check_shard_header(const TokenShardHeader& header);

void encode_shard_header(const TokenShardHeader& header, std::span<std::uint8_t, kShardHeaderBytes> bytes);
// Throws ConfigError that begins with `name` unless this is a header of this version with a valid checksum
// and fields in range. Reads only the header.
TokenShardHeader decode_shard_header(std::span<const std::uint8_t> bytes, std::string_view name);

}  // namespace penstock::train
