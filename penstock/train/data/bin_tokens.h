// Token files of other programs: llm.c files, and headerless files of 16-bit tokens as written by nanoGPT.
// All little-endian.
//
//   const auto train = BinTokens::open("fineweb_train_000001.bin", {});      // llm.c, detected by its header
//   const auto bare = BinTokens::open("train.bin", {.headerless = true, .vocabulary = 50304});
//
//   llm.c   256 32-bit numbers (magic number, version, number of tokens, ...), then the tokens
//           20240520, version 1: 16-bit tokens of GPT-2 (vocabulary 50257, documents separated by 50256)
//           20240801, version 7: 32-bit tokens of Llama 3 (vocabulary 128256, documents separated by 128000)
//   bare    16-bit tokens only; the caller passes the vocabulary
//
// Opening checks the header, that the file has exactly the size given by the header, and that tokens are
// below the vocabulary: all tokens in files up to kWholeCheckBytes, kSamples ranges in larger files. Reading
// checks every token read. These files have no checksums: other changes are not detected. The fingerprint
// covers the size, the header and the same ranges.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "penstock/base/mapped_file.h"
#include "penstock/train/data/token_source.h"

namespace penstock::train {

struct BinTokensOptions {
  bool headerless = false;
  std::uint64_t vocabulary = 65536;  // of a headerless file; headers define their own
  // The token that separates documents. Default: that of GPT-2 or Llama 3 according to the header; none
  // without a header.
  std::optional<std::uint32_t> end_of_document = {};
};

class BinTokens final : public TokenSource {
 public:
  static constexpr std::size_t kHeaderBytes = 1024;
  static constexpr std::uint64_t kWholeCheckBytes = std::uint64_t{16} << 20;
  static constexpr std::uint64_t kSamples = 64;
  static constexpr std::uint64_t kSampleBytes = std::uint64_t{64} << 10;

  // Throws ConfigError that names the file if it is not such a file.
  static std::shared_ptr<const BinTokens> open(const std::filesystem::path& path,
                                               const BinTokensOptions& options);
  // Reads from bytes that the caller keeps alive; `name` is for messages.
  static std::shared_ptr<const BinTokens> over(std::span<const std::uint8_t> bytes, std::string name,
                                               const BinTokensOptions& options);
  // Returns whether the bytes begin with a magic number of an llm.c token file, of any version.
  static bool has_magic(std::span<const std::uint8_t> bytes);
  // The same for a file; false if it cannot be read.
  static bool has_magic(const std::filesystem::path& path);

  const std::string& name() const override { return name_; }
  std::uint64_t tokens() const override { return tokens_; }
  std::uint64_t vocabulary() const override { return vocabulary_; }
  std::optional<std::uint32_t> end_of_document() const override { return end_of_document_; }
  bool ends_are_in_tokens() const override { return end_of_document_.has_value(); }
  // Always 1: the file. Its key is the checksum of the file name without folders.
  std::uint64_t documents() const override { return 1; }
  Document document(std::uint64_t index) const override;
  void read(std::uint64_t begin, std::span<std::int64_t> out) const override;
  void verify() const override;
  std::uint64_t fingerprint() const override { return fingerprint_; }

  std::uint32_t token_bytes() const { return token_bytes_; }

 private:
  BinTokens(MappedFile file, std::span<const std::uint8_t> bytes, std::string name,
            const BinTokensOptions& options);
  void read_header(const BinTokensOptions& options);
  // Throws unless all tokens in [begin, end) are below the vocabulary.
  void check(std::uint64_t begin, std::uint64_t end) const;
  [[noreturn]] void refuse_token(std::uint64_t place, std::uint64_t token) const;
  void take_samples();

  MappedFile file_;  // empty if the caller owns the bytes
  std::span<const std::uint8_t> bytes_;
  std::string name_;
  bool headerless_;
  std::size_t offset_ = 0;  // of the first token
  std::uint32_t token_bytes_ = 2;
  std::uint64_t tokens_ = 0;
  std::uint64_t vocabulary_ = 0;
  std::optional<std::uint32_t> end_of_document_;
  std::uint64_t key_ = 0;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace penstock::train
