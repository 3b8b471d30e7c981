// Caches the sharding decision for each kind of call. Private to this folder.
//
// A kind of call is the operator, the specs of its distributed tensors, and its other arguments. Specs are
// unique, so their addresses identify them; each entry holds the specs of its key, so an address cannot be
// reused.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "penstock/dtensor/tensor/local_transfer.h"
#include "penstock/sharding_rule.h"

namespace penstock::detail {

using CallKey = c10::SmallVector<std::uint64_t, 48>;

struct Decision {
  struct Input {
    SpecPtr now;                                    // null: a plain tensor
    std::shared_ptr<const LocalTransfer> transfer;  // null: used as placed
  };
  ShardingCall call;  // its arguments without tensors: the cache must not keep them alive
  Sharding sharding;
  std::vector<Input> inputs;
  std::vector<SpecPtr> outputs;
  std::vector<std::int64_t> offsets;  // storage offset of each output in its base
  bool moves_dims = false;            // in place: transpose_, squeeze_
  bool transposes = false;            // a view with two dims swapped
};

class DecisionCache {
 public:
  static constexpr std::size_t kMost = 8192;

  // Shared ownership: a nested call may clear the table while a decision is being carried out.
  std::shared_ptr<const Decision> find(const CallKey& key);
  std::shared_ptr<const Decision> insert(const CallKey& key, std::shared_ptr<const Decision> decision);
  void clear();
  ShardingCacheStats stats() const { return {hits_, misses_, entries_.size()}; }

 private:
  struct Entry {
    std::vector<std::uint64_t> key;
    std::shared_ptr<const Decision> decision;
  };
  std::unordered_multimap<std::uint64_t, Entry> entries_;
  std::uint64_t hits_ = 0, misses_ = 0;
};

// One per thread: autograd's workers have their own.
DecisionCache& decision_cache();

}  // namespace penstock::detail
