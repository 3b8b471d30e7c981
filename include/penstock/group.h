// A group of ranks that communicate: point-to-point and collectives over c10d, with typed ranks, checked transfers,
// deadlines and records.
//
// Semantics
// - A Group is a handle; copies share the group, and `const` speaks of the handle alone. Made by World, never directly.
// - Every operation starts at once and returns a Work; `send` and `recv` are the blocking forms.
// - Collectives must be started in the same order by all members. Point-to-point operations match by (peer, tag) in order.
// - Ranks in calls are global ranks, whatever the group.
// - A failure of one operation is a failure of the group: later calls throw the same error, and every other rank is told.
// - Thread rule: one thread starts operations on a group; other threads may wait for Works.
//
// A point-to-point transfer is matched by everything both sides must agree on: peer, tag, order, dtype and size. One that
// does not fit never moves a byte; within about a second of waiting it is a MismatchError naming both sides, on
// both sides (at once over UCX). Nothing extra travels: the data goes from tensor to tensor in one message. On NCCL the
// contract of each (peer, tag) is exchanged once, and per transfer at debug level detail.
//
// Sums of float16 and bfloat16 accumulate in float32 and round once. Composed reductions add in rank order.
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

// A communication operation in flight. Keeps its tensors alive, is waited for with a deadline, and reports
// its first error.
//
// Thread safety: use a Work from one thread at a time. For CUDA tensors on NCCL, `wait` makes the current
// CUDA stream wait for the transfer and returns at once; in all other cases it blocks the calling thread.
class [[nodiscard]] Work {
 public:
  Work() = default;  // nothing to wait for
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  // Waits at most for the timeout of the operation, or of its group if it has none. Throws
  //   PeerLostError            a rank died, failed or left; names it
  //   TimeoutError             the deadline passed; the group becomes unusable, and every rank is notified
  //   MismatchError  the received data does not match what was expected; names both sides
  //   CommError                any other failure, with the backend's message
  // Later calls return, or throw the same error, at once.
  void wait();
  void wait(std::chrono::milliseconds timeout);

  // Returns whether `wait` would return without blocking. May be false for a completed transfer on backends
  // that cannot tell.
  bool done();

 private:
  std::shared_ptr<WorkState> state_;
};

// Waits for all, then throws the first error in the given order.
void wait_all(std::vector<Work>& works);

struct OpOptions {
  std::string label;                                 // the caller's words, for errors and records
  std::optional<std::chrono::milliseconds> timeout;  // else the group's
};

struct P2POptions {
  int tag = 0;  // 0 .. kMaxTag
  std::string label;
  std::optional<std::chrono::milliseconds> timeout;
};

// One transfer of a batch.
struct P2POp {
  enum class Kind { Send, Recv };
  Kind kind;
  at::Tensor tensor;
  int peer = 0;  // global rank
  P2POptions options;

  static P2POp send(at::Tensor tensor, int to, P2POptions options = {}) { return {Kind::Send, std::move(tensor), to, std::move(options)}; }
  static P2POp recv(at::Tensor tensor, int from, P2POptions options = {}) { return {Kind::Recv, std::move(tensor), from, std::move(options)}; }
};

class Group {
 public:
  static constexpr int kMaxTag = (1 << 28) - 1;

  Group() = default;
  explicit Group(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

  // False on a rank that is not in the group; such a handle only knows its name and ranks.
  bool is_member() const;
  explicit operator bool() const { return state_ != nullptr; }

  const std::string& name() const;
  const std::vector<int>& ranks() const;  // global ranks in group order
  int size() const;
  int axis_rank() const;                  // position of this rank in ranks()
  int rank_at(int axis_rank) const;
  std::chrono::milliseconds timeout() const;
  // "gloo", "nccl", "ucx", ... for a CPU or CUDA tensor and kind of operation; for people and tests.
  std::string describe_backends() const;

  // Point-to-point. The tensor of a receive must be contiguous memory or it is filled through a copy.
  void send(const at::Tensor& tensor, int to, const P2POptions& options = {}) const;
  void recv(const at::Tensor& tensor, int from, const P2POptions& options = {}) const;
  Work isend(const at::Tensor& tensor, int to, const P2POptions& options = {}) const;
  Work irecv(const at::Tensor& tensor, int from, const P2POptions& options = {}) const;
  // Starts all at once, receives first, so that neighbours which exchange do not wait for each other. One Work per entry.
  std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& ops) const;

  // In place, on every member.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::Sum, const OpOptions& options = {}) const;
  Work all_reduce_coalesced(const std::vector<at::Tensor>& tensors, ReduceOp op = ReduceOp::Sum, const OpOptions& options = {}) const;
  Work broadcast(const at::Tensor& tensor, int from, const OpOptions& options = {}) const;

  // output holds size() inputs in group order: output.numel() == size() * input.numel().
  Work all_gather(const at::Tensor& output, const at::Tensor& input, const OpOptions& options = {}) const;
  // outputs[i] receives the input of member i; sizes may differ, dtype may not.
  Work all_gather_uneven(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const OpOptions& options = {}) const;
  Work all_gather_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const OpOptions& options = {}) const;

  // input holds size() parts in group order; member i ends with the reduction of part i.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::Sum, const OpOptions& options = {}) const;
  // inputs[i] goes to member i; output has the size of inputs[axis_rank()].
  Work reduce_scatter_uneven(const at::Tensor& output, const std::vector<at::Tensor>& inputs, ReduceOp op = ReduceOp::Sum, const OpOptions& options = {}) const;
  Work reduce_scatter_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, ReduceOp op = ReduceOp::Sum, const OpOptions& options = {}) const;

  // Rows of dim 0: input_splits[i] rows go to member i, output_splits[i] rows come from it. Empty splits: even.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& output_splits = {},
                  const std::vector<std::int64_t>& input_splits = {}, const OpOptions& options = {}) const;

  Work barrier(const OpOptions& options = {}) const;

 private:
  friend class World;
  GroupState& member(const char* operation) const;
  std::shared_ptr<GroupState> state_;
};

}  // namespace penstock::comm
