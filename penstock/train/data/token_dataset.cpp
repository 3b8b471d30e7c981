#include "penstock/train/data/token_dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::train {

const char* to_text(DataSplit split) {
  switch (split) {
    case DataSplit::All:
      return "all";
    case DataSplit::Training:
      return "training";
    case DataSplit::Validation:
      return "validation";
  }
  return "";
}

bool has_shards(const std::filesystem::path& folder) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error))
    if (entry->path().extension() == kShardExtension) return true;
  return false;
}

std::vector<std::filesystem::path> shard_files(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
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

TokenSources open_shards(const std::filesystem::path& folder) {
  TokenSources shards;
  for (const auto& file : shard_files(folder)) shards.push_back(TokenShard::open(file));
  return shards;
}

TokenDataset::TokenDataset(TokenSources sources, DataSplit split, double validation_fraction)
    : sources_(std::move(sources)), split_(split) {
  if (sources_.empty()) throw ValueError(describe("dataset", "no token sources", "at least one source"));
  std::string identity =
      fmt::format("{} {:a}", to_text(split), split == DataSplit::All ? 0.0 : validation_fraction);
  DocumentSplit cut(split == DataSplit::All ? 0 : validation_fraction);
  const auto end_text = [](const TokenSource& source) {
    return source.end_of_document() ? fmt::format("end of document {}", *source.end_of_document())
                                    : std::string("no end of document");
  };
  for (const auto& source : sources_) {
    if (source->vocabulary() != vocabulary() ||
        source->end_of_document() != sources_.front()->end_of_document())
      throw ConfigError(describe(fmt::format("{}: vocabulary", source->name()),
                                 fmt::format("{} with {}", source->vocabulary(), end_text(*source)),
                                 fmt::format("{} with {} as in {}", vocabulary(), end_text(*sources_.front()),
                                             sources_.front()->name()),
                                 "train on files of one tokenizer"));
    identity += fmt::format(" {:016x}", source->fingerprint());
    if (source->ends_are_in_tokens()) numbers_each_ = std::int64_t{1} << 32;
    for (std::uint64_t d = 0; d < source->documents(); ++d) {
      const TokenSource::Document document = source->document(d);
      cut.count(document.end - document.begin, document.key);
    }
  }
  cut.decide();
  if (cut.cuts()) identity += " cut";
  all_tokens_ = cut.tokens();
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    for (std::uint64_t d = 0; d < sources_[i]->documents(); ++d) {
      const TokenSource::Document document = sources_[i]->document(d);
      const std::uint64_t validation = cut.validation_tokens(document.end - document.begin, document.key);
      const std::uint64_t border = document.end - validation;
      const std::uint64_t begin = split == DataSplit::Validation ? border : document.begin;
      const std::uint64_t end = split == DataSplit::Training ? border : document.end;
      if (begin == end) continue;
      spans_.push_back({tokens_, begin, i, document.begin});
      tokens_ += end - begin;
    }
  }
  if (spans_.empty())
    throw ConfigError(describe(name(), "none", "at least one token",
                               split == DataSplit::Validation
                                   ? "raise data.validation_fraction or give more text"
                                   : "lower data.validation_fraction or give more text"));
  fingerprint_ = checksum64(identity);
}

std::shared_ptr<const TokenDataset> TokenDataset::open(const std::filesystem::path& folder, DataSplit split,
                                                       double validation_fraction) {
  return std::make_shared<const TokenDataset>(open_shards(folder), split, validation_fraction);
}

std::string TokenDataset::name() const {
  return fmt::format("{}tokens of {}{}", split_ == DataSplit::All ? "" : fmt::format("{} ", to_text(split_)),
                     sources_.front()->name(),
                     sources_.size() == 1 ? "" : fmt::format(" and {} more", sources_.size() - 1));
}

std::vector<TokenDataset::Span>::const_iterator TokenDataset::find_span(std::uint64_t begin,
                                                                        std::uint64_t count) const {
  if (begin > tokens_ || count > tokens_ - begin)
    throw ValueError(describe("tokens to read", fmt::format("{} from {}", count, begin),
                              fmt::format("a range within the {} tokens of the dataset", tokens_)));
  return std::prev(std::upper_bound(spans_.begin(), spans_.end(), begin,
                                    [](std::uint64_t at, const Span& item) { return at < item.begin; }));
}

std::uint64_t TokenDataset::end_of(std::vector<Span>::const_iterator span) const {
  return std::next(span) == spans_.end() ? tokens_ : std::next(span)->begin;
}

std::vector<DocumentPart> TokenDataset::parts(std::uint64_t begin, std::uint64_t count) const {
  std::vector<DocumentPart> parts;
  auto span = find_span(begin, count);
  for (std::uint64_t at = begin; at < begin + count; ++span) {
    const std::uint64_t end = std::min(end_of(span), begin + count);
    parts.push_back({.source = sources_[span->source].get(),
                     .document = span->document,
                     .begin = span->source_begin + (at - span->begin),
                     .tokens = end - at});
    at = end;
  }
  return parts;
}

void TokenDataset::read(std::uint64_t begin, std::span<std::int64_t> tokens,
                        std::span<std::int64_t> documents) const {
  if (tokens.size() != documents.size())
    throw ValueError(describe("buffer for documents", fmt::format("{}", documents.size()),
                              fmt::format("the size of the token buffer, {}", tokens.size())));
  auto span = find_span(begin, tokens.size());
  for (std::size_t done = 0; done < tokens.size(); ++span) {
    const std::uint64_t end = end_of(span);
    const std::uint64_t inside = begin + done - span->begin;
    const auto count =
        static_cast<std::size_t>(std::min<std::uint64_t>(tokens.size() - done, end - begin - done));
    const TokenSource& source = *sources_[span->source];
    source.read(span->source_begin + inside, tokens.subspan(done, count));
    std::int64_t number = (span - spans_.begin()) * numbers_each_;
    if (source.ends_are_in_tokens()) {
      const auto last = static_cast<std::int64_t>(*source.end_of_document());
      for (std::size_t i = done; i < done + count; ++i) {
        documents[i] = number;
        if (tokens[i] == last) ++number;
      }
    } else {
      std::fill_n(documents.begin() + static_cast<std::ptrdiff_t>(done), count, number);
    }
    done += count;
  }
}

}  // namespace penstock::train
