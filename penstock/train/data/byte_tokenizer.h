// Text as tokens without any vocabulary file: token b is the byte b, token 256 ends a document.
//
//   const auto tokens = byte_tokenizer::encode("int x;");   // six tokens
//   byte_tokenizer::decode(tokens) == "int x;"
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::train::byte_tokenizer {

inline constexpr std::uint32_t kEndOfDocument = 256;
inline constexpr std::uint32_t kVocabulary = 257;

// The end of the document is not added: whoever writes documents adds it.
std::vector<std::uint32_t> encode(std::string_view text);

// The bytes, with nothing for an end of document. A model whose vocabulary is padded may produce tokens above 256: they
// come out as U+FFFD, the replacement character, so that a sample of such a model can still be shown. Throws ValueError
// for a negative token.
std::string decode(std::span<const std::int64_t> tokens);

}  // namespace penstock::train::byte_tokenizer
