// The documents of many token sources as one sequence of tokens, either those for training or those for validation.
//
//   const auto training = TokenDataset::open("data", DataSplit::Training, 0.05);
//   training->tokens();                               // of the training documents, end to end
//   training->read(0, tokens, documents);             // tokens and, for each, its document
//
// Which tokens are for validation: document_split.h. Where documents are cut, each side's part of one counts as a document of its own, so
// that no target crosses the cut.
//
// Immutable; any thread. Memory: 24 bytes a document; tokens stay in the mapped files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "penstock/train/data/document_split.h"
#include "penstock/train/data/token_shard.h"
#include "penstock/train/data/token_source.h"

namespace penstock::train {

enum class DataSplit { All, Training, Validation };

const char* to_text(DataSplit split);

// What shards are called; sorted by name, they are read in that order.
inline constexpr const char* kShardExtension = ".tokens";
// Whether this is a folder that has some.
bool has_shards(const std::filesystem::path& folder);
// The shards of a folder. Throws ConfigError when it is no folder or has none.
std::vector<std::filesystem::path> shard_files(const std::filesystem::path& folder);

using TokenSources = std::vector<std::shared_ptr<const TokenSource>>;
TokenSources open_shards(const std::filesystem::path& folder);

class TokenDataset {
 public:
  // Throws ConfigError for damaged sources, sources of different vocabularies and a split without tokens.
  TokenDataset(TokenSources sources, DataSplit split, double validation_fraction);
  // Of a folder of token shards.
  static std::shared_ptr<const TokenDataset> open(const std::filesystem::path& folder, DataSplit split,
                                                  double validation_fraction);

  DataSplit split() const { return split_; }
  // "training tokens of data/shard-00000.tokens", for messages.
  std::string name() const;
  std::uint64_t tokens() const { return tokens_; }
  std::uint64_t tokens_of_all_splits() const { return all_tokens_; }
  // Parts of documents where these are cut; files where the ends of documents are found by their tokens.
  std::uint64_t documents() const { return spans_.size(); }
  std::uint64_t vocabulary() const { return sources_.front()->vocabulary(); }
  // Changes with any token, document, fraction or split (of files without checksums: with what bin_tokens.h says): a saved position is only
  // good for the same fingerprint.
  std::uint64_t fingerprint() const { return fingerprint_; }

  // Tokens [begin, begin + tokens.size()), and for each the number of its document. Both spans have the same size. Throws ValueError outside
  // the dataset. Numbers are below document_numbers(), and equal for tokens of the same document. They are the indices of the documents, the
  // same in every call, unless the ends of documents are found by their tokens: these numbers can be compared within one call only.
  void read(std::uint64_t begin, std::span<std::int64_t> tokens, std::span<std::int64_t> documents) const;
  std::int64_t document_numbers() const { return static_cast<std::int64_t>(spans_.size()) * numbers_each_; }

 private:
  struct Span {
    std::uint64_t begin;         // in this dataset
    std::uint64_t source_begin;  // in its source
    std::uint64_t source;
  };
  TokenSources sources_;
  DataSplit split_;
  std::vector<Span> spans_;  // of each document, in order
  std::uint64_t tokens_ = 0;
  std::uint64_t all_tokens_ = 0;
  std::int64_t numbers_each_ = 1;  // numbers that the documents inside a span have
  std::uint64_t fingerprint_ = 0;
};

}  // namespace penstock::train
