// A group of ranks that communicate: point-to-point transfers and collectives over c10d, with checked
// transfers, timeouts and precise errors.
//
//   comm::Group group = world.group();
//   at::Tensor sum = torch::ones({4});
//   comm::Work work = group.all_reduce(sum, comm::ReduceOp::Sum, {.label = "loss", .timeout = {}});
//   work.wait();                                                  // sum is valid from here
//   if (world.rank() == 0) group.send(sum, 1, {.tag = 7, .label = "first", .timeout = {}});
//   if (world.rank() == 1) group.recv(sum, 0, {.tag = 7, .label = "first", .timeout = {}});
//
// A Group is a handle: copies refer to the same group, and `const` applies to the handle only. Groups are
// created by World. Every operation starts at once and returns a Work to wait for; `send` and `recv` block.
// Ranks in arguments are global ranks, in every group.
//
// All members start collectives in the same order. Point-to-point transfers match by peer and tag, in order.
// Both sides must also agree on dtype and size: a transfer that does not match moves no data, and within
// about a second of waiting both sides throw a MismatchError that names both (at once over UCX). The check
// costs no extra messages, except that on NCCL what each (peer, tag) expects is exchanged once, and for every
// transfer at debug level "detail".
//
// When an operation fails, the group becomes unusable: later calls throw the same error, and every other rank
// is notified. Invalid arguments are a ValueError, calls on an empty handle or on a rank that is not a member
// a StateError; neither affects the group.
//
// Sums of float16 and bfloat16 values are accumulated in float32 and rounded once. Reductions that Penstock
// composes from transfers add in the order of the members.
//
// During a trial run (StepContext::trial) operations complete at once without communication: received tensors
// are set to zero, tensors reduced in place keep their values.
//
// Thread safety: one thread starts the operations of a group; other threads may wait for their Works.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/reduce_op.h"

namespace penstock::comm {

class GroupState;
class WorkState;

// A communication operation that was started. Keeps its tensors alive until it completes.
//
// For CUDA tensors on NCCL, `wait` makes the current CUDA stream wait for the operation and returns at once;
// otherwise it blocks the calling thread. Thread safety: one thread at a time uses a Work.
class [[nodiscard]] Work {
 public:
  // An operation that has completed.
  Work() = default;
  // Used by Group.
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  // Waits until the operation has completed, at most for the timeout of the operation or, if it has none, of
  // its group. Later calls return, or throw the same error, at once. Throws
  //
  //   PeerLostError   a rank died, failed or left; names it
  //   TimeoutError    the timeout passed; the group becomes unusable, and every rank is notified
  //   MismatchError   the received data does not match what was expected; names both sides
  //   CommError       any other failure, with the backend's message
  void wait();
  // As above, with this timeout instead.
  void wait(std::chrono::milliseconds timeout);

  // Returns whether `wait` would return without blocking. May be false for a completed operation on backends
  // that cannot tell.
  bool done();

 private:
  std::shared_ptr<WorkState> state_;
};

// Waits for all works, then throws the first error in the given order.
void wait_all(std::vector<Work>& works);

// Options of a collective.
struct OpOptions {
  std::string label;                                 // shown in errors and records
  std::optional<std::chrono::milliseconds> timeout;  // default: the group's
};

// Options of a point-to-point transfer.
struct P2POptions {
  int tag = 0;                                       // 0 to Group::kMaxTag; equal on both sides
  std::string label;                                 // shown in errors and records
  std::optional<std::chrono::milliseconds> timeout;  // default: the group's
};

// One transfer of Group::batch_isend_irecv.
struct P2POp {
  // Direction of a transfer.
  enum class Kind {
    Send,  // to the peer
    Recv   // from the peer
  };
  Kind kind;           // direction
  at::Tensor tensor;   // what is sent, or filled
  int peer = 0;        // global rank of the other side
  P2POptions options;  // tag, label, timeout

  // Describes a send.
  static P2POp send(at::Tensor tensor, int to, P2POptions options = {}) {
    return {Kind::Send, std::move(tensor), to, std::move(options)};
  }
  // Describes a receive.
  static P2POp recv(at::Tensor tensor, int from, P2POptions options = {}) {
    return {Kind::Recv, std::move(tensor), from, std::move(options)};
  }
};

// A list of ranks and the means to communicate among them.
class Group {
 public:
  // The largest tag.
  static constexpr int kMaxTag = (1 << 28) - 1;

