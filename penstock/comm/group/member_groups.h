// Groups that their members make among themselves, when they first ask for them. Inside of World::group_of.
//
// Ranks may ask for groups in any order, so a rank that waits for one group must be able to serve others:
//
//   rank 0 asks for 0,1 then 2,0      Each waits for the next one: with one group at a time this would never end.
//   rank 1 asks for 1,2 then 0,1
//   rank 2 asks for 2,0 then 1,2
//
// 1. The first member that asks leaves word in the other members' inboxes (keys in the store).
// 2. Every group is opened by a thread of its own: it says "here", and when all members are there, the first one compares
//    what they said and gives the verdict; after "ok" they connect.
// 3. A rank that waits in `get` reads its inbox and opens the groups it finds there, too, before its program asks.
//
// So a group comes about as soon as every member has asked for it or waits in `get` for another one. A member that does
// neither until the deadline is named in a TimeoutError on every rank that asked; one that left, in a PeerLostError. One
// verdict holds for all: whoever writes it first.
//
// Thread rule: any thread may call. The destructor ends what is still waiting for members and does not wait for them.
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
  // What tells groups apart.
  struct Key {
    std::vector<int> ranks;
    std::string purpose;
    P2PTransport p2p = P2PTransport::Auto;
    auto operator<=>(const Key&) const = default;
  };

  // The opening of this group, started unless it is known. With mutex_ held.
  static std::string name_of(const Key& key);
  bool is_open(const Key& key) const;  // or failed to open; needs mutex_
  Opening& begin(const Key& key);
  void run(Opening& opening);
  std::shared_ptr<class GroupState> open(const Opening& opening);
  std::string await_verdict(const Opening& opening);
  std::string judge(const Opening& opening) const;
  // Writes the verdict unless there is one.
  void decide(const Opening& opening, const std::string& verdict) const;
  void tell_members(const Opening& opening) const;
  void read_inbox();
  // Called now and then while an opening is waited for: gives up on members that left, and on all that are missing once
  // the deadline has passed.
  void look_for_missing(const Opening& opening, bool deadline_passed, bool slack_passed) const;

  const std::shared_ptr<WorldCore> core_;
  std::atomic<bool> closing_{false};

  std::mutex mutex_;  // guards what follows and what the openings say of their end
  std::condition_variable ended_;
  std::map<Key, std::unique_ptr<Opening>> openings_;

  std::mutex inbox_mutex_;
  std::int64_t inbox_read_ = 0;  // guarded by inbox_mutex_
};

// "0-7", "0-6:2" (every second one), "0,4", "0-1,4-5". Different lists have different texts.
std::string rank_list_text(const std::vector<int>& ranks);

}  // namespace penstock::comm
