#include "penstock/train/data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/philox.h"  // plain integers: nothing of Torch in it
#include "penstock/errors.h"
#include "penstock/train/data/byte_tokenizer.h"
#include "penstock/train/data/keyed_permutation.h"

namespace penstock::train {

namespace {

constexpr std::uint64_t kRotatePurpose = 0x524F54415445ULL;

}  // namespace

void check_enough_tokens(const TokenAmount& amount, std::int64_t context) {
  const auto least = static_cast<std::uint64_t>(context) + 1;
  if (amount.tokens >= least) return;
  std::string remedy = "give more text or lower model.context";
  // The smallest sufficient fraction, in thousandths.
  const std::uint64_t thousandths =
      amount.of_tokens == 0 ? 1000 : (1000 * least + amount.of_tokens - 1) / amount.of_tokens;
  if (amount.split == DataSplit::Validation && thousandths <= 500)
    remedy = fmt::format(
        "raise data.validation_fraction to {}, or train without validation (--validation_fraction 0 "
        "--validate_every 0)",
        static_cast<double>(thousandths) / 1000);
  throw ConfigError(describe(amount.name, fmt::format("{}", amount.tokens),
                             fmt::format("more than the context of {}", context), remedy));
}

Sampler::Sampler(std::shared_ptr<const TokenDataset> dataset, SamplerOptions options)
    : dataset_(std::move(dataset)), options_(options) {
  if (options_.context < 1)
    throw ValueError(describe("context", fmt::format("{}", options_.context), "a number of at least 1"));
  const auto context = static_cast<std::uint64_t>(options_.context);
  check_enough_tokens({.name = dataset_->name(),
                       .split = dataset_->split(),
                       .tokens = dataset_->tokens(),
                       .of_tokens = dataset_->tokens_of_all_splits()},
                      options_.context);
  windows_ = dataset_->tokens() / context;
  if (!options_.cpp_structure) return;
  if (dataset_->vocabulary() != byte_tokenizer::kVocabulary)
    throw ConfigError(
        describe("data.structure",
                 fmt::format("cpp, for {} with a vocabulary of {}", dataset_->name(), dataset_->vocabulary()),
                 "byte tokens, made of text by Penstock", "set data.structure to none, or train on text"));
  structure_ = std::make_unique<StructureReader>();
}

std::uint64_t Sampler::first_token(std::uint64_t position) const {
  const std::uint64_t epoch = position / windows_;
  const std::uint64_t place = position % windows_;
  const auto context = static_cast<std::uint64_t>(options_.context);
  if (!options_.shuffle) return place * context;
  const philox::Stream stream = philox::derive(options_.seed, epoch, 0, 0, kRotatePurpose);
  const philox::Block block = philox::numbers(stream, 0);
  // The bias of the remainder is below 2^-16 for any dataset in a shard; only the position of the cut depends
  // on it.
  const std::uint64_t start = (std::uint64_t{block.word[0]} << 32 | block.word[1]) % dataset_->tokens();
  const std::uint64_t window = KeyedPermutation(windows_, options_.seed, epoch)(place);
  return (start + window * context) % dataset_->tokens();
}

void Sampler::sample(std::uint64_t position, std::span<std::int64_t> tokens, std::span<std::int64_t> targets,
                     std::span<std::int64_t> documents) const {
  const auto context = static_cast<std::size_t>(options_.context);
  if (tokens.size() != context || targets.size() != context || documents.size() != context)
    throw ValueError(describe("buffers for a sample",
                              fmt::format("{}, {}, {}", tokens.size(), targets.size(), documents.size()),
                              fmt::format("{} elements each, the context", context)));
  const std::uint64_t first = first_token(position);
  // Includes the token after the last one: document numbers can be compared only within one call of read().
  std::vector<std::int64_t> read_tokens(context + 1), read_documents(context + 1);
  // First the part up to the end of the ring, then the part from its beginning, which counts as other
  // documents.
  const auto before =
      static_cast<std::size_t>(std::min<std::uint64_t>(context + 1, dataset_->tokens() - first));
  dataset_->read(first, std::span(read_tokens).first(before), std::span(read_documents).first(before));
  dataset_->read(0, std::span(read_tokens).subspan(before), std::span(read_documents).subspan(before));
  for (std::size_t i = before; i <= context; ++i) read_documents[i] += dataset_->document_numbers();
  for (std::size_t i = 0; i < context; ++i) {
    tokens[i] = read_tokens[i];
    documents[i] = read_documents[i];
    targets[i] = read_documents[i + 1] == read_documents[i] ? read_tokens[i + 1] : kIgnored;
  }
}

void Sampler::structure(std::uint64_t position, std::span<TokenStructure> found) const {
  if (!structure_) throw StateError("Sampler::structure: the sampler was made without options.cpp_structure");
  const auto context = static_cast<std::uint64_t>(options_.context);
  if (found.size() != context)
    throw ValueError(describe("buffer for the structure of a sample", fmt::format("{}", found.size()),
                              fmt::format("{} elements, the context", context)));
  const std::uint64_t first = first_token(position);
  const std::uint64_t before = std::min(context, dataset_->tokens() - first);  // up to the end of the ring
  std::size_t done = 0;
  const auto add = [&](std::uint64_t begin, std::uint64_t count) {
    for (const DocumentPart& part : dataset_->parts(begin, count)) {
      structure_->read(part, found.subspan(done, part.tokens));
      done += part.tokens;
    }
  };
  add(first, before);
  add(0, context - before);
}

void Sampler::fill(std::uint64_t position, std::int64_t samples, Batch& batch) const {
  if (samples < 1)
    throw ValueError(describe("samples per batch", fmt::format("{}", samples), "a number of at least 1"));
  const auto context = static_cast<std::size_t>(options_.context);
  const auto count = static_cast<std::size_t>(samples);
  batch.position = position;
  batch.samples = samples;
  batch.context = options_.context;
  batch.tokens.resize(count * context);
  batch.targets.resize(count * context);
  batch.documents.resize(count * context);
  batch.structure.resize(structure_ ? count * context : 0);
  for (std::size_t i = 0; i < count; ++i) {
    const auto row = [&](std::vector<std::int64_t>& values) {
      return std::span(values).subspan(i * context, context);
    };
    sample(position + i, row(batch.tokens), row(batch.targets), row(batch.documents));
    if (structure_) structure(position + i, std::span(batch.structure).subspan(i * context, context));
  }
}

SampleShare sample_share(std::int64_t samples, int dp_rank, int dp) {
  if (dp < 1 || dp_rank < 0 || dp_rank >= dp)
    throw ValueError(describe("data-parallel rank", fmt::format("{} of {}", dp_rank, dp),
                              "a rank from 0 to the number of ranks minus 1"));
  if (samples < 1 || samples % dp != 0)
    throw ValueError(describe("samples per round", fmt::format("{}", samples),
                              fmt::format("a positive multiple of the {} data-parallel ranks", dp)));
  const std::int64_t share = samples / dp;
  return {static_cast<std::uint64_t>(share) * static_cast<std::uint64_t>(dp_rank), share};
}

}  // namespace penstock::train
