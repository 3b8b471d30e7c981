// The gradients of one group on their way: whole on every rank before, reduced shards after.
//
// One reduce-scatter over the shard axis, then one all-reduce of what came out over the replicas. A reduction lives between
// its start and finish(); the caller computes meanwhile. With gradients of several dtypes there is one collective for each.
//
// What travels beside the gradients: one number for each parameter, 1 where this rank has a gradient and 0 where it has none (zeros
// stand for it then). Their sum tells every rank whether anybody had one: a parameter that no rank used keeps no gradient, and a
// rank that lacks what others have is no reason to wait for it forever.
// Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "penstock/comm/work.h"
#include "penstock/shard/parameter_group.h"

namespace penstock {

class GroupReduction {
 public:
  // Takes the gradients of the group and starts.
  explicit GroupReduction(ParameterGroup& group);

  ParameterGroup& group() const { return *group_; }
  // Ends the first step and starts the second.
  void wait_for_shards();
  // Ends everything; gradients are on the parameters.
  void finish();

 private:
  struct Bucket {
    at::ScalarType dtype;
    std::vector<std::size_t> parameters;
    std::vector<std::int64_t> offsets;  // in a row
    std::vector<bool> present;          // whether this rank has a gradient
    std::int64_t width = 0;             // of the gradients in a row; their marks follow
    at::Tensor rows, reduced;
    comm::Work work;
  };
  void start(Bucket& bucket);
  void write(const Bucket& bucket) const;

  ParameterGroup* group_;
  std::vector<Bucket> buckets_;
  comm::ReduceOp op_;
  bool all_reduce_;  // as it was when the gradients came
  bool shards_done_ = false, finished_ = false, kept_ = false;
};

}  // namespace penstock
