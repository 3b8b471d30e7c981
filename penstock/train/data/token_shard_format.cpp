#include "penstock/train/data/token_shard_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::train {

namespace {

constexpr char kMagic[8] = {'P', 'N', 'S', 'K', 'T', 'O', 'K', 'S'};
constexpr std::size_t kChecksumOffset = kShardHeaderBytes - 8;
constexpr const char* kFormatRemedy = "make the shards again with penstock data make";

template <class T>
T load(std::span<const std::uint8_t> bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

template <class T>
void store(std::span<std::uint8_t> bytes, std::size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}

}  // namespace

std::uint32_t least_token_bytes(std::uint64_t vocabulary) {
  if (vocabulary < 1 || vocabulary > std::uint64_t{1} << 32)
    throw ValueError(describe("vocabulary", fmt::format("{}", vocabulary), "a number from 1 to 2^32"));
  return vocabulary <= 256 ? 1 : vocabulary <= 65536 ? 2 : 4;
}

void check_shard_header(const TokenShardHeader& header) {
  const auto refuse = [](const char* what, std::uint64_t actual, const std::string& expected) {
    throw ValueError(describe(what, fmt::format("{}", actual), expected));
  };
  if (header.token_bytes != 1 && header.token_bytes != 2 && header.token_bytes != 4)
    refuse("bytes per token", header.token_bytes, "1, 2 or 4");
  const std::uint64_t most = std::uint64_t{1} << (8 * header.token_bytes);
  if (header.vocabulary < 1 || header.vocabulary > most)
    refuse("vocabulary", header.vocabulary,
           fmt::format("a number from 1 to {} for tokens of {} bytes", most, header.token_bytes));
  if (header.end_of_document >= header.vocabulary)
    refuse("token that ends a document", header.end_of_document,
           fmt::format("a token below the vocabulary of {}", header.vocabulary));
  if (header.tokens < 1 || header.tokens > kMostShardTokens)
    refuse("tokens", header.tokens, "a number from 1 to 2^48");
  if (header.documents < 1 || header.documents > header.tokens)
    refuse("documents", header.documents, fmt::format("a number from 1 to the {} tokens", header.tokens));
  if (!std::has_single_bit(header.block_bytes) || header.block_bytes < 64 ||
      header.block_bytes > std::uint64_t{1} << 30)
    refuse("bytes per block", header.block_bytes, "a power of two from 64 to 2^30");
}

void encode_shard_header(const TokenShardHeader& header, std::span<std::uint8_t, kShardHeaderBytes> bytes) {
  std::fill(bytes.begin(), bytes.end(), std::uint8_t{0});
  std::memcpy(bytes.data(), kMagic, sizeof kMagic);
  store(bytes, 8, kShardVersion);
  store(bytes, 12, header.token_bytes);
  store(bytes, 16, header.vocabulary);
  store(bytes, 24, header.tokens);
  store(bytes, 32, header.documents);
  store(bytes, 40, header.block_bytes);
  store(bytes, 48, header.end_of_document);
  store(bytes, 56, header.table_checksum);
  store(bytes, kChecksumOffset, checksum64(std::span<const std::uint8_t>(bytes).first(kChecksumOffset)));
}

TokenShardHeader decode_shard_header(std::span<const std::uint8_t> bytes, std::string_view name) {
  const auto refuse = [&](std::string_view what, const std::string& actual, const std::string& expected,
                          std::string_view remedy) {
    throw ConfigError(describe(fmt::format("{}: {}", name, what), actual, expected, remedy));
  };
  if (bytes.size() < kShardHeaderBytes)
    refuse("token shard", fmt::format("{} bytes", bytes.size()),
           fmt::format("at least a header of {} bytes", kShardHeaderBytes), kFormatRemedy);
  if (std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0)
    refuse("not a token shard", "other first bytes", "PNSKTOKS", "give files made by penstock data make");
  // Before the checksum: another version may store its checksum elsewhere.
  if (const auto version = load<std::uint32_t>(bytes, 8); version != kShardVersion)
    refuse("version of the token shard", fmt::format("{}", version), fmt::format("{}", kShardVersion),
           version > kShardVersion
               ? "it was written by a newer version of Penstock: use that version, or make the shards again"
               : kFormatRemedy);
  const std::uint64_t actual = checksum64(bytes.first(kChecksumOffset));
  if (const auto expected = load<std::uint64_t>(bytes, kChecksumOffset); actual != expected)
    refuse("the header is damaged: checksum", fmt::format("{:016x}", actual),
           fmt::format("{:016x}", expected), kFormatRemedy);
  TokenShardHeader header;
  header.token_bytes = load<std::uint32_t>(bytes, 12);
  header.vocabulary = load<std::uint64_t>(bytes, 16);
  header.tokens = load<std::uint64_t>(bytes, 24);
  header.documents = load<std::uint64_t>(bytes, 32);
  header.block_bytes = load<std::uint64_t>(bytes, 40);
  header.end_of_document = load<std::uint32_t>(bytes, 48);
  header.table_checksum = load<std::uint64_t>(bytes, 56);
  if (const auto reserved = load<std::uint32_t>(bytes, 52); reserved != 0)
    refuse("reserved field", fmt::format("{}", reserved), "0", kFormatRemedy);
  try {
    check_shard_header(header);
  } catch (const ValueError& error) {
    throw ConfigError(fmt::format("{}: {}; {}", name, error.what(), kFormatRemedy));
  }
  return header;
}

}  // namespace penstock::train
