// Writes a token shard. The file appears under its name only after `finish`: the bytes are written to a
// temporary file next to it, which is synced (fsync) and then renamed; a crash leaves either the whole shard
// or none.
//
//   TokenShardWriter writer("data/shard-00000.tokens", {.vocabulary = 257, .end_of_document = 256});
//   writer.add_document(tokens, key);              // appends the end-of-document token
//   writer.add_tokens(piece);                      // or piece by piece, for documents larger than memory
//   writer.end_document(key);
//   writer.finish();
//
// Memory: one block, one piece and 16 bytes per document. Thread safety: one thread. File system errors are
// ConfigErrors that name the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "penstock/train/data/token_shard_format.h"

namespace penstock::train {

struct TokenShardOptions {
  std::uint64_t vocabulary = 0;
  std::uint32_t end_of_document = 0;
  std::uint32_t token_bytes = 0;  // 0: the smallest size that holds the vocabulary
  std::uint64_t block_bytes = kShardBlockBytes;
};

class TokenShardWriter {
 public:
  // Throws ValueError for contradictory options, ConfigError if the file cannot be created.
  TokenShardWriter(std::filesystem::path path, const TokenShardOptions& options);
  // Removes the temporary file unless `finish` was called.
  ~TokenShardWriter();
  TokenShardWriter(const TokenShardWriter&) = delete;
  TokenShardWriter& operator=(const TokenShardWriter&) = delete;

  // Throws ValueError for a token that is not below the vocabulary, and for an end-of-document token inside.
  void add_document(std::span<const std::uint32_t> tokens, std::uint64_t key);
  // Throws like add_document, before anything of the piece is written. The document is complete after
  // end_document.
  void add_tokens(std::span<const std::uint32_t> tokens);
  void end_document(std::uint64_t key);
  // Includes the end-of-document tokens.
  std::uint64_t tokens() const { return header_.tokens; }
  std::uint64_t documents() const { return header_.documents; }
  // Throws StateError if there is no document, inside a document, and in a second call.
  TokenShardHeader finish();

 private:
  void put(std::span<const std::uint32_t> tokens);
  void append(const void* data, std::size_t size);
  void flush_block();
  void write_all(const void* data, std::size_t size, std::uint64_t offset);
  [[noreturn]] void fail(const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int file_ = -1;
  bool finished_ = false;
  bool inside_ = false;  // a document has been started but not ended
  TokenShardHeader header_;
  std::uint64_t written_ = kShardHeaderBytes;  // the header is written last, when the counts are known
  std::vector<std::uint8_t> block_;
  std::vector<std::uint8_t> encoded_;
  std::vector<std::uint64_t> documents_;  // (end, key) of each
  std::vector<std::uint64_t> checksums_;
};

}  // namespace penstock::train
