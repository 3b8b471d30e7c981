// The gradients of one group on their way: whole on every rank before, reduced shards after.
//
// One reduce-scatter over the shard axis, then one all-reduce of what came out over the replicas. A reduction lives between
// its start and finish(); the caller computes meanwhile. With gradients of several dtypes there is one collective for each.
//
// What travels beside the gradients: one number for each parameter, 1 where this rank has a gradient and 0 where it has none (zeros
// stand for it then). Their sum tells every rank whether anybody had one: a parameter that no rank used keeps no gradient, and a
// rank that lacks what others have is no reason to wait for it forever.
//
// Gradients of offloaded shards are copied to the CPU on a stream of their own, into page-locked memory, while backward goes on; whoever
// ends the backward calls settle(), which waits for the copy alone.
// On CUDA the gradients are copied into the buffer by the stream that computes them; everything after that runs on a stream of its own
// (ShardContext::reduce_stream), for which the end of backward waits.
// Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/comm/group/work.h"
#include "penstock/shard/state/parameter_group.h"

namespace penstock {

class GroupReduction {
 public:
  // Takes the gradients of the group and starts.
  explicit GroupReduction(ShardGroup& group);

  ShardGroup& group() const { return *group_; }
  // Ends the first step and starts the second.
  void wait_for_shards();
  // Ends what is communicated. Gradients are on the parameters then, unless they are being copied to the CPU.
  void finish();
  bool copying() const { return copies_.has_value(); }
  // Waits for the copy and puts the gradients on the parameters. Nothing where nothing is copied.
  void settle();

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
  void start_copy(Bucket& bucket);
  void divide(Bucket& bucket) const;
  void write(const Bucket& bucket) const;

  ShardGroup* group_;
  std::vector<Bucket> buckets_;
  comm::ReduceOp op_;
  bool all_reduce_;  // as it was when the gradients came
  bool shards_done_ = false, finished_ = false, kept_ = false;
  std::optional<c10::Stream> stream_;  // where it runs after the gradients were copied in, if not on the computing stream
  std::optional<c10::Stream> computing_;
  std::optional<c10::Stream> copies_;  // where they run
};

}  // namespace penstock
