#include "penstock/models/blocks/depth_cache.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"

namespace penstock::models {

at::Tensor DepthCache::put(std::int64_t block, std::int64_t seen, const at::Tensor& active) {
  at::Tensor& stored = blocks_[block];
  if (seen == 0) return stored = active;
  if (!stored.defined() || stored.size(0) != active.size(0) || stored.size(1) < seen)
    throw ValueError(describe(fmt::format("DepthCache: tokens before those of block {}", block),
                              shown(stored), fmt::format("[{}, at least {}]", active.size(0), seen),
                              "begin the row with a new cache"));
  return stored = at::cat({stored.narrow(1, 0, seen), active}, 1);
}

}  // namespace penstock::models
