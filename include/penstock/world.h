// The processes of one run: who this one is, and the groups it talks through.
//
//   auto world = penstock::comm::World::from_env();          // launched by `penstock launch`, torchrun, mpirun or srun
//   auto sums = torch::ones({4});
//   world.group().all_reduce(sums).wait();                    // every rank now holds world.size()
//
// A World is a handle; copies share it. When the last copy goes, this rank leaves in order; when it goes because an
// exception unwinds, the other ranks are told that this one failed. Neither waits for anybody.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/group.h"

namespace penstock::comm {

struct LaunchEnv;
class MemberGroups;
class MeshGroups;
struct WorldCore;

// What carries point-to-point transfers of CPU tensors.
enum class P2PTransport {
  Auto,  // PENSTOCK_P2P if set (gloo, ucx), else Gloo
  Gloo,
  Ucx    // ranks of one host only; needs a build with UCX
};

struct WorldOptions {
  std::chrono::milliseconds timeout{};  // of rendezvous and of every operation; zero: PENSTOCK_TIMEOUT_S, default 300 s
  P2PTransport p2p = P2PTransport::Auto;
};

struct GroupOptions {
  std::string name;                     // empty: made from the ranks' order of creation
  std::chrono::milliseconds timeout{};  // zero: the world's
  P2PTransport p2p = P2PTransport::Auto;
};

struct MemberGroupOptions {
  // Members that ask for different purposes get different groups of the same ranks: a transfer of one never waits behind a
  // transfer of another. Part of the name; must not contain ';' or '/'.
  std::string purpose;
  P2PTransport p2p = P2PTransport::Auto;
  std::chrono::milliseconds timeout{};  // for the members to come; zero: the world's
};

class World {
 public:
  // Throws ConfigError for a malformed environment or a port in use, TimeoutError for a master that does not answer or
  // ranks that never come (it names them), each within the deadline.
  static World from_env(const WorldOptions& options = {});
  static World connect(const LaunchEnv& env, const WorldOptions& options = {});

  // Any rank of any size, without peers: for planning and inspection. Collectives end at once (see make_fake_backend).
  static World fake(int rank, int size);

  // Whether both are handles of one world.
  bool is(const World& other) const { return core_ == other.core_; }

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;

  // All ranks.
  const Group& group() const { return everyone_; }

  // Collective over the whole world, in the same order everywhere, members or not; a rank outside gets a handle with
  // is_member() == false. Lists that differ between ranks, a duplicate, a rank outside the world or a rank that does not
  // come are an error on every rank within the deadline.
  Group new_group(const std::vector<int>& ranks, const GroupOptions& options = {});

  // The group of exactly these ranks in this order, made by its members alone when they first ask for it; asking again
  // gives the same group. Members may ask in any order, also for several groups crosswise; a group is there once every
  // member has asked for it, or asks for another one meanwhile (member_groups.h says how). The list of all ranks in order
  // is group(). Throws ValueError for a bad list or one without the own rank; TimeoutError naming the members that did not
  // come within `timeout` (zero: the world's); PeerLostError when one is gone. Operations use the world's timeout.
  Group group_of(const std::vector<int>& ranks, std::chrono::milliseconds timeout = {}) const;
  Group group_of(const std::vector<int>& ranks, const MemberGroupOptions& options) const;

  // What Auto should mean where transfers of CPU tensors are many and awaited, as between the stages of a pipeline:
  // PENSTOCK_P2P if set; else UCX where it is built in, the ranks are processes of one host and its shared memory is not
  // tiny (a container may have 64 MB, which UCX can exhaust); else Gloo. The same on every rank of a host.
  P2PTransport low_latency_transport() const;

  // A word that any rank can read, for diagnosis: nobody waits for it. Written over by the next one under the same key.
  void post_status(const std::string& key, const std::string& word) const;
  std::optional<std::string> status_of(int rank, const std::string& key) const;

  // Tells every other rank that this one failed and why; their waits then end with PeerLostError.
  void fail(const std::string& reason) noexcept;

 private:
  friend void run_ranks(int, std::chrono::milliseconds, const std::function<void(World&)>&);
  struct Membership;
  explicit World(std::shared_ptr<WorldCore> core, P2PTransport p2p);

  std::shared_ptr<WorldCore> core_;
  std::shared_ptr<MemberGroups> member_groups_;  // goes after membership_: the other ranks hear of a failure first
  std::shared_ptr<Membership> membership_;
  Group everyone_;
};

// A world of threads in this process: runs `body` once per rank, each on its own thread with its own World. Returns when
// all have ended; throws the error of the rank that failed first (the loss of a peer only when there is no other). A body
// that does not end within `timeout` is interrupted where it waits for communication.
void run_ranks(int size, std::chrono::milliseconds timeout, const std::function<void(World&)>& body);

// The member handle of a group made in this process, by its name; for the dispatcher operators. Throws ValueError.
Group find_group(const std::string& name);

}  // namespace penstock::comm
