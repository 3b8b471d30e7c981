// Internals of Work and Group: one operation in flight, and the state that all operations of a group share.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "penstock/base/env.h"
#include "penstock/comm/backend/backend.h"
#include "penstock/comm/group/contract.h"
#include "penstock/comm/group/group_waits.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/network/host_map.h"
#include "penstock/comm/rendezvous/monitor.h"
#include "penstock/comm/rendezvous/store.h"
#include "penstock/comm/transport/liveness.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/errors.h"

namespace penstock::comm {

class GroupState;

// State shared by all groups of one process.
struct WorldCore {
  LaunchEnv env;
  Store store;
  std::shared_ptr<Liveness> liveness;
  std::unique_ptr<Monitor> monitor;  // null in thread worlds and fake worlds, where no rank can die alone
  std::chrono::milliseconds timeout{};
  bool fake = false;
  std::string name_suffix;  // distinguishes the ranks of one process in a thread world
  HostMap hosts;            // empty if the ranks are not processes: all on one host
  bool own_gpus = false;    // every rank has its own GPU, so NCCL can be used
  int gpu_index = 0;
  int next_group = 0;

  // Reports to every other rank that this one failed.
  void fail(const std::string& reason) noexcept;
};

// One operation in flight.
class WorkState {
 public:
  WorkState(std::shared_ptr<GroupState> group, const char* operation, std::string label,
            std::optional<int> peer, std::uint64_t bytes, std::optional<std::chrono::milliseconds> timeout,
            int tag = 0);
  ~WorkState();
  WorkState(const WorkState&) = delete;
  WorkState& operator=(const WorkState&) = delete;

  void wait(std::chrono::milliseconds timeout);
  void wait() { wait(timeout_); }
  bool done();

  void add(TransferPtr transfer) { transfers_.push_back(std::move(transfer)); }
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }
  // Records the contract of the transfer just added, for the stall watch.
  void expect(const ExpectedTransfer& expected) { expected_transfers_.push_back(expected); }
  // Adds a step that runs on the waiting thread once everything has arrived, after the steps added before:
  // checks, copies out, sums. A step may add transfers and further steps (a second phase), which are waited
  // for and run in turn.
  void then(std::function<void(WorkState&)> step) { steps_.push_back(std::move(step)); }
  // Declares that a step transfers more or waits for other works, so that this one is not done when its
  // transfers are.
  void continues_in_steps() { continues_in_steps_ = true; }
  // For use in a step: waits for one more transfer under this work's deadline.
  void wait_for(Transfer& transfer);

  GroupState& group() { return *group_; }
  CommContext context() const;
  const std::string& label() const { return label_; }
  const char* operation() const { return operation_; }
  std::optional<int> peer() const { return peer_; }
  const c10::SmallVector<ExpectedTransfer, 1>& expected_transfers() const { return expected_transfers_; }

 private:
  void finish(std::exception_ptr error) noexcept;

  std::shared_ptr<GroupState> group_;
  const char* operation_;
  std::string label_;
  std::optional<int> peer_;  // global rank
  std::chrono::milliseconds timeout_;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point deadline_;
  std::uint64_t record_;
  // Inline storage for the usual one or two, so that a transfer allocates no more often than c10d's own.
  c10::SmallVector<TransferPtr, 2> transfers_;
  c10::SmallVector<at::Tensor, 2> kept_;
  c10::SmallVector<ExpectedTransfer, 1> expected_transfers_;
  std::deque<std::function<void(WorkState&)>> steps_;  // a deque: a running step may add more
  bool continues_in_steps_ = false;
  bool finished_ = false;
  bool timed_out_ = false;
  std::exception_ptr error_;
};

// The state of a group on this rank.
class GroupState : public std::enable_shared_from_this<GroupState> {
 public:
  GroupState(std::shared_ptr<WorldCore> world, std::string name, std::vector<int> ranks,
             std::chrono::milliseconds timeout);
  ~GroupState();

  // Makes the loss of any rank end the waits of this group. Called once, by the creator of the group.
  void follow_liveness();

  // Throws the group's first error if it has failed: no operation may start on a failed group.
  void check_usable(const char* operation) const;

  // Waits for one transfer. Translates every failure, marks the group failed and notifies the other ranks.
  void wait_for(Transfer& transfer, WorkState& work, Clock::time_point deadline);

  // Runs `start`, which starts transfers of `work`. An error of a transport is translated as in a wait and
  // marks the group failed; argument errors are rethrown and leave the group usable.
  void started(WorkState& work, const std::function<void()>& start);

  // Marks the group failed with this error and notifies every other rank. Only the first error is kept.
  void fail(const std::string& reason, std::exception_ptr error) noexcept;

  // Takes ownership of memory that an abandoned operation may still write to.
  void adopt_abandoned(c10::ArrayRef<TransferPtr> transfers, c10::ArrayRef<at::Tensor> tensors);

  // Returns the sequence number of the next transfer with this (member, tag, direction).
  std::uint32_t next_number(bool sends, int position, int tag);

  int own_rank() const { return world->env.rank; }
  // Returns the name without the suffix that distinguishes the ranks of one process: the same on every
  // member.
  std::string common_name() const { return name.substr(0, name.size() - world->name_suffix.size()); }
  // Returns the tag for one phase of a composed collective; all members count operations in the same way.
  int internal_tag(std::uint32_t sequence, int phase) const;

  const std::shared_ptr<WorldCore> world;
  const std::string name;
  const std::vector<int> ranks;  // global rank by position
  const int axis_rank;           // -1: not a member
  const std::chrono::milliseconds timeout;
  const DebugLevel debug = debug_level();
  const std::shared_ptr<GroupWaits> waits;  // never null

  std::shared_ptr<Backend> cpu;   // Gloo or fake; null if this build has none
  std::shared_ptr<Backend> cuda;  // NCCL or fake; null: CUDA tensors go through host memory
  // Point-to-point transfers of CPU tensors use UCX between members of one host and `cpu` between hosts. The
  // same on every member, also on one that is alone on its host and has no transport.
  bool ucx_within_hosts = false;
  std::shared_ptr<UcxTransport> ucx;  // null if no other member is on this host, or UCX is not chosen
  std::vector<int> ucx_position;      // by position: position in `ucx`; -1: on another host

  // Whether transfers with the member at this position use UCX.
  bool reaches_by_ucx(int position) const {
    return ucx != nullptr && ucx_position[static_cast<std::size_t>(position)] >= 0;
  }
  Backend::Abilities cpu_can, cuda_can;
  std::atomic<std::uint64_t> operations{0};  // number started, of any kind
  std::atomic<std::uint32_t> sequence{0};    // number of composed collectives started

 private:
  [[noreturn]] void raise(const std::string& transport_error, WorkState& work, bool timed_out);

  mutable std::mutex mutex_;  // guards the members below
  std::exception_ptr error_;
  std::vector<TransferPtr> abandoned_transfers_;
  std::vector<at::Tensor> abandoned_tensors_;
  std::shared_ptr<void> listener_;

  std::mutex numbers_mutex_;
  std::unordered_map<std::uint64_t, std::uint32_t>
      numbers_;  // transfers started, by direction, member and tag
};

}  // namespace penstock::comm
