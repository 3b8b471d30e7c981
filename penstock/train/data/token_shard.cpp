#include "penstock/train/data/token_shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/train/data/map_data_file.h"
#include "penstock/train/data/token_bytes.h"

namespace penstock::train {

namespace {

constexpr const char* kRemedy = "make the shards again with penstock data make";

}  // namespace

std::shared_ptr<const TokenShard> TokenShard::open(const std::filesystem::path& path) {
  MappedFile file = map_data_file(path, "a token shard");
  const std::span<const std::uint8_t> bytes = file.bytes();
  return std::shared_ptr<const TokenShard>(new TokenShard(std::move(file), bytes, path.string()));
}

std::shared_ptr<const TokenShard> TokenShard::over(std::span<const std::uint8_t> bytes, std::string name) {
  return std::shared_ptr<const TokenShard>(new TokenShard({}, bytes, std::move(name)));
}

TokenShard::TokenShard(MappedFile file, std::span<const std::uint8_t> bytes, std::string name)
    : file_(std::move(file)),
      bytes_(bytes),
      name_(std::move(name)),
      header_(decode_shard_header(bytes, name_)) {
  if (bytes_.size() != header_.file_bytes())
    throw ConfigError(describe(fmt::format("{}: size of the file", name_),
                               fmt::format("{} bytes", bytes_.size()),
                               fmt::format("{} according to its header", header_.file_bytes()), kRemedy));
  const std::uint64_t table = checksum64(bytes_.subspan(header_.table_offset()));
  if (table != header_.table_checksum)
    throw ConfigError(describe(fmt::format("{}: the table of checksums is damaged: checksum", name_),
                               fmt::format("{:016x}", table), fmt::format("{:016x}", header_.table_checksum),
                               kRemedy));
  fingerprint_ = checksum64(bytes_.first(kShardHeaderBytes));
  checked_ = std::make_unique<std::atomic<bool>[]>(header_.blocks());
  check_documents();
}

std::uint64_t TokenShard::number_at(std::uint64_t offset) const {
  std::uint64_t value;
  std::memcpy(&value, bytes_.data() + offset, sizeof value);
  return value;
}

void TokenShard::check_documents() const {
  check_blocks(header_.documents_offset(), header_.table_offset());
  std::uint64_t begin = 0;
  for (std::uint64_t i = 0; i < header_.documents; ++i) {
    const std::uint64_t end = number_at(header_.documents_offset() + 16 * i);
    if (end <= begin || end > header_.tokens)
      throw ConfigError(describe(fmt::format("{}: end of document {}", name_, i),
                                 fmt::format("token {}", end),
                                 fmt::format("a token from {} to {}", begin + 1, header_.tokens), kRemedy));
    begin = end;
  }
  if (begin != header_.tokens)
    throw ConfigError(describe(fmt::format("{}: end of the last document", name_),
                               fmt::format("token {}", begin),
                               fmt::format("the number of tokens, {}", header_.tokens), kRemedy));
}

void TokenShard::check_blocks(std::uint64_t begin, std::uint64_t end) const {
  if (begin >= end) return;
  const std::uint64_t last = (end - 1 - kShardHeaderBytes) / header_.block_bytes;
  for (std::uint64_t block = (begin - kShardHeaderBytes) / header_.block_bytes; block <= last; ++block)
    check_block(block);
}

void TokenShard::check_block(std::uint64_t block) const {
  if (checked_[block].load(std::memory_order_relaxed))
    return;  // the bytes never change, so no ordering is needed
  const std::uint64_t offset = kShardHeaderBytes + block * header_.block_bytes;
  const std::uint64_t size = std::min(header_.block_bytes, header_.table_offset() - offset);
  const std::uint64_t actual = checksum64(bytes_.subspan(offset, size));
  const std::uint64_t expected = number_at(header_.table_offset() + 8 * block);
  if (actual != expected)
    throw ConfigError(
        describe(fmt::format("{}: bytes {} to {} are damaged: checksum", name_, offset, offset + size - 1),
                 fmt::format("{:016x}", actual), fmt::format("{:016x}", expected), kRemedy));
  checked_[block].store(true, std::memory_order_relaxed);
}

TokenSource::Document TokenShard::document(std::uint64_t index) const {
  if (index >= header_.documents)
    throw ValueError(describe(fmt::format("{}: document", name_), fmt::format("{}", index),
                              fmt::format("a document from 0 to {}", header_.documents - 1)));
  const std::uint64_t entry = header_.documents_offset() + 16 * index;
  return {index == 0 ? 0 : number_at(entry - 16), number_at(entry), number_at(entry + 8)};
}

std::uint64_t TokenShard::document_of(std::uint64_t token) const {
  if (token >= header_.tokens)
    throw ValueError(describe(fmt::format("{}: token", name_), fmt::format("{}", token),
                              fmt::format("a token from 0 to {}", header_.tokens - 1)));
  std::uint64_t low = 0;
  std::uint64_t high = header_.documents - 1;
  while (low < high) {  // the first document that ends after the token
    const std::uint64_t middle = low + (high - low) / 2;
    if (number_at(header_.documents_offset() + 16 * middle) > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

void TokenShard::read(std::uint64_t begin, std::span<std::int64_t> out) const {
  if (begin > header_.tokens || out.size() > header_.tokens - begin)
    throw ValueError(describe(fmt::format("{}: tokens to read", name_),
                              fmt::format("{} from {}", out.size(), begin),
                              fmt::format("a range within the {} tokens", header_.tokens)));
  const std::uint64_t offset = kShardHeaderBytes + begin * header_.token_bytes;
  check_blocks(offset, offset + out.size() * header_.token_bytes);
  const std::uint8_t* from = bytes_.data() + offset;
  if (header_.token_bytes == 1) {
    widen<std::uint8_t>(from, out);
  } else if (header_.token_bytes == 2) {
    widen<std::uint16_t>(from, out);
  } else {
    widen<std::uint32_t>(from, out);
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (static_cast<std::uint64_t>(out[i]) >= header_.vocabulary)
      throw ConfigError(describe(fmt::format("{}: token {}", name_, begin + i), fmt::format("{}", out[i]),
                                 fmt::format("a number below the vocabulary of {}", header_.vocabulary),
                                 kRemedy));
  }
}

void TokenShard::verify() const {
  check_blocks(kShardHeaderBytes, header_.table_offset());
  std::vector<std::int64_t> tokens(std::min<std::uint64_t>(header_.tokens, 65536));
  for (std::uint64_t begin = 0; begin < header_.tokens; begin += tokens.size())
    read(begin, std::span(tokens).first(std::min<std::uint64_t>(tokens.size(), header_.tokens - begin)));
}

}  // namespace penstock::train
