#include "penstock/comm/group/group_maker.h"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <set>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/text.h"
#include "penstock/comm/group/stall_watch.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<GroupState>> groups;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

P2PTransport resolve(P2PTransport wanted) {
  if (wanted != P2PTransport::Auto) return wanted;
  return env_choice("PENSTOCK_P2P", {"gloo", "ucx"}, "gloo") == "ucx" ? P2PTransport::Ucx
                                                                      : P2PTransport::Gloo;
}

// A Gloo connection is complete on one side before it is on the other: a member that leaves at once would be
// considered lost by one that is still connecting. So no member continues before all have connected.
void await_members(const Store& store, int size, Clock::time_point deadline) {
  if (store.add("connected", 1) == size) store.set("all_connected", "1");
  store.get("all_connected", deadline, "members that are still connecting");
}

// Opens the communicators of a group that this rank belongs to. Collective over the members.
void open_backends(GroupState& group, P2PTransport p2p, const std::string& key, Clock::time_point deadline) {
  const WorldCore& core = *group.world;
  BackendOptions options;
  options.axis_rank = group.axis_rank;
  options.size = static_cast<int>(group.ranks.size());
  options.timeout = group.timeout;
  options.loopback_only = core.one_host && (core.env.rendezvous.loopback_only() ||
                                            core.env.rendezvous.kind != Rendezvous::Kind::Tcp);
  options.device_index = core.gpu_index;
  if (core.fake) {
    group.cpu = group.cuda = make_fake_backend(options);
  } else {
    if (gloo_available()) group.cpu = make_gloo_backend(core.store.with_prefix(key + "/gloo"), options);
    if (core.own_gpus) group.cuda = make_nccl_backend(core.store.with_prefix(key + "/nccl"), options);
    if (resolve(p2p) == P2PTransport::Ucx && options.size > 1) {
      if (!core.one_host)
        throw ConfigError(
            "UCX supports point-to-point transfers only within one host, but this world spans several; set "
            "PENSTOCK_P2P=gloo");
      const Store store = core.store.with_prefix(key);
      group.ucx = std::make_shared<UcxTransport>(
          options.axis_rank, options.size,
          [&](const std::string& name, const std::string& bytes) { store.set(name, bytes); },
          [&](const std::string& name) { return store.get(name, deadline, "a member's UCX address"); },
          UcxOptions{.spin = std::nullopt, .ranks_on_host = core.env.local_world_size});
    }
  }
  if (!core.fake && options.size > 1) await_members(core.store.with_prefix(key), options.size, deadline);
  if (group.cpu) group.cpu_can = group.cpu->abilities();
  if (group.cuda) group.cuda_can = group.cuda->abilities();
}

}  // namespace

std::string validation_error(const std::vector<int>& ranks, int world_size) {
  if (ranks.empty()) return "the list is empty; give at least one rank";
  std::set<int> seen;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= world_size)
      return fmt::format("rank {} is outside the world of {} ranks", rank, world_size);
    if (!seen.insert(rank).second) return fmt::format("rank {} is listed twice; list each rank once", rank);
  }
  return {};
}

std::string p2p_transport_name(P2PTransport wanted) {
  return resolve(wanted) == P2PTransport::Ucx ? "ucx" : "gloo";
}

std::shared_ptr<GroupState> make_group(const std::shared_ptr<WorldCore>& core, const GroupRecipe& recipe,
                                       Clock::time_point deadline) {
  auto group =
      std::make_shared<GroupState>(core, recipe.name + core->name_suffix, recipe.ranks, recipe.timeout);
  group->follow_liveness();
  if (group->axis_rank < 0) return group;
  open_backends(*group, recipe.p2p, recipe.key, deadline);
  {
    std::lock_guard lock(registry().mutex);
    auto& entry = registry().groups[group->name];
    if (!entry.expired() && !core->fake)
      throw ValueError(fmt::format("new_group: a group named {} already exists; give each group its own name",
                                   group->name));
    entry = group;
  }
  if (!core->fake && recipe.ranks.size() > 1) watch_for_stalls(group->waits);
  return group;
}

void rethrow_as_group_error(WorldCore& core, const std::string& group, const std::string& what) {
  try {
    throw;
  } catch (const ValueError&) {
    throw;
  } catch (const std::exception& error) {
    const auto failure = core.liveness->first_failure();
    if (!failure) core.fail(fmt::format("{}: {}", what, without_backtrace(error.what())));
    if (!failure || dynamic_cast<const CommError*>(&error) != nullptr) throw;
    CommContext context;
    context.rank = core.env.rank;
    context.operation = "new_group";
    context.group = group;
    failure->raise(context);
  }
}

Group find_group(const std::string& name) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().groups.find(name);
  auto state = found == registry().groups.end() ? nullptr : found->second.lock();
  if (!state) {
    std::vector<std::string> known;
    for (const auto& [other, weak] : registry().groups)
      if (!weak.expired()) known.push_back(other);
    const std::string nearest = nearest_name(name, known);
    throw ValueError(describe("group name", fmt::format("\"{}\"", name),
                              "the name of a group this rank is a member of",
                              nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
  }
  return Group(std::move(state));
}

}  // namespace penstock::comm
