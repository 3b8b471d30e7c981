// What one point-to-point transfer moves: the two sides must say the same, or the transfer does not happen.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

namespace penstock::comm {

struct Contract {
  static constexpr int kMaxDims = 6;

  std::int32_t tag = 0;
  std::uint32_t number = 0;  // how many transfers with this tag went before it between the two
  std::uint64_t bytes = 0;
  std::int8_t dtype = 0;
  std::uint8_t dims = 0;
  std::int64_t shape[kMaxDims] = {};  // of the first dims, for messages only

  static Contract of(const at::Tensor& tensor, int tag, std::uint32_t number);

  // Same type and size.
  bool matches(const Contract& other) const { return dtype == other.dtype && bytes == other.bytes; }

  // Equal for two sides exactly when tag, number, dtype and bytes are: what backends match transfers by. 56 bits.
  std::uint64_t key() const;

  // "float32[4, 8] (128 B)"
  std::string describe() const;

  // For the store.
  std::string to_bytes() const;
  static Contract from_bytes(const std::string& bytes);
};

}  // namespace penstock::comm
