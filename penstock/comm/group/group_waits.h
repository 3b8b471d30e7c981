// The waits of one group that are under way on this rank, for the threads that look at them from outside: the
// monitor's, which ends them when a rank is lost, and the stall watch's, which compares long ones with what
// the other side reports.
//
// A separate object, so that those threads never own the group. Whoever releases a group last destroys it,
// and with it perhaps the world, whose monitor then waits for its own thread to end: on that thread, for
// itself.
//
// Thread safety: any thread may call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "penstock/comm/group/contract.h"
#include "penstock/comm/rendezvous/store.h"
#include "penstock/comm/transport/transfer.h"

namespace penstock::comm {

class WorkState;

// One point-to-point transfer of an operation, as seen by this side.
struct ExpectedTransfer {
  bool sends = false;
  int position = 0;  // of the other side in the group
  Contract contract;
};

// A wait under way.
struct GroupWait {
  Transfer* transfer;
  Clock::time_point since;
  Clock::time_point post_at;  // when to start notifying the other ranks
  const WorkState* work;      // not modified while it waits
};

class GroupWaits {
 public:
  // `common_name` is the same on every member; `ranks` are global, by position; `position` is this rank's, -1
  // if it is not a member.
  GroupWaits(Store store, std::string common_name, std::vector<int> ranks, int position);

  // Announces a wait as long as it exists. The transfer and the work must outlive it.
  class Scope {
   public:
    Scope(GroupWaits& waits, Transfer& transfer, const WorkState& work, Clock::time_point deadline);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    GroupWaits& waits_;
    std::list<GroupWait>::iterator place_;
  };

  // Ends all waits under way.
  void interrupt();

  // Called periodically by the stall watch: posts this rank's status if it waits for long, and compares long
  // waits with what the other side reports. A difference ends the wait; `mismatch` then describes it, naming
  // both sides. The store is not accessed otherwise.
  void check();
  std::string mismatch() const;

  // Called after a successful wait: withdraws what the stall watch posted about it. Otherwise the store would
  // grow with each long wait.
  void withdraw_posts();

  // Posts what this rank is doing, and returns what the other members have posted, for the error of a wait
  // that timed out: "; no status from rank 1 (busy elsewhere or stopped); rank 2 is in all_reduce".
  std::string describe_missing_ranks(const WorkState& work);

  // Called when the group is destroyed: from now on `check` does nothing. Waits for a check under way, so
  // that the store can be closed, but no longer than a second if the store does not answer.
  void close();

 private:
  void compare_with_others();
  void post_long_wait();
  std::string status_key(int position) const;
  int own_rank() const { return ranks_[static_cast<std::size_t>(position_)]; }
  std::string find_mismatch(const ExpectedTransfer& expected, const std::string& label);

  const std::string common_name_;
  const std::vector<int> ranks_;
  const int position_;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable checked_;
  std::optional<Store> store_;  // released when closed; used without the lock until then
  std::list<GroupWait> waiting_;
  std::string mismatch_;
  bool checking_ = false;
  bool closed_ = false;

  // Whether this rank's status is in the store, for ranks whose wait has failed. Changed under mutex_;
  // status_mutex_ is held while the status is written.
  std::atomic<bool> status_posted_ = false;
  // The contracts of long waits that are in the store; those of waits that continue are posted again.
  std::atomic<bool> contracts_posted_ = false;
  std::set<std::string> contracts_;
  std::mutex status_mutex_;  // also guards contracts_
};

}  // namespace penstock::comm
