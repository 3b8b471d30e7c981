// A tokenizer without a vocabulary file: token b is the byte b, token 256 ends a document.
//
//   const auto tokens = byte_tokenizer::encode("int x;");   // six tokens
//   byte_tokenizer::decode(tokens) == "int x;"
//
// Pure functions. Thread safety: any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::train::byte_tokenizer {

inline constexpr std::uint32_t kEndOfDocument = 256;
inline constexpr std::uint32_t kVocabulary = 257;

// Does not add the end of the document; the writer of documents adds it.
std::vector<std::uint32_t> encode(std::string_view text);

// Returns the bytes and skips ends of documents. A model with a padded vocabulary may produce tokens above
// 256: they become U+FFFD, the replacement character, so that its samples can still be shown. Throws
// ValueError for a negative token.
std::string decode(std::span<const std::int64_t> tokens);

}  // namespace penstock::train::byte_tokenizer
