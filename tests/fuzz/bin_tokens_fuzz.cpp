// Reads arbitrary bytes as a token file of another program: only ConfigError may be thrown, and accepted
// files are consistent.
//
// Input: a byte of flags and a file. Flag 1: the file has no header. Flag 2: do not correct the number of
// tokens in the header first, which a mutation would rarely get right.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "penstock/errors.h"
#include "penstock/train/data/bin_tokens.h"

namespace {

using namespace penstock;
using namespace penstock::train;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "bin_tokens_fuzz: %s\n", what);
  std::abort();
}

void repair(std::vector<std::uint8_t>& bytes) {
  if (bytes.size() < BinTokens::kHeaderBytes || !BinTokens::has_magic(bytes)) return;
  std::int32_t version = 0;
  std::memcpy(&version, bytes.data() + 4, sizeof version);
  const auto count =
      static_cast<std::int32_t>((bytes.size() - BinTokens::kHeaderBytes) / (version == 7 ? 4 : 2));
  std::memcpy(bytes.data() + 8, &count, sizeof count);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  std::vector<std::uint8_t> file(data + 1, data + size);
  const bool headerless = (data[0] & 1) != 0;
  if (!headerless && (data[0] & 2) == 0) repair(file);
  // A copy of exactly this size, so that AddressSanitizer detects reads past the end.
  const auto bytes = std::make_unique<std::uint8_t[]>(file.size());
  std::copy(file.begin(), file.end(), bytes.get());
  std::shared_ptr<const BinTokens> source;
  try {
    source = BinTokens::over({bytes.get(), file.size()}, "fuzz",
                             {.headerless = headerless, .vocabulary = 300, .end_of_document = {}});
  } catch (const ConfigError&) {
    return 0;
  }
  require(source->tokens() > 0, "there are tokens");
  require(
      source->tokens() * source->token_bytes() + (headerless ? 0 : BinTokens::kHeaderBytes) == file.size(),
      "the tokens are the whole file");
  require(source->document(0).end == source->tokens(), "the document is the whole file");
  std::vector<std::int64_t> tokens(source->tokens());
  source->read(0, tokens);  // small files are checked when they are opened
  source->verify();
  for (const std::int64_t token : tokens)
    require(token >= 0 && static_cast<std::uint64_t>(token) < source->vocabulary(),
            "tokens are below the vocabulary");
  std::int64_t one = 0;
  source->read(source->tokens() - 1, {&one, 1});
  require(one == tokens.back(), "a token read alone is the same");
  return 0;
}
