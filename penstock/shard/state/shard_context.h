// State shared by the groups under one outermost module: the order of gathers and reductions.
//
// - Forward: a group is gathered at its first use. Other groups that are finished are freed at that point,
//   and the one that followed last time is prefetched, so that at most two are gathered at once.
// - Backward: every group that was used by the forwards since the last backward is gathered again, in the
//   reverse order of forward. A group is freed and reduced as soon as all its gradients have arrived;
//   reductions run while backward continues. They start in the same order.
// - Both orders are independent of what a rank has used: what it has not needed is gathered and reduced (as
//   zeros) at the end of its backward, and later groups wait for that. So ranks may differ in which gradients
//   they compute.
// - End of backward: everything that remains is completed.
// Private to this folder; others use ShardState. Thread safety: that of ShardGroup.
#pragma once

#include <c10/core/Stream.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/fully_shard.h"
#include "penstock/shard/state/group_reduction.h"
#include "penstock/shard/state/shard_group.h"

namespace penstock {

class ShardContext : public std::enable_shared_from_this<ShardContext> {
 public:
  // Creates the context of the outermost module that contains `group`, for all its groups. [collective]:
  // ranks check that they have the same parameters.
  static void prepare(ShardGroup& group);

  explicit ShardContext(std::vector<ShardGroup*> groups);

  // Gathers the group immediately: an operator is about to use it.
  void before_use(ShardGroup& group);
  void after_forward(ShardGroup& group);
  void note_backward();
  void note_settled(ShardGroup& group);
  void ready_to_reduce(ShardGroup& group);
  // The end of a backward. A pipeline that runs backward itself calls it explicitly.
  void final_callback();
  // Removes every reference to a group that is being destroyed.
  static void forget(ShardGroup& group);
  void remove(ShardGroup& group);

  const std::vector<ShardGroup*>& groups() const { return groups_; }
  const std::vector<ShardGroup*>& forward_order() const { return order_; }
  // Prefetched when the first is used, instead of what the order suggests.
  void set_forward_prefetch(ShardGroup& group, std::vector<ShardGroup*> next);
  void set_backward_prefetch(ShardGroup& group, std::vector<ShardGroup*> next);
  bool prefetch = true;

  // The maximum number of bytes of gathered parameters and gather buffers at any time since the last reset.
  std::int64_t peak_gathered_bytes() const { return peak_; }
  void reset_peak() { peak_ = 0; }
  // Updates the peak from what is gathered now. `more`: bytes of a gather that is being assembled.
  void note_peak(std::int64_t more = 0);
  const BufferPool& pool() const { return pool_; }
  ShardTimes times;  // since the last reset

  // The streams beside the compute stream on which gathers are prepared and started, and on which reductions
  // run from their collective on. std::nullopt on the CPU and while own_streams is off. Work on them begins
  // after what was enqueued on the compute stream before; the compute stream waits for a gather when the
  // group is used, and for reductions at the end of backward.
  std::optional<c10::Stream> gather_stream(at::Device device) { return stream(gather_stream_, device); }
  std::optional<c10::Stream> reduce_stream(at::Device device) { return stream(reduce_stream_, device); }
  bool own_streams = true;

 private:
  struct Prefetch {
    ShardGroup* group;
    std::vector<ShardGroup*> next;
  };
  void agree() const;
  std::optional<c10::Stream> stream(std::optional<c10::Stream>& slot, at::Device device) const;
  std::size_t position_of(const ShardGroup& group) const;
  void use_in_forward(ShardGroup& group);
  // Called at the first use that records gradients after a backward: discards what earlier steps used.
  void begin_forward();
  // The group that followed this one in the last forward, or follows in the current one; null if none did.
  ShardGroup* group_after(const ShardGroup& group) const;
  void use_in_backward(ShardGroup& group);
  // Prefetches the groups chosen for this group; returns false if none were.
  static bool prefetch_chosen(const ShardGroup& group, const std::vector<Prefetch>& chosen);
  void start_reduction(ShardGroup& group);
  void finish(std::unique_ptr<GroupReduction>& reduction);
  void plan_reductions();
  void start_anew();

  std::vector<ShardGroup*> groups_;      // in registration order of their modules, outermost first
  std::vector<ShardGroup*> order_;       // of first use, since the forward after the last backward began
  std::vector<ShardGroup*> last_order_;  // the same for the forwards before that backward
  bool backward_ended_ = false;          // and no forward has begun since
  std::vector<ShardGroup*> open_;        // gathered by the current forward
  ShardGroup* current_ = nullptr;
  std::vector<Prefetch> forward_prefetch_, backward_prefetch_;
  bool callback_queued_ = false;
  std::vector<ShardGroup*> to_gather_;  // by the current backward, in this order
  std::size_t gathered_ = 0;            // how many of them were started
  std::vector<bool> ready_, settled_;   // by position in groups_
  std::vector<ShardGroup*> to_reduce_;  // in this order
  std::size_t reduced_ = 0;             // how many of them were started
  std::unique_ptr<GroupReduction> scattering_, replicating_;
  std::vector<std::unique_ptr<GroupReduction>> copying_;  // gradients being copied to the CPU
  std::int64_t peak_ = 0;
  BufferPool pool_;
  std::optional<c10::Stream> gather_stream_, reduce_stream_;  // of the device that asked first
};

}  // namespace penstock
