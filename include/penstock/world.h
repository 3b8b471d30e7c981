// The processes of a training run: the rank of this process, the number of ranks, and the groups they
// communicate through.
//
//   auto world = comm::World::from_env();          // launched by `penstock launch`, torchrun, mpirun or srun
//   auto ones = torch::ones({4});
//   world.group().all_reduce(ones).wait();         // every element is now world.size()
//   comm::MeshGroups grid = world.mesh("cpu", {{"dp", 2}, {"tp", world.size() / 2}});
//   grid.group("tp").barrier().wait();             // waits for the ranks with the same dp coordinate
//
// A World is a handle: copies refer to the same world. When the last copy is destroyed, this rank leaves the
// world. If it is destroyed by stack unwinding, the other ranks are notified that this one failed. The
// destructor does not wait for other ranks, except on rank 0, which hosts the store that the others use until
// they leave: it waits for them, at most for the timeout, and for seconds once a rank has failed.
//
// Thread safety: const member functions may be called from any thread. new_group is called by one thread, in
// the same order on every rank.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/device_mesh.h"
#include "penstock/group.h"

namespace penstock::comm {

struct LaunchEnv;
class MemberGroups;
class MeshGroups;
struct WorldCore;

// How point-to-point transfers of CPU tensors are carried out.
enum class P2PTransport {
  Auto,  // the value of PENSTOCK_P2P (gloo or ucx) if it is set, else Gloo
  Gloo,  // TCP connections
  Ucx    // shared memory between ranks of one host, TCP connections between hosts; only in builds with UCX
};

// Options of a world.
struct WorldOptions {
  // Timeout of rendezvous and of every operation. Zero: PENSTOCK_TIMEOUT_S, by default 300 s.
  std::chrono::milliseconds timeout{};
  P2PTransport p2p = P2PTransport::Auto;  // used by World::group
};

// Options of World::new_group.
struct GroupOptions {
  std::string name;                       // for errors and records; empty: numbered in order of creation
  std::chrono::milliseconds timeout{};    // of creation and of every operation; zero: the world's
  P2PTransport p2p = P2PTransport::Auto;  // used by the group
};

// Options of World::group_of.
struct MemberGroupOptions {
  // Requests with different purposes get different groups of the same ranks, whose transfers do not wait for
  // each other. Part of the group's name; must not contain ';' or '/'.
  std::string purpose;
  P2PTransport p2p = P2PTransport::Auto;  // requests that differ in it get different groups
  std::chrono::milliseconds timeout{};    // how long to wait for the members; zero: the world's timeout
};

// All ranks of a run, seen from one of them.
class World {
 public:
  // [collective over all processes] Connects to the other ranks as the launcher's environment variables say;
  // a process started without a launcher is a world of one rank. Throws ConfigError for a malformed
  // environment or a port in use, and TimeoutError if the master does not answer or ranks do not arrive (it
  // names them), within the timeout.
  static World from_env(const WorldOptions& options = {});
  // [collective over all processes] As from_env, with explicit values instead of environment variables.
  static World connect(const LaunchEnv& env, const WorldOptions& options = {});

  // Returns a world of `size` ranks seen from `rank`, without other processes, for planning and inspection.
  // Operations complete at once: a gather returns copies of the own input, a reduction returns the own input,
  // a receive leaves its tensor unchanged. Throws ValueError for a rank outside [0, size).
  static World fake(int rank, int size);
  // The same with groups that have the names they have in a real run, as captures that are to be replayed
  // there need. A group replaces one of the same name in an earlier fake world of this process.
  static World fake_with_real_names(int rank, int size);

  // Returns whether both are handles of the same world.
  bool is(const World& other) const { return core_ == other.core_; }

  // Rank of this process, in [0, size()).
  int rank() const;
  // Number of ranks.
  int size() const;
  // Rank among the processes of this host, in [0, local_size()).
  int local_rank() const;
  // Number of ranks on this host.
  int local_size() const;

  // Returns the group of all ranks.
  const Group& group() const { return everyone_; }

  // Returns the groups of a mesh over all ranks of this world, row-major, axes outermost first:
  //
  //   auto grid = world.mesh("cpu", {{"dp", 2}, {"tp", 2}});   // ranks 0 1 / 2 3
  //
  // Does not communicate. Throws ValueError if the product of the sizes is not size(), and for duplicate
  // names.
  MeshGroups mesh(const std::string& device_type,
                  const std::vector<std::pair<std::string, std::int64_t>>& axes) const;

  // [collective over the world] Creates a group. Every rank calls it with the same arguments in the same
  // order, whether it is a member or not; a rank outside gets a handle with is_member() == false. Fails on
  // every rank, within the timeout, if the lists differ between ranks, contain duplicates or ranks outside
  // the world, or if a rank does not call it.
  Group new_group(const std::vector<int>& ranks, const GroupOptions& options = {});

  // [collective over the members] Returns the group of exactly these ranks in this order. It is created when
  // its members first request it; later requests return the same group. Members may request several groups in
  // different orders: a group is created once every member has requested it or is waiting in a request for
  // another one. The list of all ranks in order is group(). Throws ValueError for an invalid list or one
  // without this rank; TimeoutError that names the members that did not request it within `timeout` (zero:
  // the world's timeout); PeerLostError if a member is gone. Operations of the group use the world's timeout.
  Group group_of(const std::vector<int>& ranks, std::chrono::milliseconds timeout = {}) const;
  // [collective over the members] As above, with options. Also throws ValueError for an invalid purpose.
  Group group_of(const std::vector<int>& ranks, const MemberGroupOptions& options) const;

