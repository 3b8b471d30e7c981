#include "penstock/world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"

namespace penstock::comm {

namespace {

void check(const World& world, const DeviceMesh& mesh) {
  if (mesh.this_rank() != world.rank())
    throw ValueError(describe(
        "groups of a mesh", fmt::format("the mesh of rank {} on rank {}", mesh.this_rank(), world.rank()),
        "the mesh of this rank", "pass world.rank() when creating the mesh, or use as_rank()"));
  const std::vector<int>& ranks = mesh.universe();
  if (const int last = *std::max_element(ranks.begin(), ranks.end()); last >= world.size())
    throw ValueError(describe("groups of a mesh", fmt::format("rank {} in {}", last, mesh.to_string()),
                              fmt::format("ranks below the world size {}", world.size()),
                              "start more ranks or shrink the mesh"));
}

}  // namespace

struct MeshGroups::State {
  State(World world, DeviceMesh mesh, std::uint64_t id)
      : world(std::move(world)),
        mesh(std::move(mesh)),
        shape(this->mesh.shape()),
        coordinate(this->mesh.coordinate().value_or(std::vector<std::int64_t>())),
        id(id),
        axes(shape.size()) {}

  // All states to which there is a handle, oldest first.
  struct Known {
    std::mutex mutex;
    std::vector<std::weak_ptr<State>> states;
    std::uint64_t next_id = 1;

    static Known& instance() {
      static Known& known = *new Known;
      return known;
    }
    // Needs the mutex. Destroy the list after it is released: destroying the last handle of a World takes
    // other locks.
    std::vector<std::shared_ptr<State>> held() {
      std::vector<std::shared_ptr<State>> all;
      std::erase_if(states, [&](const std::weak_ptr<State>& weak) {
        all.push_back(weak.lock());
        if (all.back()) return false;
        all.pop_back();
        return true;
      });
      return all;
    }
  };

  // Equal ones are the same object.
  static std::shared_ptr<State> intern(World world, DeviceMesh mesh) {
    Known& known = Known::instance();
    std::vector<std::shared_ptr<State>> held;
    const std::lock_guard lock(known.mutex);
    held = known.held();
    for (const std::shared_ptr<State>& state : held)
      if (state->world.is(world) && state->mesh == mesh) return state;
    auto state = std::make_shared<State>(std::move(world), std::move(mesh), known.next_id++);
    known.states.push_back(state);
    return state;
  }

  const World world;
  const DeviceMesh mesh;
  const std::vector<std::int64_t> shape, coordinate;
  const std::uint64_t id;
  std::mutex mutex;
  std::vector<std::optional<Group>> axes;  // those requested so far
};

MeshGroups::MeshGroups(World world, DeviceMesh mesh) {
  check(world, mesh);
  state_ = State::intern(std::move(world), std::move(mesh));
}

const DeviceMesh& MeshGroups::mesh() const { return state_->mesh; }
const World& MeshGroups::world() const { return state_->world; }
const std::vector<std::int64_t>& MeshGroups::shape() const { return state_->shape; }
const std::vector<std::int64_t>& MeshGroups::coordinate() const { return state_->coordinate; }
std::uint64_t MeshGroups::id() const { return state_->id; }

Group MeshGroups::group(int axis) const {
  const bool known = axis >= 0 && static_cast<std::size_t>(axis) < state_->axes.size();
  if (known) {
    const std::lock_guard lock(state_->mutex);
    if (const auto& group = state_->axes[static_cast<std::size_t>(axis)]) return *group;
  }
  // Without the lock: creating a group waits for its members.
  const Group group = state_->world.group_of(state_->mesh.rank_list(axis));
  if (StepContext::current()->trial) return group;  // it may exist only for the trial run
  const std::lock_guard lock(state_->mutex);
  state_->axes[static_cast<std::size_t>(axis)] = group;
  return group;
}

Group MeshGroups::group(std::string_view name) const { return group_of(state_->mesh[name]); }

Group MeshGroups::group_of(const DeviceMesh& part) const {
  check(state_->world, part);
  if (!part.contains(part.this_rank()))
    throw ValueError(describe("group of a mesh",
                              fmt::format("{} on rank {}", part.to_string(), state_->world.rank()),
                              "a mesh that contains this rank", "check contains(rank) first"));
  return state_->world.group_of(part.ranks());
}

std::vector<MeshGroups> MeshGroups::all() {
  std::vector<std::shared_ptr<State>> held;
  {
    State::Known& known = State::Known::instance();
    const std::lock_guard lock(known.mutex);
    held = known.held();
  }
  std::vector<MeshGroups> meshes;
  for (std::shared_ptr<State>& state : held) meshes.push_back(MeshGroups(std::move(state)));
  return meshes;
}

MeshGroups MeshGroups::with_mesh(const DeviceMesh& mesh) const { return {state_->world, mesh}; }

MeshGroups World::mesh(const std::string& device_type,
                       const std::vector<std::pair<std::string, std::int64_t>>& axes) const {
  std::vector<std::string> names;
  std::vector<std::int64_t> sizes;
  for (const auto& [name, axis_size] : axes) {
    names.push_back(name);
    sizes.push_back(axis_size);
  }
  DeviceMesh device_mesh =
      init_device_mesh(device_type, sizes, names, rank(), size());  // throws if the mesh is too large
  if (device_mesh.size() < size())
    throw ValueError(describe(
        "mesh of a world", fmt::format("{}, {} ranks", fmt::join(sizes, " x "), device_mesh.size()),
        fmt::format("all {} ranks of the world", size()),
        "enlarge an axis, start fewer ranks, or use init_device_mesh for a mesh of some of the ranks"));
  return {*this, std::move(device_mesh)};
}

}  // namespace penstock::comm
