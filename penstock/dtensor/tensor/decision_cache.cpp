#include "penstock/dtensor/tensor/decision_cache.h"

#include <algorithm>

namespace penstock {
namespace detail {
namespace {

std::uint64_t hash_of(const CallKey& key) {
  std::uint64_t hash = 0x243f6a8885a308d3ull;
  for (const std::uint64_t word : key) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

std::shared_ptr<const Decision> DecisionCache::find(const CallKey& key) {
  const auto [begin, end] = entries_.equal_range(hash_of(key));
  for (auto it = begin; it != end; ++it)
    if (std::equal(key.begin(), key.end(), it->second.key.begin(), it->second.key.end())) {
      ++hits_;
      return it->second.decision;
    }
  ++misses_;
  return nullptr;
}

std::shared_ptr<const Decision> DecisionCache::insert(const CallKey& key,
                                                      std::shared_ptr<const Decision> decision) {
  // Ever-changing shapes must not fill the memory; clearing the table is rare and cheap.
  if (entries_.size() >= kMost) entries_.clear();
  return entries_.emplace(hash_of(key), Entry{{key.begin(), key.end()}, std::move(decision)})
      ->second.decision;
}

void DecisionCache::clear() { entries_.clear(); }

DecisionCache& decision_cache() {
  thread_local DecisionCache cache;
  return cache;
}

}  // namespace detail

ShardingCacheStats sharding_cache_stats() { return detail::decision_cache().stats(); }
void clear_sharding_cache() { detail::decision_cache().clear(); }

}  // namespace penstock
