// Token files as written by other programs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock::test {

template <class T>
inline void append_number(std::vector<std::uint8_t>& bytes, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i)
    bytes.push_back(static_cast<std::uint8_t>(static_cast<std::uint64_t>(value) >> (8 * i)));
}

// Headerless 16-bit tokens.
inline std::vector<std::uint8_t> bare_file(const std::vector<std::uint32_t>& tokens) {
  std::vector<std::uint8_t> bytes;
  bytes.reserve(2 * tokens.size());
  for (const std::uint32_t token : tokens) append_number(bytes, static_cast<std::uint16_t>(token));
  return bytes;
}

// 256 32-bit numbers, then the tokens.
inline std::vector<std::uint8_t> llmc_file(std::int32_t magic, std::int32_t version, std::int32_t count,
                                           const std::vector<std::uint8_t>& tokens) {
  std::vector<std::uint8_t> bytes;
  for (const std::int32_t number : {magic, version, count}) append_number(bytes, number);
  bytes.resize(1024);
  bytes.insert(bytes.end(), tokens.begin(), tokens.end());
  return bytes;
}

inline std::vector<std::uint8_t> gpt2_file(const std::vector<std::uint32_t>& tokens) {
  return llmc_file(20240520, 1, static_cast<std::int32_t>(tokens.size()), bare_file(tokens));
}

inline std::vector<std::uint8_t> llama3_file(const std::vector<std::uint32_t>& tokens) {
  std::vector<std::uint8_t> bytes;
  for (const std::uint32_t token : tokens) append_number(bytes, token);
  return llmc_file(20240801, 7, static_cast<std::int32_t>(tokens.size()), bytes);
}

}  // namespace penstock::test
