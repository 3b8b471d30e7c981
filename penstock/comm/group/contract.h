// Describes what one point-to-point transfer moves. Both sides must pass equal contracts, or nothing is
// transferred.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

namespace penstock::comm {

struct Contract {
  static constexpr int kMaxDims = 6;

  std::int32_t tag = 0;
  std::uint32_t number = 0;  // number of earlier transfers with this tag between the two ranks
  std::uint64_t bytes = 0;
  std::int8_t dtype = 0;
  std::uint8_t dims = 0;
  std::int64_t shape[kMaxDims] = {};  // the first `dims` sizes; used only in messages

  static Contract of(const at::Tensor& tensor, int tag, std::uint32_t number);

  // Returns whether dtype and size are equal.
  bool matches(const Contract& other) const { return dtype == other.dtype && bytes == other.bytes; }

  // Backends match transfers by this key. 56 bits; equal exactly when tag, number, dtype and bytes are equal.
  std::uint64_t key() const;

  // "float32[4, 8] (128 B)"
  std::string describe() const;

  // Encoding for the store.
  std::string to_bytes() const;
  static Contract from_bytes(const std::string& bytes);
};

}  // namespace penstock::comm
