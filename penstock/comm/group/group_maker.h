// Creates this rank's side of a group once its members have agreed on it: communicators, registration by
// name, stall watch. Used by World; not for users.
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
  std::string name;  // the same on every member, unique on each rank
  std::string key;   // prefix in the store, unique in the world
  std::vector<int> ranks;
  std::chrono::milliseconds timeout{};
  P2PTransport p2p = P2PTransport::Auto;
};

// Returns what is wrong with a list of ranks (empty, a duplicate, a rank outside the world), or "" if it is
// valid.
std::string validation_error(const std::vector<int>& ranks, int world_size);

// Returns the transport for point-to-point transfers of a group with this setting: "gloo" or "ucx".
std::string p2p_transport_name(P2PTransport wanted = P2PTransport::Auto);

// Collective over the members. A rank that is not a member gets a state that holds only the name. Any thread
// may call.
std::shared_ptr<GroupState> make_group(const std::shared_ptr<WorldCore>& core, const GroupRecipe& recipe,
                                       Clock::time_point deadline);

// Throws the error for a failed group creation: the current exception, or an error that names the rank known
// to have died or failed. Also reports the failure to the other ranks. Call from a catch block; argument
// errors are rethrown unchanged.
[[noreturn]] void rethrow_as_group_error(WorldCore& core, const std::string& group, const std::string& what);

}  // namespace penstock::comm
