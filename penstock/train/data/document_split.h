// Decides which tokens are used for training and which for validation.
//
//   DocumentSplit split(0.05);
//   for (each document) split.count(tokens, key);
//   split.decide();
//   for (each document, in the same order) validation = split.validation_tokens(tokens, key);  // at its end
//
// If possible, documents are assigned as a whole: a document is for validation if the upper half of its key,
// as a fraction of 2^32, is below the validation fraction. Adding files later then moves nothing between the
// sides. This is used if each side gets between half and twice its intended size, which fails with few
// documents or with one that is most of the text. Then every document is cut: its last tokens are for
// validation, together the fraction of all tokens, rounded down.
//
// Either way each token is on one side, and the same documents in the same order always produce the same
// split.
#pragma once

#include <cstdint>

namespace penstock::train {

// Returns whether a document with this key is for validation. Throws ValueError unless the fraction is from 0
// (none) to 1 (all).
bool is_validation(std::uint64_t key, double validation_fraction);

class DocumentSplit {
 public:
  explicit DocumentSplit(double validation_fraction);

  void count(std::uint64_t tokens, std::uint64_t key);
  // Call it after all documents were counted.
  void decide();
  // Returns whether documents are cut.
  bool cuts() const { return cuts_; }
  std::uint64_t tokens() const { return tokens_; }  // on both sides

  // Returns how many tokens at the end of the next document are for validation.
  std::uint64_t validation_tokens(std::uint64_t tokens, std::uint64_t key);

 private:
  double fraction_;
  std::uint64_t tokens_ = 0;
  std::uint64_t by_key_ = 0;  // tokens for validation if assigned by key
  std::uint64_t passed_ = 0;  // tokens of the documents passed to validation_tokens()
  bool cuts_ = false;
};

}  // namespace penstock::train
