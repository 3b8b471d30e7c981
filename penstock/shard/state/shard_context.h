// What the groups under one outermost module share: the order of things.
//
// - Forward: a group is gathered at its first use. Groups beside it that are finished are freed then, and the one that followed last
//   time is asked for ahead, so that at most two are gathered at once.
// - Backward: every group that the forwards since the last backward used is gathered once more, in the reverse order of forward. A group whose gradients have all come is freed
//   and reduced at once; reductions run while backward goes on. They start in the same order.
// - Both orders hold whatever a rank has used: what it has not needed is gathered and reduced (as zeros) at the end of its backward,
//   and those that come after it wait for that. So ranks may differ in what they compute gradients of.
// - End of backward: everything that is left is settled.
// Private to this folder; others use ShardState. Thread rule: as for ShardGroup.
#pragma once

#include <c10/core/Stream.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/shard/state/group_reduction.h"
#include "penstock/shard/state/parameter_group.h"
#include "penstock/shard/state/shard_times.h"

namespace penstock {

class ShardContext : public std::enable_shared_from_this<ShardContext> {
 public:
  // Makes the context of the outermost module that `group` lies under, for all its groups. [collective]: ranks check that they have
  // the same parameters.
  static void prepare(ShardGroup& group);

  explicit ShardContext(std::vector<ShardGroup*> groups);

  // Gathers the group, now: an operator is about to use it.
  void before_use(ShardGroup& group);
  void after_forward(ShardGroup& group);
  void note_backward();
  void note_settled(ShardGroup& group);
  void ready_to_reduce(ShardGroup& group);
  // The end of a backward. A pipeline that runs backward in its own way calls it by hand.
  void final_callback();
  // A group that goes: no word of it stays.
  static void forget(ShardGroup& group);
  void remove(ShardGroup& group);

  const std::vector<ShardGroup*>& groups() const { return groups_; }
  const std::vector<ShardGroup*>& forward_order() const { return order_; }
  // Asked for ahead when the first is used; else what the order says.
  void set_forward_prefetch(ShardGroup& group, std::vector<ShardGroup*> next);
  void set_backward_prefetch(ShardGroup& group, std::vector<ShardGroup*> next);
  bool prefetch = true;

  // The most bytes of gathered parameters and gather buffers there have been at once, since the last reset.
  std::int64_t peak_gathered_bytes() const { return peak_; }
  void reset_peak() { peak_ = 0; }
  // Looks at what is gathered now. `more`: bytes of a gather that is being put together.
  void note_peak(std::int64_t more = 0);
  const BufferPool& pool() const { return pool_; }
  ShardTimes times;  // since the last reset

  // Where gathers are prepared and started, and where reductions run from their collective on: beside the stream that computes. None on the
  // CPU, and none while own_streams is off. Work there begins after what the computing stream was given before; the computing
  // stream waits for a gather when the group is used, and for reductions at the end of backward.
  std::optional<c10::Stream> gather_stream(at::Device device) { return stream(gather_stream_, device); }
  std::optional<c10::Stream> reduce_stream(at::Device device) { return stream(reduce_stream_, device); }
  bool own_streams = true;

 private:
  struct Ahead {
    ShardGroup* group;
    std::vector<ShardGroup*> next;
  };
  void agree() const;
  std::optional<c10::Stream> stream(std::optional<c10::Stream>& slot, at::Device device) const;
  std::size_t position_of(const ShardGroup& group) const;
  void use_in_forward(ShardGroup& group);
  // The first use that records gradients after a backward: what earlier steps used counts no more.
  void begin_forward();
  // What followed the group in the last forward, or follows in this one; null if nothing did.
  ShardGroup* follower_of(const ShardGroup& group) const;
  void use_in_backward(ShardGroup& group);
  // Gathers ahead what was chosen for the group; false when nothing was.
  static bool ask_ahead(const ShardGroup& group, const std::vector<Ahead>& chosen);
  void start_reduction(ShardGroup& group);
  void finish(std::unique_ptr<GroupReduction>& reduction);
  void plan_reductions();
  void start_anew();

  std::vector<ShardGroup*> groups_;  // modules in the order they were registered, the outermost first
  std::vector<ShardGroup*> order_;   // of first use, since the forward that followed the last backward began
  std::vector<ShardGroup*> last_order_;  // the same of the forwards before that backward
  bool backward_ended_ = false;          // and no forward has begun since
  std::vector<ShardGroup*> open_;    // gathered by this forward
  ShardGroup* current_ = nullptr;
  std::vector<Ahead> forward_ahead_, backward_ahead_;
  bool callback_queued_ = false;
  std::vector<ShardGroup*> to_gather_;  // by the backward that runs, in this order
  std::size_t gathered_ = 0;             // how many of them have been started
  std::vector<bool> ready_, settled_;    // by position in groups_
  std::vector<ShardGroup*> to_reduce_;  // in this order
  std::size_t reduced_ = 0;              // how many of them have been started
  std::unique_ptr<GroupReduction> scattering_, replicating_;
  std::vector<std::unique_ptr<GroupReduction>> copying_;  // gradients on their way to the CPU
  std::int64_t peak_ = 0;
  BufferPool pool_;
  std::optional<c10::Stream> gather_stream_, reduce_stream_;  // of the device that asked first
};

}  // namespace penstock
