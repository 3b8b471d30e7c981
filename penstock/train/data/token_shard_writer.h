// Writes a token shard. Nothing is seen under its name before `finish`: the bytes go to a temporary file beside it, which
// is made durable (fsync) and then renamed; a crash leaves either the whole shard or none.
//
//   TokenShardWriter writer("data/shard-00000.tokens", {.vocabulary = 257, .end_of_document = 256});
//   writer.add_document(tokens, key);              // ends it with the end-of-document token
//   writer.add_tokens(piece);                      // or piece by piece, for documents larger than memory
//   writer.end_document(key);
//   writer.finish();
//
// Memory: one block, one piece and 16 bytes a document. One thread. Failures of the file system are ConfigErrors that name the file.
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
  std::uint32_t token_bytes = 0;  // 0: the least that holds the vocabulary
  std::uint64_t block_bytes = kShardBlockBytes;
};

class TokenShardWriter {
 public:
  // Throws ValueError for options that contradict each other, ConfigError when the file cannot be made.
  TokenShardWriter(std::filesystem::path path, const TokenShardOptions& options);
  // Without `finish` the temporary file is removed.
  ~TokenShardWriter();
  TokenShardWriter(const TokenShardWriter&) = delete;
  TokenShardWriter& operator=(const TokenShardWriter&) = delete;

  // Throws ValueError for a token that is not below the vocabulary, and for an end of document inside.
  void add_document(std::span<const std::uint32_t> tokens, std::uint64_t key);
  // Throws like add_document, before any of the piece is written. The document is only one after end_document.
  void add_tokens(std::span<const std::uint32_t> tokens);
  void end_document(std::uint64_t key);
  // Including the ends of documents.
  std::uint64_t tokens() const { return header_.tokens; }
  std::uint64_t documents() const { return header_.documents; }
  // Throws StateError without a document, inside one, or when called twice.
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
  bool inside_ = false;  // a document that has not ended
  TokenShardHeader header_;
  std::uint64_t written_ = kShardHeaderBytes;  // the header comes last, when the counts are known
  std::vector<std::uint8_t> block_;
  std::vector<std::uint8_t> encoded_;
  std::vector<std::uint64_t> documents_;  // (end, key) of each
  std::vector<std::uint64_t> checksums_;
};

}  // namespace penstock::train
