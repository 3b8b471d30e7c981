// Groups that their members create among themselves on first use. Implements World::group_of.
//
// Ranks may request groups in any order, so a rank that waits for one group must be able to serve others:
//
//   rank 0 requests 0,1 then 2,0      Each rank waits for the next one: creating one group at a time would
//   rank 1 requests 1,2 then 0,1      deadlock.
//   rank 2 requests 2,0 then 1,2
//
// 1. The first member that requests a group posts a notice in the other members' inboxes (keys in the store).
// 2. Each group is opened by its own thread, which reports "here". When all members have reported, the first
//    one compares their reports and posts the verdict; after "ok" they connect.
// 3. A rank that waits in `get` reads its inbox and also opens the groups it finds there, before its own
//    program requests them.
//
// A group is therefore created as soon as every member has requested it or waits in `get` for another group.
// A member that has done neither by the deadline is named in a TimeoutError on every rank that requested the
// group; a member that left is named in a PeerLostError. The first verdict written holds for all members.
//
// Thread safety: any thread may call. The destructor cancels pending openings and does not wait for other
// members.
#pragma once

#include <atomic>
#include <compare>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/world.h"

namespace penstock::comm {

struct WorldCore;

class MemberGroups {
 public:
  explicit MemberGroups(std::shared_ptr<WorldCore> core);
  ~MemberGroups();
  MemberGroups(const MemberGroups&) = delete;
  MemberGroups& operator=(const MemberGroups&) = delete;

  // See World::group_of.
  Group get(const std::vector<int>& ranks, const MemberGroupOptions& options);

 private:
  struct Opening;
  // Identifies a group.
  struct Key {
    std::vector<int> ranks;
    std::string purpose;
    P2PTransport p2p = P2PTransport::Auto;
    auto operator<=>(const Key&) const = default;
  };

  static std::string name_of(const Key& key);
  bool is_open(const Key& key) const;  // or failed to open; needs mutex_
  // Returns the opening of this group and starts it if it is new. Needs mutex_.
  Opening& begin(const Key& key);
  void run(Opening& opening);
  std::shared_ptr<class GroupState> open(const Opening& opening);
  std::string await_verdict(const Opening& opening);
  std::string judge(const Opening& opening) const;
  // Writes the verdict unless one exists.
  void decide(const Opening& opening, const std::string& verdict) const;
  void notify_members(const Opening& opening) const;
  void read_inbox();
  // Called periodically while an opening is pending: gives up on members that left, and on all missing
  // members once the deadline has passed.
  void check_missing(const Opening& opening, bool deadline_passed, bool slack_passed) const;

  const std::shared_ptr<WorldCore> core_;
  std::atomic<bool> closing_{false};

  std::mutex mutex_;  // guards the members below and the results in the openings
  std::condition_variable ended_;
  std::map<Key, std::unique_ptr<Opening>> openings_;

  std::mutex inbox_mutex_;
  std::int64_t inbox_read_ = 0;  // guarded by inbox_mutex_
};

// "0-7", "0-6:2" (every second rank), "0,4", "0-1,4-5". Different lists have different texts.
std::string rank_list_text(const std::vector<int>& ranks);

}  // namespace penstock::comm
