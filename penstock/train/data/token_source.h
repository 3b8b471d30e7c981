// Interface of token files: a token shard (token_shard.h) or a token file of another program (bin_tokens.h).
//
// Immutable; any number of threads may read.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace penstock::train {

class TokenSource {
 public:
  struct Document {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t key = 0;  // checksum of the document's path
  };

  virtual ~TokenSource() = default;

  // The path, for messages.
  virtual const std::string& name() const = 0;
  virtual std::uint64_t tokens() const = 0;
  // All tokens are below it.
  virtual std::uint64_t vocabulary() const = 0;
  virtual std::optional<std::uint32_t> end_of_document() const = 0;
  // Returns whether only the tokens mark the ends of documents. If true, document() returns ranges of many
  // documents, and a reader finds the ends by looking for end_of_document().
  virtual bool ends_are_in_tokens() const = 0;

  virtual std::uint64_t documents() const = 0;
  // Throws ValueError for an index out of range. Documents are consecutive, not empty, and cover all tokens.
  virtual Document document(std::uint64_t index) const = 0;

  // Reads tokens [begin, begin + out.size()). Throws ValueError outside the source, and ConfigError that
  // names the source for damage and for tokens that are not below the vocabulary.
  virtual void read(std::uint64_t begin, std::span<std::int64_t> out) const = 0;
  // Reads and checks everything. Throws ConfigError for the first damage.
  virtual void verify() const = 0;

  // Identifies the contents: a saved position is valid only for the same fingerprint. What it covers depends
  // on the kind.
  virtual std::uint64_t fingerprint() const = 0;
};

}  // namespace penstock::train
