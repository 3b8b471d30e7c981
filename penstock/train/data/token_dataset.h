// The documents of many token sources as one sequence of tokens, either for training or for validation.
//
//   const auto training = TokenDataset::open("data", DataSplit::Training, 0.05);
//   training->tokens();                               // of the training documents, end to end
//   training->read(0, tokens, documents);             // tokens and, for each, its document
//
// See document_split.h for the split. If documents are cut, each part counts as a separate document, so that
// no target crosses the cut.
//
// Immutable. Thread safety: any thread. Memory: 32 bytes per document; tokens stay in the mapped files.
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

// Consecutive tokens of one document.
struct DocumentPart {
  const TokenSource* source = nullptr;
  std::uint64_t document = 0;  // where the document begins in its source
  std::uint64_t begin = 0;     // of the part, in the source
  std::uint64_t tokens = 0;
};

enum class DataSplit { All, Training, Validation };

const char* to_text(DataSplit split);

// File name extension of shards; shards are read in name order.
inline constexpr const char* kShardExtension = ".tokens";
// Returns whether the folder contains shards.
bool has_shards(const std::filesystem::path& folder);
// Opens the shards of a folder. Throws ConfigError if it is not a folder or contains none.
std::vector<std::filesystem::path> shard_files(const std::filesystem::path& folder);

using TokenSources = std::vector<std::shared_ptr<const TokenSource>>;
TokenSources open_shards(const std::filesystem::path& folder);

class TokenDataset {
 public:
  // Throws ConfigError for damaged sources, sources of different vocabularies and a split without tokens.
  TokenDataset(TokenSources sources, DataSplit split, double validation_fraction);
  // Opens a folder of token shards.
  static std::shared_ptr<const TokenDataset> open(const std::filesystem::path& folder, DataSplit split,
                                                  double validation_fraction);

  DataSplit split() const { return split_; }
  // "training tokens of data/shard-00000.tokens", for messages.
  std::string name() const;
  std::uint64_t tokens() const { return tokens_; }
  std::uint64_t tokens_of_all_splits() const { return all_tokens_; }
  // Counts parts if documents are cut, and files if the tokens mark the ends of documents.
  std::uint64_t documents() const { return spans_.size(); }
  std::uint64_t vocabulary() const { return sources_.front()->vocabulary(); }
  // Changes with any token, document, fraction or split (for files without checksums, see bin_tokens.h): a
  // saved position is valid only for the same fingerprint.
  std::uint64_t fingerprint() const { return fingerprint_; }

  // Reads tokens [begin, begin + tokens.size()) and the document number of each. Both spans have the same
  // size. Throws ValueError outside the dataset. Numbers are below document_numbers() and equal for tokens of
  // the same document. They are document indices, the same in every call, unless the tokens mark the ends of
  // documents: then numbers are comparable only within one call.
  void read(std::uint64_t begin, std::span<std::int64_t> tokens, std::span<std::int64_t> documents) const;
  // Returns the documents, or parts of them, that tokens [begin, begin + count) consist of, in order. A
  // document that is cut is known from its own beginning. Throws ValueError outside the dataset.
  std::vector<DocumentPart> parts(std::uint64_t begin, std::uint64_t count) const;
  std::int64_t document_numbers() const { return static_cast<std::int64_t>(spans_.size()) * numbers_each_; }

 private:
  struct Span {
    std::uint64_t begin;         // in this dataset
    std::uint64_t source_begin;  // in its source
    std::uint64_t source;
    std::uint64_t document;  // begin of the whole document in its source
  };
  // The span that a token is in. Throws ValueError unless all `count` tokens from it are in the dataset.
  std::vector<Span>::const_iterator find_span(std::uint64_t begin, std::uint64_t count) const;
  std::uint64_t end_of(std::vector<Span>::const_iterator span) const;

  TokenSources sources_;
  DataSplit split_;
  std::vector<Span> spans_;  // of each document, in order
  std::uint64_t tokens_ = 0;
  std::uint64_t all_tokens_ = 0;
  std::int64_t numbers_each_ = 1;  // document numbers reserved per span
  std::uint64_t fingerprint_ = 0;
};

}  // namespace penstock::train