  // Returns the transport to use where transfers of CPU tensors are frequent and waited for, as between the
  // stages of a pipeline: Auto if PENSTOCK_P2P is set, or if UCX is not built in or no two ranks are
  // processes of one host; Gloo if /dev/shm of a host with several ranks is smaller than 256 MB, which UCX
  // could exhaust; else Ucx. The same on every rank.
  P2PTransport low_latency_transport() const;

  // Publishes a text that other ranks can read by status_of, for diagnosis. Replaces the previous one with
  // the same key. Does not wait for other ranks.
  void post_status(const std::string& key, const std::string& word) const;
  // Returns what a rank last published with this key, or std::nullopt. Does not wait for that rank.
  std::optional<std::string> status_of(int rank, const std::string& key) const;
  // Returns why no further status of a rank can be expected: it was lost, has failed or has left. A rank from
  // which nothing was heard for the world's timeout is declared lost, to all ranks. Returns std::nullopt as
  // long as it runs, as far as is known here. Does not wait. For code that waits for a status.
  std::optional<std::string> why_gone(int rank) const;

  // Notifies every other rank that this one failed and why; their pending waits end with PeerLostError.
  void fail(const std::string& reason) noexcept;

 private:
  friend void run_ranks(int, std::chrono::milliseconds, const std::function<void(World&)>&);
  struct Membership;
  static World make_fake(int rank, int size, const std::string& name_suffix);
  explicit World(std::shared_ptr<WorldCore> core, P2PTransport p2p);

  std::shared_ptr<WorldCore> core_;
  std::shared_ptr<MemberGroups> member_groups_;  // destroyed after membership_: a failure is reported first
  std::shared_ptr<Membership> membership_;
  Group everyone_;
};

// Runs `body` once per rank, each on a thread of its own with a World of its own, as ranks of one world
// inside this process. Returns when all have finished; rethrows the error of the rank that failed first, and
// a PeerLostError only if there is no other error. If a body does not finish within `timeout`, every wait for
// communication ends with an error; a TimeoutError is thrown if no rank failed before.
void run_ranks(int size, std::chrono::milliseconds timeout, const std::function<void(World&)>& body);

// Returns this rank's handle of a group of this process by its name, for the dispatcher operators. Throws
// ValueError if there is none.
Group find_group(const std::string& name);

// ---- groups of a mesh ----
//
// The groups through which the ranks of a mesh communicate: one per axis, created on first use.
//
//   comm::MeshGroups grid = world.mesh("cpu", {{"dp", 2}, {"tp", 4}});
//   grid.group("tp").all_reduce(x).wait();       // over the ranks with the same dp coordinate
//   grid.group("dp").all_reduce(w).wait();       // over the ranks with the same tp coordinate
//   grid.mesh().flatten();
//   grid.group("dp_tp").barrier().wait();        // over all ranks of the mesh
//
// Members may request groups in any order, and only members need to (see World::group_of). Equal lists of
// ranks are the same group, whatever mesh or axis they come from. The group of an axis of size 1 contains
// this rank only.
//
// A MeshGroups is a handle of a World and a DeviceMesh. Copies are cheap; handles made from the same World
// and equal meshes are equal.
//
// Thread safety: all member functions may be called from any thread.

// A mesh together with the world that its ranks belong to. See World::mesh for the usual way to make one.
class MeshGroups {
 public:
  // Does not communicate. Throws ValueError if the mesh is that of another rank or contains ranks outside the
  // world.
  MeshGroups(World world, DeviceMesh mesh);

  // The mesh, seen from this rank.
  const DeviceMesh& mesh() const;
  // The world that the ranks belong to.
  const World& world() const;
  // Sizes of the axes of the mesh.
  const std::vector<std::int64_t>& shape() const;
  // Coordinate of this rank in the mesh; empty if this rank is not in the mesh.
  const std::vector<std::int64_t>& coordinate() const;

  // [collective over the members on first use] Returns the group of this rank along an axis. Throws
  // ValueError for an unknown axis and on a rank that is not in the mesh; see World::group_of for other
  // errors.
  Group group(int axis) const;
  // [collective over the members on first use] Returns the group of this rank along an axis of this name, or
  // along a flattened axis of this name. Throws as above.
  Group group(std::string_view name) const;

  // [collective over the members on first use] Returns the group of all ranks of `part` in row-major order.
  // `part` is a slice, a flattened or a concatenated mesh of this world, seen from this rank. Throws
  // ValueError if this rank is not in it; see World::group_of for other errors.
  Group group_of(const DeviceMesh& part) const;

  // Returns the groups of another mesh of the same world, such as a slice, a flattened or a concatenated
  // mesh. Does not communicate; throws like the constructor.
  MeshGroups with_mesh(const DeviceMesh& mesh) const;

  // Returns a handle of each mesh of this process for which there is one, in the order in which they were
  // made; of thread worlds, the meshes of all ranks.
  static std::vector<MeshGroups> all();

  // A number that is equal for equal handles and is never reused in this process, for keys of tables.
  std::uint64_t id() const;
  // Whether both have the same world and equal meshes.
  friend bool operator==(const MeshGroups& a, const MeshGroups& b) { return a.state_ == b.state_; }

 private:
  struct State;
  explicit MeshGroups(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace penstock::comm
