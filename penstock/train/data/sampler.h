// Maps a sample number of a run to its tokens, as a pure function.
//
// All ranks of a run together consume samples 0, 1, 2, ... This position is the whole state of the data: the
// sample at a position depends only on the dataset, the context and the seed, not on the number of ranks, the
// division of the batch among them, or the samples per step. A run therefore continues exactly from a saved
// position in any layout and with any batch size.
//
//   Sampler sampler(dataset, {.context = 256, .seed = 1});
//   Batch batch;
//   sampler.fill(position, 8, batch);                 // samples position .. position + 7
//
// How a sample is made: the documents form a ring (the last document of the dataset is followed by the
// first). In epoch e, the ring is cut into samples_per_epoch() windows of `context` tokens, starting at a
// keyed random token so that epochs are cut differently, and the windows are visited in a keyed random order
// (KeyedPermutation): each window once per epoch, without a table. Less than one window, a different one in
// each epoch, is unused. The target of a token is the next token, or kIgnored if that belongs to another
// document.
//
// Immutable, except for what is kept to find structure again faster. Thread safety: any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "penstock/train/data/structure_reader.h"
#include "penstock/train/data/token_dataset.h"
#include "penstock/train/data/token_structure.h"

namespace penstock::train {

// A target that the loss ignores.
inline constexpr std::int64_t kIgnored = -100;

// Samples of equal length, one after the other (row-major, samples x context).
struct Batch {
  std::uint64_t position = 0;  // of the first sample
  std::int64_t samples = 0;
  std::int64_t context = 0;
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> targets;
  // Equal numbers within a sample mean the same document. For masks; see TokenDataset::read for the numbers
  // (those after the end of the ring continue from document_numbers()).
  std::vector<std::int64_t> documents;
  // One for each token; empty unless the sampler finds structure.
  std::vector<TokenStructure> structure;
};

struct SamplerOptions {
  std::int64_t context = 0;
  std::uint64_t seed = 0;
  bool shuffle = true;         // false: windows in order from token 0 in every epoch, for validation
  bool cpp_structure = false;  // the documents are C++ text: find the structure of their bytes
};

// Number of tokens on one side of a split, out of `of_tokens`.
struct TokenAmount {
  std::string name;  // for messages: "validation tokens of input.txt"
  DataSplit split = DataSplit::All;
  std::uint64_t tokens = 0;
  std::uint64_t of_tokens = 0;
};
// Throws ConfigError unless there are more than `context` tokens, so that a sample can be cut.
void check_enough_tokens(const TokenAmount& amount, std::int64_t context);

class Sampler {
 public:
  // Throws ValueError for a context below 1, ConfigError if the dataset has no more tokens than the context,
  // and for the structure of tokens that are not bytes.
  Sampler(std::shared_ptr<const TokenDataset> dataset, SamplerOptions options);

  const TokenDataset& dataset() const { return *dataset_; }
  const SamplerOptions& options() const { return options_; }
  std::uint64_t samples_per_epoch() const { return windows_; }
  std::uint64_t epoch_of(std::uint64_t position) const { return position / windows_; }
  // Returns the token of the ring at which the sample begins.
  std::uint64_t first_token(std::uint64_t position) const;

  // Fills one sample; each span has `context` elements.
  void sample(std::uint64_t position, std::span<std::int64_t> tokens, std::span<std::int64_t> targets,
              std::span<std::int64_t> documents) const;
  // Finds the structure of the tokens of one sample, that of their whole documents: `found` has `context`
  // elements. Throws StateError unless options().cpp_structure.
  void structure(std::uint64_t position, std::span<TokenStructure> found) const;
  // Fills samples position .. position + samples - 1; reuses the vectors of the batch.
  void fill(std::uint64_t position, std::int64_t samples, Batch& batch) const;

 private:
  std::shared_ptr<const TokenDataset> dataset_;
  SamplerOptions options_;
  std::uint64_t windows_;
  std::unique_ptr<StructureReader> structure_;  // null: no structure
};

// The part of a round of `samples` global samples for one of `dp` data-parallel ranks: consecutive samples,
// so that the ranks in order make up the round. Throws ValueError unless dp divides the samples.
struct SampleShare {
  std::uint64_t offset = 0;  // from the round's first sample
  std::int64_t samples = 0;
};
SampleShare sample_share(std::int64_t samples, int dp_rank, int dp);

}  // namespace penstock::train
