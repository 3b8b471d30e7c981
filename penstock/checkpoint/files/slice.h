// Which bytes of a whole tensor a rank holds, as runs: ranges that are contiguous both in the whole and in
// the local tensor.
//
//   Slice slice{{4, 6}, {2, 6}, local_boxes({4, 6}, {2}, {1}, {Shard{0}})};      // rows 2-3
//   for_each_run(slice, 4, [](ByteRun run) { ... });  // one: 48 bytes at byte 48, local byte 0
//
// Both tensors are row-major. Pure arithmetic.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/mesh/local_shard.h"

namespace penstock::checkpoint {

struct Slice {
  std::vector<std::int64_t> global_shape;
  std::vector<std::int64_t> local_shape;
  std::vector<ShardBox> boxes;  // empty: nothing is held

  // A rank that holds the whole tensor.
  static Slice whole(const std::vector<std::int64_t>& shape);
  std::int64_t held() const;  // elements

  friend bool operator==(const Slice&, const Slice&) = default;
};

// Returns what is wrong with a slice (boxes outside of either shape, overlapping in the local one, or not
// filling it), or "" if it is valid.
std::string validation_error(const Slice& slice);

struct ByteRun {
  std::uint64_t global = 0, local = 0, bytes = 0;
};

// Calls `call` for each run, in the order of the boxes, and within a box in the order of the whole tensor.
// The slice must be valid.
void for_each_run(const Slice& slice, std::uint64_t item_bytes, const std::function<void(ByteRun)>& call);

// Returns whether two boxes share an element of the whole tensor.
bool overlap(const ShardBox& a, const ShardBox& b);

}  // namespace penstock::checkpoint
