// Which tokens are for training and which for validation.
//
//   DocumentSplit split(0.05);
//   for (each document) split.count(tokens, key);
//   split.decide();
//   for (each document, in the same order) validation = split.validation_tokens(tokens, key);   // its last ones; those before are for training
//
// By document where that works: a document is for validation as a whole if the upper half of its key, as a share of 2^32, is below the
// fraction. Files added later then move nothing from one side to the other. It works where each side gets from half of to twice what it
// should. With few documents, or with one that is most of the text, it does not. Then every document is cut: its last tokens are for
// validation, the fraction of all tokens together, rounded down.
//
// Either way a token is on one side, and the same documents in the same order always give the same cuts.
#pragma once

#include <cstdint>

namespace penstock::train {

// Whether a document with this key is for validation. Fraction: from 0 (none) to 1 (all), else ValueError.
bool is_validation(std::uint64_t key, double validation_fraction);

class DocumentSplit {
 public:
  explicit DocumentSplit(double validation_fraction);

  void count(std::uint64_t tokens, std::uint64_t key);
  // After all were counted.
  void decide();
  // Whether documents are cut.
  bool cuts() const { return cuts_; }
  std::uint64_t tokens() const { return tokens_; }  // of both sides

  // Of the next document: so many of its tokens, the last ones, are for validation.
  std::uint64_t validation_tokens(std::uint64_t tokens, std::uint64_t key);

 private:
  double fraction_;
  std::uint64_t tokens_ = 0;
  std::uint64_t by_key_ = 0;  // those for validation by their documents' keys
  std::uint64_t passed_ = 0;  // tokens of the documents that validation_tokens() was asked for
  bool cuts_ = false;
};

}  // namespace penstock::train
