// The documents of many shards as one sequence of tokens, either those for training or those for validation.
//
//   const auto training = TokenDataset::open("data", Split::Training, 0.05);
//   training->tokens();                               // of the training documents, end to end
//   training->read(0, tokens, documents);             // tokens and, for each, its document
//
// The split is by file: a document belongs to validation when the checksum of its path (relative to the folder it was
// found under) is among the lowest `validation_fraction` of all checksums. So it depends neither on the machine, nor on
// the order, nor on which other files there are: files added later move nothing from one side to the other.
//
// Immutable; any thread. Memory: 24 bytes a document; tokens stay in the mapped files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "penstock/train/token_shard.h"

namespace penstock::train {

enum class Split { All, Training, Validation };

// Whether a document with this key is for validation. Fraction: from 0 (none) to 1 (all), else ValueError.
bool is_validation(std::uint64_t key, double validation_fraction);

// What shards are called; sorted by name, they are read in that order.
inline constexpr const char* kShardExtension = ".tokens";
// The shards of a folder. Throws ConfigError when it is no folder or has none.
std::vector<std::filesystem::path> shard_files(const std::filesystem::path& folder);

class TokenDataset {
 public:
  // Throws ConfigError for damaged shards, shards of different vocabularies and a split without documents.
  TokenDataset(std::vector<std::shared_ptr<const TokenShard>> shards, Split split, double validation_fraction);
  static std::shared_ptr<const TokenDataset> open(const std::filesystem::path& folder, Split split,
                                                  double validation_fraction);

  std::uint64_t tokens() const { return tokens_; }
  std::uint64_t documents() const { return spans_.size(); }
  std::uint64_t vocabulary() const { return shards_.front()->header().vocabulary; }
  std::uint32_t end_of_document() const { return shards_.front()->header().end_of_document; }
  // Changes with any token, document, fraction or split: a saved position is only good for the same fingerprint.
  std::uint64_t fingerprint() const { return fingerprint_; }

  // Tokens [begin, begin + tokens.size()), and for each the index of its document in this dataset. Both spans have the
  // same size. Throws ValueError outside the dataset.
  void read(std::uint64_t begin, std::span<std::int64_t> tokens, std::span<std::int64_t> documents) const;

 private:
  struct Span {
    std::uint64_t begin;        // in this dataset
    std::uint64_t shard_begin;  // in its shard
    std::uint64_t shard;
  };
  std::vector<std::shared_ptr<const TokenShard>> shards_;
  std::vector<Span> spans_;  // of each document, in order
  std::uint64_t tokens_ = 0;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace penstock::train
