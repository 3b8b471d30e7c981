// An ongoing reduction of one group's gradients: whole on every rank before, reduced shards after.
//
// One reduce-scatter over the shard axis, then one all-reduce of its result over the replicas. A reduction
// lives from its start to finish(); the caller computes meanwhile. Gradients of several dtypes use one
// collective each.
//
// The gradients are accompanied by one number for each parameter: 1 if this rank has a gradient, 0 if it has
// none (zeros are sent in its place). The sum tells every rank whether any rank had one: a parameter that no
// rank used gets no gradient, and a rank without a gradient that others have does not make them wait forever.
//
// Gradients of offloaded shards are copied to the CPU on a separate stream, into page-locked memory, while
// backward continues; the end of backward calls settle(), which waits only for the copy.
// On CUDA the gradients are copied into the buffer by the stream that computes them; everything after that
// runs on a separate stream (ShardContext::reduce_stream), for which the end of backward waits.
// Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/group.h"
#include "penstock/shard/state/shard_group.h"

namespace penstock {

class GroupReduction {
 public:
  // Takes the gradients of the group and starts the reduction.
  explicit GroupReduction(ShardGroup& group);

  ShardGroup& group() const { return *group_; }
  // Waits for the reduce-scatter and starts the all-reduce.
  void wait_for_shards();
  // Waits for the communication. The gradients are then on the parameters, unless they are being copied to
  // the CPU.
  void finish();
  bool copying() const { return copies_.has_value(); }
  // Waits for the copy and puts the gradients on the parameters. Does nothing if nothing is copied.
  void settle();

 private:
  struct Bucket {
    at::ScalarType dtype;
    std::vector<std::size_t> parameters;
    std::vector<std::int64_t> offsets;  // within a row
    std::vector<bool> present;          // whether this rank has a gradient
    std::int64_t width = 0;             // of the gradients in a row; the presence numbers follow
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
  bool all_reduce_;  // the flag at the time the gradients arrived
  bool shards_done_ = false, finished_ = false, kept_ = false;
  // Where it runs after the gradients were copied in, if not on the compute stream.
  std::optional<c10::Stream> stream_;
  std::optional<c10::Stream> computing_;
  std::optional<c10::Stream> copies_;  // the stream of the copies
};

}  // namespace penstock
