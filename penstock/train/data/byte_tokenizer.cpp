#include "penstock/train/data/byte_tokenizer.h"

#include <fmt/format.h>

#include <cstddef>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::train::byte_tokenizer {

std::vector<std::uint32_t> encode(std::string_view text) {
  std::vector<std::uint32_t> tokens(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) tokens[i] = static_cast<unsigned char>(text[i]);
  return tokens;
}

std::string decode(std::span<const std::int64_t> tokens) {
  std::string text;
  text.reserve(tokens.size());
  for (const std::int64_t token : tokens) {
    if (token < 0) {
      throw ValueError(describe("token", fmt::format("{}", token), "a number of at least 0",
                                "pass tokens, not targets, in which -100 means ignored"));
    }
    if (token < 256) {
      text += static_cast<char>(static_cast<unsigned char>(token));
    } else if (token != kEndOfDocument) {
      text += "\xEF\xBF\xBD";
    }
  }
  return text;
}

}  // namespace penstock::train::byte_tokenizer
