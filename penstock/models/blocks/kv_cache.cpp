#include "penstock/models/blocks/kv_cache.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {

KvCache::KvCache(const TransformerOptions& options, std::int64_t capacity) : capacity_(capacity) {
  if (capacity < 1 || capacity > options.context)
    throw ValueError(describe("KvCache: capacity", fmt::format("{}", capacity),
                              fmt::format("1 to the model's context, {}", options.context)));
}

std::pair<at::Tensor, at::Tensor> KvCache::put(std::int64_t block, const at::Tensor& keys,
                                               const at::Tensor& values) {
  const std::int64_t added = keys.size(2);
  if (length_ + added > capacity_)
    throw ValueError(describe("KvCache", fmt::format("{} tokens and {} new ones", length_, added),
                              fmt::format("at most {}", capacity_), "create it with a larger capacity"));
  auto& [all_keys, all_values] = blocks_[block];
  if (!all_keys.defined() ||
      (length_ == 0 && (all_keys.size(0) != keys.size(0) || all_keys.scalar_type() != keys.scalar_type() ||
                        all_keys.device() != keys.device()))) {
    all_keys = at::empty({keys.size(0), keys.size(1), capacity_, keys.size(3)}, keys.options());
    all_values = at::empty_like(all_keys);
  }
  if (all_keys.size(0) != keys.size(0))
    throw ValueError(describe("KvCache: batch", fmt::format("{}", keys.size(0)),
                              fmt::format("{}, as before", all_keys.size(0)), "clear() the cache first"));
  all_keys.narrow(2, length_, added).copy_(keys);
  all_values.narrow(2, length_, added).copy_(values);
  return {all_keys.narrow(2, 0, length_ + added), all_values.narrow(2, 0, length_ + added)};
}

}  // namespace penstock::models
