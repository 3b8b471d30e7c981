// A file of tokens and document boundaries, mapped into memory (format: token_shard_format.h).
//
//   const auto shard = TokenShard::open("data/shard-00000.tokens");
//   std::vector<std::int64_t> tokens(128);
//   shard->read(0, tokens);                        // tokens 0 to 127
//   shard->document_of(100);                       // the document of token 100
//
// The file is not trusted: opening checks the header, the size, the checksum table and the documents; reading
// checks the checksum of each block on its first use, and that tokens are below the vocabulary. For a damaged
// file, ConfigError names the file and the position.
//
// Immutable; any number of threads may read. The file must not be truncated while it is mapped (the kernel
// would kill the process): replace shards by rename, as the writer does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "penstock/base/mapped_file.h"
#include "penstock/train/data/token_shard_format.h"
#include "penstock/train/data/token_source.h"

namespace penstock::train {

class TokenShard final : public TokenSource {
 public:
  static std::shared_ptr<const TokenShard> open(const std::filesystem::path& path);
  // Reads from bytes that the caller keeps alive; `name` is for messages.
  static std::shared_ptr<const TokenShard> over(std::span<const std::uint8_t> bytes, std::string name);

  const TokenShardHeader& header() const { return header_; }
  const std::string& name() const override { return name_; }
  std::uint64_t tokens() const override { return header_.tokens; }
  std::uint64_t vocabulary() const override { return header_.vocabulary; }
  std::optional<std::uint32_t> end_of_document() const override { return header_.end_of_document; }
  bool ends_are_in_tokens() const override { return false; }
  std::uint64_t documents() const override { return header_.documents; }
  // Covers the whole contents: shards with equal fingerprints have the same tokens and documents.
  std::uint64_t fingerprint() const override { return fingerprint_; }

  Document document(std::uint64_t index) const override;
  // Throws ValueError for a token out of range.
  std::uint64_t document_of(std::uint64_t token) const;
  void read(std::uint64_t begin, std::span<std::int64_t> out) const override;
  // Checks every checksum and every token.
  void verify() const override;

 private:
  TokenShard(MappedFile file, std::span<const std::uint8_t> bytes, std::string name);
  std::uint64_t number_at(std::uint64_t offset) const;
  void check_documents() const;
  // Checks bytes [begin, end) of the file, which are in the body.
  void check_blocks(std::uint64_t begin, std::uint64_t end) const;
  void check_block(std::uint64_t block) const;

  MappedFile file_;  // empty if the caller owns the bytes
  std::span<const std::uint8_t> bytes_;
  std::string name_;
  TokenShardHeader header_;
  std::uint64_t fingerprint_ = 0;
  std::unique_ptr<std::atomic<bool>[]>
      checked_;  // per block; two threads may harmlessly check the same block
};

}  // namespace penstock::train
