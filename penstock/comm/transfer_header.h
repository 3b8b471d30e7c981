// What goes ahead of, or with, every point-to-point transfer on backends that do not carry sizes and types themselves.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

namespace penstock::comm {

struct TransferHeader {
  static constexpr std::uint32_t kMagic = 0x50534831;  // "PSH1"
  static constexpr int kMaxDims = 6;

  std::uint32_t magic = kMagic;
  std::int8_t dtype = 0;
  std::uint8_t dims = 0;
  std::uint8_t payload_follows = 0;  // 1: the data is a message of its own
  std::uint8_t reserved = 0;
  std::int32_t source = 0;           // global rank
  std::int32_t tag = 0;
  std::uint64_t bytes = 0;
  std::int64_t shape[kMaxDims] = {};  // of the first dims, for messages only

  static TransferHeader of(const at::Tensor& tensor, int source, int tag);
  // "float32[4, 8] (128 B)"
  std::string describe() const;
  bool matches(const TransferHeader& other) const { return dtype == other.dtype && bytes == other.bytes; }
};

static_assert(sizeof(TransferHeader) == 72, "the header is sent as it lies in memory, between equal builds");

}  // namespace penstock::comm