  // An empty handle: only is_member and operator bool may be called.
  Group() = default;
  // Used by World.
  explicit Group(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

  // Whether this rank is in the group. If not, only name, ranks and the like can be asked; operations throw
  // StateError.
  bool is_member() const;
  // Whether this is not an empty handle.
  explicit operator bool() const { return state_ != nullptr; }

  // Name of the group, unique in this process.
  const std::string& name() const;
  // Global ranks of the members, in group order.
  const std::vector<int>& ranks() const;
  // Number of members.
  int size() const;
  // Position of this rank in ranks(); -1 if it is not a member.
  int axis_rank() const;
  // Global rank of the member at a position. Throws ValueError for a position outside the group.
  int rank_at(int axis_rank) const;
  // Timeout of operations that have none of their own.
  std::chrono::milliseconds timeout() const;
  // Returns how CPU and CUDA tensors are transferred, for people and tests: "CPU gloo, CUDA nccl".
  std::string describe_backends() const;

  // Sends a tensor; returns when its memory may be reused. Throws as Work::wait.
  void send(const at::Tensor& tensor, int to, const P2POptions& options = {}) const;
  // Receives into a tensor; returns when it is filled. A CPU tensor that is not contiguous is filled through
  // a copy; a CUDA tensor on NCCL must be contiguous. Throws as Work::wait.
  void recv(const at::Tensor& tensor, int from, const P2POptions& options = {}) const;
  // Starts a send. The tensor must not be written until the Work has completed.
  Work isend(const at::Tensor& tensor, int to, const P2POptions& options = {}) const;
  // Starts a receive. The tensor must not be used until the Work has completed. See recv.
  Work irecv(const at::Tensor& tensor, int from, const P2POptions& options = {}) const;
  // Starts all transfers together, receives first, so that neighbors that exchange tensors do not wait for
  // each other. Returns one Work per entry.
  std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& ops) const;

  // [collective] Combines the tensors of all members, in place on every member.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::Sum, const OpOptions& options = {}) const;
  // [collective] all_reduce of several tensors as one operation.
  Work all_reduce_coalesced(const std::vector<at::Tensor>& tensors, ReduceOp op = ReduceOp::Sum,
                            const OpOptions& options = {}) const;
  // [collective] Copies the tensor of global rank `from` into the tensors of the other members.
  Work broadcast(const at::Tensor& tensor, int from, const OpOptions& options = {}) const;

  // [collective] Fills `output` with the inputs of all members in group order: output.numel() == size() *
  // input.numel().
  Work all_gather(const at::Tensor& output, const at::Tensor& input, const OpOptions& options = {}) const;
  // [collective] Fills outputs[i] with the input of member i. Sizes may differ between members; the dtype may
  // not.
  Work all_gather_uneven(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                         const OpOptions& options = {}) const;
  // [collective] all_gather of several tensors as one operation: outputs[i] is filled with the inputs[i] of
  // all members.
  Work all_gather_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                            const OpOptions& options = {}) const;

  // [collective] Combines the inputs of all members, which consist of size() parts in group order; `output`
  // of member i receives part i: input.numel() == size() * output.numel().
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::Sum,
                      const OpOptions& options = {}) const;
  // [collective] Combines inputs[i] of all members into `output` of member i. Sizes may differ between
  // members; `output` has the size of inputs[axis_rank()].
  Work reduce_scatter_uneven(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                             ReduceOp op = ReduceOp::Sum, const OpOptions& options = {}) const;
  // [collective] reduce_scatter of several tensors as one operation, from inputs[i] to outputs[i].
  Work reduce_scatter_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                ReduceOp op = ReduceOp::Sum, const OpOptions& options = {}) const;

  // [collective] Exchanges rows (dim 0): input_splits[i] rows go to member i, output_splits[i] rows come from
  // it. Empty splits divide the rows evenly.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input,
                  const std::vector<std::int64_t>& output_splits = {},
                  const std::vector<std::int64_t>& input_splits = {}, const OpOptions& options = {}) const;

  // [collective] Completes when all members have started it.
  Work barrier(const OpOptions& options = {}) const;

 private:
  friend class World;
  GroupState& member(const char* operation) const;
  std::shared_ptr<GroupState> state_;
};

}  // namespace penstock::comm
