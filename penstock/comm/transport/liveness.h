// What this process knows about the ranks of its world: running, left in order, failed with a reason, or
// lost.
//
// The monitor (or, in a thread world, the runner) reports events; waiting operations query them. The first
// failure is kept and never changes, so that all errors of a process name the same rank. Thread safe.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "penstock/comm/transport/transfer.h"
#include "penstock/errors.h"

namespace penstock::comm {

enum class RankState {
  Running,
  Left,    // closed its world normally
  Failed,  // reported an error of its own
  Lost     // disappeared without notice: killed, crashed, or its host is unreachable
};

struct RankEvent {
  int rank = 0;
  RankState state = RankState::Running;
  std::string reason;

  // "rank 2 was lost: its connection closed without a goodbye", "rank 1 failed: ..."
  std::string describe() const;

  // Throws the PeerLostError for an operation that this event ended: about "<describe()><where>".
  [[noreturn]] void raise(CommContext context, const std::string& where = {}) const;
};

// The PeerLostError for a rank that reported an error of its own, as opposed to one that is gone without
// notice. Its process may still exist and answer questions.
class PeerFailedError final : public PeerLostError {
 public:
  using PeerLostError::PeerLostError;
};

// "nothing was heard from it for 8 s: its process is stopped, or its host or the network to it is down"; `it`
// may be "rank 1".
std::string silence_text(const std::string& it, Clock::duration silent);

class Liveness {
 public:
  explicit Liveness(int world_size);

  // Only the first report about a rank that is not Running counts; later ones are dropped.
  void report(const RankEvent& event);

  // Returns the first Failed or Lost rank, or std::nullopt.
  std::optional<RankEvent> first_failure() const;
  RankEvent state_of(int rank) const;

  // Waits until a failure is known or the deadline passes. A transport often notices a closed connection
  // before the monitor can say which rank it belonged to.
  std::optional<RankEvent> await_failure(Clock::time_point deadline) const;

  // Notes that nothing has been heard of a rank since then, or (std::nullopt) that it is heard again. A
  // silent rank still counts as running: its process may be stopped for a moment, or its network cut. The
  // rank is reported as lost when that lasts.
  void note_silence(int rank, std::optional<Clock::time_point> since);
  std::optional<Clock::time_point> silent_since(int rank) const;
  // For errors: "nothing was heard from rank 1 for 8 s: ...". Empty if no rank is silent.
  std::string describe_silence() const;

  // Calls `listener` on the reporting thread for each Failed or Lost event, until the token is destroyed. The
  // listener must be quick and must not call back into this object. It must own nothing whose destruction
  // waits for the reporting thread, such as a group: its last owner destroys the world and the monitor.
  using Listener = std::function<void(const RankEvent&)>;
  std::shared_ptr<void> listen(Listener listener);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<RankEvent> ranks_;
  std::map<int, Clock::time_point> silent_;
  std::optional<RankEvent> first_failure_;
  std::vector<std::weak_ptr<Listener>> listeners_;
};

}  // namespace penstock::comm
