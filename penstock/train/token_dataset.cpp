#include "penstock/train/token_dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "penstock/base/errors.h"
#include "penstock/train/checksum.h"

namespace penstock::train {

namespace {

const char* name_of(Split split) {
  switch (split) {
    case Split::All:
      return "all";
    case Split::Training:
      return "training";
    case Split::Validation:
      return "validation";
  }
  return "";
}

}  // namespace

bool is_validation(std::uint64_t key, double validation_fraction) {
  if (!(validation_fraction >= 0 && validation_fraction <= 1))
    throw ValueError(describe("validation fraction", fmt::format("{}", validation_fraction), "a number from 0 to 1"));
  // 32 bits of the key are exact in a double, the same on every machine.
  return static_cast<double>(key >> 32) < validation_fraction * 4294967296.0;
}

std::vector<std::filesystem::path> shard_files(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == kShardExtension) files.push_back(entry->path());
  }
  if (error)
    throw ConfigError(describe(fmt::format("{}: folder of token shards", folder.string()), error.message(),
                               "a folder that can be read", "make one with penstock data make --out FOLDER"));
  if (files.empty())
    throw ConfigError(describe(fmt::format("{}: token shards", folder.string()), "none",
                               fmt::format("at least one file that ends in {}", kShardExtension),
                               "make them with penstock data make --out FOLDER"));
  std::sort(files.begin(), files.end());
  return files;
}

TokenDataset::TokenDataset(std::vector<std::shared_ptr<const TokenShard>> shards, Split split,
                           double validation_fraction)
    : shards_(std::move(shards)) {
  if (shards_.empty()) throw ValueError(describe("dataset", "no shards", "at least one"));
  std::string identity = fmt::format("{} {:a}", name_of(split), split == Split::All ? 0.0 : validation_fraction);
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const TokenShard& shard = *shards_[i];
    if (shard.header().vocabulary != vocabulary() || shard.header().end_of_document != end_of_document())
      throw ConfigError(describe(
          fmt::format("{}: vocabulary", shard.name()),
          fmt::format("{} with end of document {}", shard.header().vocabulary, shard.header().end_of_document),
          fmt::format("{} with {} as in {}", vocabulary(), end_of_document(), shards_.front()->name()),
          "make all shards of a folder in one go"));
    identity += fmt::format(" {:016x}", shard.fingerprint());
    for (std::uint64_t d = 0; d < shard.documents(); ++d) {
      const TokenShard::Document document = shard.document(d);
      if (split != Split::All && is_validation(document.key, validation_fraction) != (split == Split::Validation))
        continue;
      spans_.push_back({tokens_, document.begin, i});
      tokens_ += document.end - document.begin;
    }
  }
  if (spans_.empty())
    throw ConfigError(describe(
        fmt::format("{} documents of {}", name_of(split), shards_.front()->name()), "none", "at least one",
        split == Split::Validation ? "raise data.validation_fraction or give more files"
                                   : "lower data.validation_fraction or give more files"));
  fingerprint_ = checksum64(identity);
}

std::shared_ptr<const TokenDataset> TokenDataset::open(const std::filesystem::path& folder, Split split,
                                                       double validation_fraction) {
  std::vector<std::shared_ptr<const TokenShard>> shards;
  for (const auto& file : shard_files(folder)) shards.push_back(TokenShard::open(file));
  return std::make_shared<const TokenDataset>(std::move(shards), split, validation_fraction);
}

void TokenDataset::read(std::uint64_t begin, std::span<std::int64_t> tokens, std::span<std::int64_t> documents) const {
  if (tokens.size() != documents.size())
    throw ValueError(describe("room for documents", fmt::format("{}", documents.size()),
                              fmt::format("that for tokens, {}", tokens.size())));
  if (begin > tokens_ || tokens.size() > tokens_ - begin)
    throw ValueError(describe("tokens to read", fmt::format("{} from {}", tokens.size(), begin),
                              fmt::format("a range within the {} tokens of the dataset", tokens_)));
  if (tokens.empty()) return;
  auto span = std::prev(std::upper_bound(spans_.begin(), spans_.end(), begin,
                                         [](std::uint64_t at, const Span& item) { return at < item.begin; }));
  for (std::size_t done = 0; done < tokens.size(); ++span) {
    const std::uint64_t end = std::next(span) == spans_.end() ? tokens_ : std::next(span)->begin;
    const std::uint64_t inside = begin + done - span->begin;
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(tokens.size() - done, end - begin - done));
    shards_[span->shard]->read(span->shard_begin + inside, tokens.subspan(done, count));
    const auto index = static_cast<std::int64_t>(span - spans_.begin());
    std::fill_n(documents.begin() + static_cast<std::ptrdiff_t>(done), count, index);
    done += count;
  }
}

}  // namespace penstock::train
