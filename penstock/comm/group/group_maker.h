// Makes the member side of a group once its members have agreed on it: communicators, registration by name, stall watch.
// Inside of World; users call World.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "penstock/comm/transport/transfer.h"
#include "penstock/world.h"

namespace penstock::comm {

class GroupState;
struct WorldCore;

struct GroupRecipe {
  std::string name;  // the same on every member, one of a kind on each
  std::string key;   // prefix in the store, one of a kind in the world
  std::vector<int> ranks;
  std::chrono::milliseconds timeout{};
  P2PTransport p2p = P2PTransport::Auto;
};

// What is wrong with a list of ranks: none, one twice, one outside the world. Empty when it is good.
std::string complaint_about(const std::vector<int>& ranks, int world_size);

// "gloo" or "ucx": what a group of this choice carries point-to-point transfers by.
std::string p2p_transport_name(P2PTransport wanted = P2PTransport::Auto);

// Collective over the members; a rank that is none gets a state that only knows its name. May run on any thread.
std::shared_ptr<GroupState> make_group(const std::shared_ptr<WorldCore>& core, const GroupRecipe& recipe, Clock::time_point deadline);

// What the user is told when making a group failed: the error itself, or, where a rank is known to have died or failed,
// that one. Tells the other ranks, too. For use in a catch block; an error of arguments passes through.
[[noreturn]] void rethrow_as_group_error(WorldCore& core, const std::string& group, const std::string& what);

}  // namespace penstock::comm
