// Reads arbitrary bytes as a token shard: only ConfigError may be thrown, and accepted shards are consistent.
//
// Input: a byte of flags and a file. Without flag 1 the checksums of header, blocks and table are corrected
// first, since a mutation would never get them right.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "penstock/base/checksum.h"
#include "penstock/errors.h"
#include "penstock/train/data/token_shard.h"

namespace {

using namespace penstock;
using namespace penstock::train;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "token_shard_fuzz: %s\n", what);
  std::abort();
}

void put(std::vector<std::uint8_t>& bytes, std::uint64_t offset, std::uint64_t value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}

// As far as the numbers in the header allow.
void repair(std::vector<std::uint8_t>& bytes) {
  if (bytes.size() < kShardHeaderBytes) return;
  const auto head = [&] { put(bytes, 64, checksum64(std::span<const std::uint8_t>(bytes).first(64))); };
  head();
  try {
    const TokenShardHeader header = decode_shard_header(bytes, "fuzz");
    if (header.file_bytes() != bytes.size()) return;
    const std::span<const std::uint8_t> all(bytes);
    for (std::uint64_t block = 0; block < header.blocks(); ++block) {
      const std::uint64_t begin = kShardHeaderBytes + block * header.block_bytes;
      const std::uint64_t size = std::min(header.block_bytes, header.table_offset() - begin);
      put(bytes, header.table_offset() + 8 * block, checksum64(all.subspan(begin, size)));
    }
    put(bytes, 56, checksum64(all.subspan(header.table_offset())));
    head();
  } catch (const ConfigError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  std::vector<std::uint8_t> file(data + 1, data + size);
  if ((data[0] & 1) == 0) repair(file);
  // A copy of exactly this size, so that AddressSanitizer detects reads past the end.
  const auto bytes = std::make_unique<std::uint8_t[]>(file.size());
  std::copy(file.begin(), file.end(), bytes.get());
  std::shared_ptr<const TokenShard> shard;
  try {
    shard = TokenShard::over({bytes.get(), file.size()}, "fuzz");
  } catch (const ConfigError&) {
    return 0;
  }
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < shard->documents(); ++i) {
    const TokenShard::Document document = shard->document(i);
    require(document.begin == next && document.end > document.begin, "documents follow each other");
    require(shard->document_of(document.begin) == i && shard->document_of(document.end - 1) == i,
            "a token is in its document");
    next = document.end;
  }
  require(next == shard->tokens(), "the documents contain all tokens");
  std::vector<std::int64_t> tokens(shard->tokens());
  try {
    shard->read(0, tokens);
    shard->verify();
  } catch (const ConfigError&) {
    return 0;  // a damaged block, or a token beyond the vocabulary
  }
  for (const std::int64_t token : tokens)
    require(token >= 0 && static_cast<std::uint64_t>(token) < shard->header().vocabulary,
            "tokens are below the vocabulary");
  std::int64_t one = 0;
  shard->read(shard->tokens() - 1, {&one, 1});
  require(one == tokens.back(), "a token read alone is the same");
  return 0;
}
