// What was decided for one kind of call, and the table that finds it again. Private to this folder.
//
// A kind of call is the operator, the specs of its distributed tensors, and its other arguments. Specs are unique, so their
// addresses stand for them; each entry holds the specs of its key, so no address can come to mean another one.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "penstock/dtensor/tensor/local_transfer.h"
#include "penstock/dtensor/tensor/sharding_rule.h"

namespace penstock::detail {

using CallKey = c10::SmallVector<std::uint64_t, 48>;

struct Decision {
  struct Input {
    SpecPtr now;                                    // null: a plain tensor
    std::shared_ptr<const LocalTransfer> transfer;  // null: as it lies
  };
  ShardingCall call;       // its arguments without tensors: a table must not keep anything alive
  Sharding sharding;
  std::vector<Input> inputs;
  std::vector<SpecPtr> outputs;
  std::vector<std::int64_t> offsets;  // where each output starts in what it views
  bool moves_dims = false;  // in place: transpose_, squeeze_
  bool transposes = false;  // a view with two dims exchanged
};

class DecisionCache {
 public:
  static constexpr std::size_t kMost = 8192;

  // Shared: a nested call may clear the table while a decision is being carried out.
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

// Of this thread: autograd's workers have their own.
DecisionCache& decision_cache();

}  // namespace penstock::detail
