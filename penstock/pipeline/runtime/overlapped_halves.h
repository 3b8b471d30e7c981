// Runs the forwards and the backwards of an overlapped unit as two halves that take turns: forwards on the
// calling thread, backwards on a thread of this object. A half lets the other one run where it waits for an
// exchange with other ranks (UnitHalf), and between blocks.
//
//   OverlappedHalves halves(timeout);
//   std::vector<UnitPiece> pieces = halves.run(
//       [&](auto& half) { half.piece(0, [&] { forward(); }); },
//       [&](auto& half) { half.piece(1, [&] { backward(); }); }, device);
//
// Why turns, and not two halves at once: where the halves switch depends on what they compute only, not on
// time. All ranks that run the same unit start their collectives in the same order, whatever their number and
// kind (rows of experts, tensor parallelism, shards), in one communicator each; nothing that both halves use
// needs a lock; and every sum has the order that it has without overlapping, so that results have the same
// bits. Only waiting overlaps with computation, which is what is to be hidden: a second half that computes at
// the same time would take the cores of the first.
//
// The thread of the backwards takes over the thread-local state of the calling one: LibTorch's (grad mode,
// dispatch keys, modes, observers, the context of the step), autocast, floating-point environment, implicit
// replication and the number of threads.
//
// CUDA: autograd runs the nodes of a backward on its own thread for the device, which then waits for its
// turn. A forward that runs a backward of its own would need that thread: after the time limit both halves
// fail.
//
// An exception of one half cancels the other one at its next switch, and is thrown by run() after both have
// ended.
// Thread safety: one thread.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/base/turn_taking.h"
#include "penstock/pipeline/program/executor.h"
#include "penstock/torch/random/unit_half.h"

namespace penstock {

class OverlappedHalves {
 public:
  // `limit`: how long a half waits for its turn.
  explicit OverlappedHalves(std::chrono::milliseconds limit) : limit_(limit) {}
  ~OverlappedHalves();
  OverlappedHalves(const OverlappedHalves&) = delete;
  OverlappedHalves& operator=(const OverlappedHalves&) = delete;

  // What the halves of a unit have in common. The one whose turn it is writes.
  struct Unit {
    explicit Unit(std::chrono::milliseconds limit) : turns(limit) {}
    TurnTaking turns;
    std::vector<UnitPiece> pieces;
    int overlapped = 0;  // exchanges
  };

  class Half final : public UnitHalf {
   public:
    // Shared: thread-local state that somebody keeps may outlive the unit. Its switches then do nothing.
    Half(std::shared_ptr<Unit> unit, int party) : unit_(std::move(unit)), party_(party) {}

    // Runs a part of a member of the unit and records its times.
    template <class Body>
    void piece(int member, const Body& body) {
      member_ = member;
      begin_ns_ = steady_now_ns();
      body();
      record(UnitPiece::Kind::Compute);
    }
    // Between parts.
    void hand_over() { unit_->turns.hand_over(party_); }

    void begin_exchange() override;
    void end_exchange() noexcept override;

   private:
    // From the last switch to now.
    void record(UnitPiece::Kind kind);

    const std::shared_ptr<Unit> unit_;
    const int party_;
    int member_ = 0;
    std::int64_t begin_ns_ = 0;
  };

  using Body = std::function<void(Half&)>;
  // Returns the times of both, by their beginnings. `device`: what the halves compute on.
  std::vector<UnitPiece> run(const Body& forwards, const Body& backwards, c10::Device device);

  // Number of exchanges so far during which the other half computed.
  int overlapped_exchanges() const { return overlapped_; }

 private:
  // Runs jobs on the thread, which the first one starts.
  void start(std::function<void()> job);
  void await_job();
  void serve();

  const std::chrono::milliseconds limit_;
  int overlapped_ = 0;

  std::mutex mutex_;  // guards job_ and stop_
  std::condition_variable changed_;
  std::function<void()> job_;  // until it has run
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace penstock
