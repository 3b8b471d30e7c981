// Which tokens are trained on when: sample number `position` of a run, as a pure function.
//
// A run consumes samples 0, 1, 2, ... in all its ranks together. That one number is the whole state of the data: the
// sample at a position depends on the dataset, the context and the seed alone, not on how many ranks there are, how the
// batch is divided among them, or how many samples a step takes. So a run continues exactly from a saved position under
// any layout and with any batch size.
//
//   Sampler sampler(dataset, {.context = 256, .seed = 1});
//   Batch batch;
//   sampler.fill(position, 8, batch);                 // samples position .. position + 7
//
// How a sample is made: the documents lie end to end in a ring (a document of the dataset's end is followed by its
// first). In epoch e the ring is cut into samples_per_epoch() windows of `context` tokens, beginning at a keyed random
// token so that other epochs cut elsewhere, and the windows are taken in a keyed random order (KeyedPermutation): every
// window once an epoch, with no table. Less than one window, a different one each epoch, is left over.
// The target of a token is the token after it, and kIgnored where that one belongs to another document.
//
// Immutable; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "penstock/train/data/token_dataset.h"

namespace penstock::train {

// A target that the loss leaves out.
inline constexpr std::int64_t kIgnored = -100;

// Samples of equal length, one after the other (row-major, samples x context).
struct Batch {
  std::uint64_t position = 0;  // of the first sample
  std::int64_t samples = 0;
  std::int64_t context = 0;
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> targets;
  // Equal numbers within a sample: the same document. For masks; what else the numbers say: TokenDataset::read (those that
  // come round the end of the ring are counted on from document_numbers()).
  std::vector<std::int64_t> documents;
};

struct SamplerOptions {
  std::int64_t context = 0;
  std::uint64_t seed = 0;
  bool shuffle = true;  // false: the windows in order from token 0, in every epoch; for validation
};

// So many tokens of `of_tokens` are on one side of a split.
struct TokenAmount {
  std::string name;  // for messages: "validation tokens of input.txt"
  DataSplit split = DataSplit::All;
  std::uint64_t tokens = 0;
  std::uint64_t of_tokens = 0;
};
// Throws ConfigError unless a sample can be cut from them: more than `context`.
void check_enough_tokens(const TokenAmount& amount, std::int64_t context);

class Sampler {
 public:
  // Throws ValueError for a context below 1, ConfigError when the dataset has not more tokens than the context.
  Sampler(std::shared_ptr<const TokenDataset> dataset, SamplerOptions options);

  const TokenDataset& dataset() const { return *dataset_; }
  const SamplerOptions& options() const { return options_; }
  std::uint64_t samples_per_epoch() const { return windows_; }
  std::uint64_t epoch_of(std::uint64_t position) const { return position / windows_; }
  // The token of the ring that the sample begins with.
  std::uint64_t first_token(std::uint64_t position) const;

  // One sample; each span has `context` places.
  void sample(std::uint64_t position, std::span<std::int64_t> tokens, std::span<std::int64_t> targets,
              std::span<std::int64_t> documents) const;
  // Samples position .. position + samples - 1; the vectors of the batch are reused.
  void fill(std::uint64_t position, std::int64_t samples, Batch& batch) const;

 private:
  std::shared_ptr<const TokenDataset> dataset_;
  SamplerOptions options_;
  std::uint64_t windows_;
};

// The part of a round of `samples` global samples that one of `dp` data-parallel ranks takes: consecutive ones, so that
// the ranks in order make up the round. Throws ValueError unless dp divides the samples.
struct SampleShare {
  std::uint64_t offset = 0;  // from the round's first sample
  std::int64_t samples = 0;
};
SampleShare sample_share(std::int64_t samples, int dp_rank, int dp);

}  // namespace penstock::train
