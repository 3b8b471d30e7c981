#include "penstock/train/data/bin_tokens.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <system_error>
#include <utility>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/train/data/map_data_file.h"
#include "penstock/train/data/token_bytes.h"

namespace penstock::train {

namespace {

struct HeaderKind {
  std::int32_t magic;
  std::int32_t version;
  std::uint32_t token_bytes;
  std::uint64_t vocabulary;
  std::uint32_t end_of_document;
  const char* what;
};

constexpr std::array<HeaderKind, 2> kKinds = {HeaderKind{20240520, 1, 2, 50257, 50256, "GPT-2"},
                                              HeaderKind{20240801, 7, 4, 128256, 128000, "Llama 3"}};
constexpr std::int32_t kEvaluationMagic = 20240522;  // multiple-choice questions, not training text
constexpr const char* kWriteAgain = "write the file again with the program that made it";

// Returns the index of the first token that is not below the vocabulary, or `count` if there is none.
template <class T>
std::uint64_t first_beyond(const std::uint8_t* from, std::uint64_t count, std::uint64_t vocabulary) {
  if (vocabulary > static_cast<std::uint64_t>(T(~T{0}))) return count;
  // Computes maxima of ranges: the compiler vectorizes the inner loop, unlike a search that can end early.
  constexpr std::uint64_t kStretch = 4096;
  for (std::uint64_t begin = 0; begin < count; begin += kStretch) {
    const std::uint64_t end = std::min(count, begin + kStretch);
    T most = 0;
    for (std::uint64_t i = begin; i < end; ++i) most = std::max(most, number_from<T>(from + i * sizeof(T)));
    if (most < vocabulary) continue;
    for (std::uint64_t i = begin; i < end; ++i)
      if (number_from<T>(from + i * sizeof(T)) >= vocabulary) return i;
  }
  return count;
}

}  // namespace

bool BinTokens::has_magic(std::span<const std::uint8_t> bytes) {
  if (bytes.size() < 8) return false;
  const auto magic = number_from<std::int32_t>(bytes.data());
  return std::any_of(kKinds.begin(), kKinds.end(),
                     [&](const HeaderKind& kind) { return kind.magic == magic; });
}

bool BinTokens::has_magic(const std::filesystem::path& path) {
  std::error_code error;  // errors are reported when the file is read
  if (!std::filesystem::is_regular_file(path, error)) return false;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  std::array<std::uint8_t, 8> begin{};
  const bool whole = ::pread(file, begin.data(), begin.size(), 0) == static_cast<::ssize_t>(begin.size());
  ::close(file);
  return whole && has_magic(begin);
}

std::shared_ptr<const BinTokens> BinTokens::open(const std::filesystem::path& path,
                                                 const BinTokensOptions& options) {
  MappedFile file = map_data_file(path, "a token file");
  const std::span<const std::uint8_t> bytes = file.bytes();
  return std::shared_ptr<const BinTokens>(new BinTokens(std::move(file), bytes, path.string(), options));
}

std::shared_ptr<const BinTokens> BinTokens::over(std::span<const std::uint8_t> bytes, std::string name,
                                                 const BinTokensOptions& options) {
  return std::shared_ptr<const BinTokens>(new BinTokens({}, bytes, std::move(name), options));
}

BinTokens::BinTokens(MappedFile file, std::span<const std::uint8_t> bytes, std::string name,
                     const BinTokensOptions& options)
    : file_(std::move(file)), bytes_(bytes), name_(std::move(name)), headerless_(options.headerless) {
  read_header(options);
  if (end_of_document_ && *end_of_document_ >= vocabulary_)
    throw ConfigError(describe("data.end_of_document", fmt::format("{}", *end_of_document_),
                               fmt::format("a token below the vocabulary of {}, {}", name_, vocabulary_),
                               "change it, or leave it out"));
  key_ = checksum64(std::filesystem::path(name_).filename().string());
  take_samples();
}

void BinTokens::read_header(const BinTokensOptions& options) {
  const auto refuse = [&](const char* what, const std::string& actual, const std::string& expected,
                          const std::string& remedy) {
    throw ConfigError(describe(fmt::format("{}: {}", name_, what), actual, expected, remedy));
  };
  end_of_document_ = options.end_of_document;
  if (headerless_) {
    if (has_magic(bytes_))
      refuse("token file without a header", "a file with an llm.c header", "16-bit tokens only",
             "leave data.format out: the header determines the format");
    if (bytes_.empty()) refuse("token file", "an empty file", "16-bit tokens", kWriteAgain);
    if (bytes_.size() % 2 != 0)
      refuse("token file", fmt::format("{} bytes, an odd number", bytes_.size()), "16-bit tokens",
             kWriteAgain);
    if (options.vocabulary < 1) refuse("vocabulary", "0", "at least 1", "set model.vocabulary");
    tokens_ = bytes_.size() / 2;
    vocabulary_ = std::min<std::uint64_t>(options.vocabulary, 65536);
    return;
  }
  const std::string remedy =
      "for a file of 16-bit tokens without a header set data.format = \"uint16\", for text data.format = "
      "\"text\"";
  if (bytes_.size() < 4)
    refuse("token file", fmt::format("{} bytes", bytes_.size()), "a file with an llm.c header", remedy);
  const auto magic = number_from<std::int32_t>(bytes_.data());
  const auto* kind =
      std::find_if(kKinds.begin(), kKinds.end(), [&](const HeaderKind& each) { return each.magic == magic; });
  if (magic == kEvaluationMagic)
    refuse("token file", "an llm.c evaluation file", "an llm.c training file", "give a training file");
  if (kind == kKinds.end())
    refuse("token file", fmt::format("{} as its first number", magic),
           "20240520 or 20240801, the magic numbers of llm.c", remedy);
  if (bytes_.size() < kHeaderBytes)
    refuse("token file", fmt::format("{} bytes", bytes_.size()),
           fmt::format("at least a header of {}", kHeaderBytes), kWriteAgain);
  if (const auto version = number_from<std::int32_t>(bytes_.data() + 4); version != kind->version)
    refuse("version of the token file", fmt::format("{}", version),
           fmt::format("{}, the llm.c version for {} tokens", kind->version, kind->what), kWriteAgain);
  const auto tokens = number_from<std::int32_t>(bytes_.data() + 8);
  if (tokens < 1)
    refuse("number of tokens in the header", fmt::format("{}", tokens), "at least 1", kWriteAgain);
  offset_ = kHeaderBytes;
  token_bytes_ = kind->token_bytes;
  tokens_ = static_cast<std::uint64_t>(tokens);
  vocabulary_ = kind->vocabulary;
  if (!end_of_document_) end_of_document_ = kind->end_of_document;
  const std::uint64_t expected = kHeaderBytes + tokens_ * token_bytes_;
  if (bytes_.size() != expected)
    refuse("size of the file", fmt::format("{} bytes", bytes_.size()),
           fmt::format("{} for {} tokens of {} bytes as in its header", expected, tokens_, token_bytes_),
           bytes_.size() < expected ? "it is truncated: download or write it again" : kWriteAgain);
}

void BinTokens::take_samples() {
  const std::uint64_t size = tokens_ * token_bytes_;
  std::string identity =
      fmt::format("{} {} {:016x}", bytes_.size(), token_bytes_, checksum64(bytes_.first(offset_)));
  if (end_of_document_) identity += fmt::format(" {}", *end_of_document_);
  const auto sample = [&](std::uint64_t begin, std::uint64_t end) {  // tokens
    check(begin, end);
    identity += fmt::format(
        " {:016x}", checksum64(bytes_.subspan(offset_ + begin * token_bytes_, (end - begin) * token_bytes_)));
  };
  if (size <= kWholeCheckBytes) {
    sample(0, tokens_);
  } else {
    // At equal distances from the first to the last.
    const std::uint64_t length = kSampleBytes / token_bytes_;
    for (std::uint64_t i = 0; i < kSamples; ++i) {
      const std::uint64_t begin = (tokens_ - length) / (kSamples - 1) * i;
      sample(i + 1 == kSamples ? tokens_ - length : begin, i + 1 == kSamples ? tokens_ : begin + length);
    }
  }
  fingerprint_ = checksum64(identity);
}

void BinTokens::refuse_token(std::uint64_t place, std::uint64_t token) const {
  throw ConfigError(describe(
      fmt::format("{}: token {}", name_, place), fmt::format("{}", token),
      fmt::format("a number below the vocabulary of {}", vocabulary_),
      headerless_ ? "set model.vocabulary to that of the tokenizer (50257 for GPT-2), and check data.format"
                  : kWriteAgain));
}

void BinTokens::check(std::uint64_t begin, std::uint64_t end) const {
  const std::uint8_t* from = bytes_.data() + offset_ + begin * token_bytes_;
  const std::uint64_t found = token_bytes_ == 2 ? first_beyond<std::uint16_t>(from, end - begin, vocabulary_)
                                                : first_beyond<std::uint32_t>(from, end - begin, vocabulary_);
  if (found == end - begin) return;
  std::int64_t token = 0;
  if (token_bytes_ == 2) {
    widen<std::uint16_t>(from + found * 2, {&token, 1});
  } else {
    widen<std::uint32_t>(from + found * 4, {&token, 1});
  }
  refuse_token(begin + found, static_cast<std::uint64_t>(token));
}

TokenSource::Document BinTokens::document(std::uint64_t index) const {
  if (index != 0)
    throw ValueError(describe(fmt::format("{}: document", name_), fmt::format("{}", index),
                              "0: the file is one document"));
  return {0, tokens_, key_};
}

void BinTokens::read(std::uint64_t begin, std::span<std::int64_t> out) const {
  if (begin > tokens_ || out.size() > tokens_ - begin)
    throw ValueError(describe(fmt::format("{}: tokens to read", name_),
                              fmt::format("{} from {}", out.size(), begin),
                              fmt::format("a range within the {} tokens", tokens_)));
  check(begin, begin + out.size());
  const std::uint8_t* from = bytes_.data() + offset_ + begin * token_bytes_;
  if (token_bytes_ == 2) {
    widen<std::uint16_t>(from, out);
  } else {
    widen<std::uint32_t>(from, out);
  }
}

void BinTokens::verify() const { check(0, tokens_); }

}  // namespace penstock::train
