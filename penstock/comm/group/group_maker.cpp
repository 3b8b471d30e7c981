#include "penstock/comm/group/group_maker.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/base/text.h"
#include "penstock/comm/group/stall_watch.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/secure/handshake.h"
#include "penstock/comm/secure/secret.h"
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

// What is known of members that do not answer, to be appended to an error.
std::string silence_of_members(const GroupState& group) {
  const std::string silence = group.world->liveness->describe_silence();
  return silence.empty() ? "" : ": " + silence;
}

// Runs `build` on a thread of its own, so that the deadline, the loss of a rank and `given_up` end the wait
// for it: Gloo itself waits five times its timeout for a connection that a member never makes. A build that
// has been given up may go on until then; it owns what it uses. Returns an empty result if `given_up` said
// so.
template <class Build>
auto built_in_time(const GroupState& group, Clock::time_point deadline, const std::string& what,
                   const std::function<bool()>& given_up, Build build) {
  using Result = std::invoke_result_t<Build>;
  struct Progress {
    std::mutex mutex;
    std::condition_variable ended;
    bool done = false;
    Result result;
    std::exception_ptr error;
  };
  const auto begin = Clock::now();
  const auto progress = std::make_shared<Progress>();
  std::thread([progress, build = std::move(build)] {
    Result result{};
    std::exception_ptr error;
    try {
      result = build();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(progress->mutex);
    progress->result = std::move(result);
    progress->error = error;
    progress->done = true;
    progress->ended.notify_all();
  }).detach();
  constexpr auto kLook = std::chrono::milliseconds(100);
  for (;;) {
    {
      std::unique_lock lock(progress->mutex);
      if (progress->ended.wait_until(lock, std::min(deadline, Clock::now() + kLook),
                                     [&] { return progress->done; })) {
        if (progress->error) std::rethrow_exception(progress->error);
        return std::move(progress->result);
      }
    }
    CommContext context;
    context.rank = group.own_rank();
    context.operation = "new_group";
    context.group = group.name;
    context.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    if (const auto failure = group.world->liveness->first_failure())
      failure->raise(context, fmt::format(", while waiting for {}", what));
    if (Clock::now() >= deadline)
      throw TimeoutError(
          fmt::format(
              "timed out waiting for {}{}; a member has stopped, or the network between the hosts drops "
              "packets: check that every member is running and that no firewall is between them",
              what, silence_of_members(group)),
          context);
    if (given_up()) return Result{};
  }
}

// The members wait for each other at two stages, which are also keys in the store.
constexpr const char* kBegin = "begin to connect";
constexpr const char* kConnect = "connect";

std::string key_of_member(const char* stage, int position) { return fmt::format("{}/{}", stage, position); }
std::string key_of_all(const char* stage) { return fmt::format("{}/all", stage); }

void arrive(const GroupState& group, const Store& store, const char* stage) {
  store.set(key_of_member(stage, group.axis_rank), "1");
  if (store.add(stage, 1) == static_cast<std::int64_t>(group.ranks.size()))
    store.set(key_of_all(stage), random_bytes(kNonceBytes));
}

// Returns when all members have arrived, with a random number that is the same on all of them. The error
// names those that have not.
std::string await_all(const GroupState& group, const Store& store, const char* stage,
                      Clock::time_point deadline) {
  try {
    return store.get(key_of_all(stage), deadline, fmt::format("other members to {}", stage));
  } catch (const TimeoutError& error) {
    if (Clock::now() < deadline) throw;  // the store does not answer
    std::vector<int> missing;
    for (std::size_t i = 0; i < group.ranks.size(); ++i)
      if (!store.has(key_of_member(stage, static_cast<int>(i)))) missing.push_back(group.ranks[i]);
    if (missing.empty()) throw;
    throw TimeoutError(
        fmt::format("timed out waiting for rank{} {} to {}{}; check that every member is running and that no "
                    "firewall is between them",
                    missing.size() > 1 ? "s" : "", format_list(missing), stage, silence_of_members(group)),
        error.context());
  }
}

// A Gloo connection is complete on one side before it is on the other: a member that leaves at once would be
// considered lost by one that is still connecting. So no member continues before all have connected.
void await_members(const GroupState& group, const Store& store, Clock::time_point deadline) {
  arrive(group, store, kConnect);
  await_all(group, store, kConnect, deadline);
}

// Returns in the same moment on all members: the ports on which they wait for each other are then open for
// milliseconds only. The result is random and the same on all members.
std::string begin_together(const GroupState& group, const Store& store, Clock::time_point deadline) {
  constexpr auto kClose = std::chrono::milliseconds(200);  // usually all are here by then
  constexpr auto kPause = std::chrono::microseconds(300);
  arrive(group, store, kBegin);
  for (const auto until = Clock::now() + kClose; !store.has(key_of_all(kBegin)) && Clock::now() < until;)
    std::this_thread::sleep_for(kPause);
  return await_all(group, store, kBegin, deadline);
}

// A port of Gloo takes whoever connects first. A stranger that does so takes the place of a member, which is
// then refused, or talks to nobody. So the members prove to each other that they are members, and if one of
// them does not come to that in time, all connect again, at other ports and with twice the time.
std::shared_ptr<Backend> connect_gloo(const GroupState& group, BackendOptions options, const std::string& key,
                                      Clock::time_point deadline) {
  // A stranger would have to be there first every time, within milliseconds.
  constexpr int kAttempts = 16;
  // Enough for a few hosts; a big group on a busy machine has it in one of the later attempts.
  constexpr std::chrono::milliseconds kShortest{1000}, kLongest{15'000};
  auto patience = std::clamp<std::chrono::milliseconds>(group.timeout / 8, kShortest, kLongest);
  const WorldCore& core = *group.world;
  const auto store_at = [&](const std::string& place) {
    Store store = core.store.with_prefix(place);
    store.for_c10d()->setTimeout(options.timeout);  // now: other threads use the store later
    return store;
  };
  if (options.size == 1) return make_gloo_backend(store_at(key + "/gloo"), options);
  const JobKey job = core.monitor ? core.monitor->key() : JobKey(rendezvous_secret(core.env));
  for (int attempt = 0;; ++attempt, patience *= 2) {
    const std::string place = fmt::format("{}/gloo{}", key, attempt);
    const Store store = store_at(place);
    options.new_device = attempt > 0;
    // The nonce keeps what was recorded of an earlier job, attempt or group with the same names from being
    // accepted.
    options.proof = [job, place, nonce = begin_together(group, store, deadline)](int from, int to) {
      return job.digest("a member of a group", fmt::format("{} {} {} ", place, from, to) + nonce);
    };
    std::shared_ptr<Backend> backend;
    std::exception_ptr error;
    const auto fail = [&](const std::string& why) {
      store.set("failed", fmt::format("rank {}: {}", group.own_rank(), why));
    };
    const auto given_up = [&, until = Clock::now() + patience] {
      if (store.has("failed")) return true;
      if (Clock::now() < until) return false;
      fail(fmt::format("not connected within {:.0f} s", std::chrono::duration<double>(patience).count()));
      return true;
    };
    try {
      backend = built_in_time(group, deadline, "Gloo connections to the members", given_up,
                              [store, options] { return make_gloo_backend(store, options); });
    } catch (const PeerLostError&) {
      throw;
    } catch (const TimeoutError&) {
      throw;
    } catch (const std::exception& failure) {
      error = std::current_exception();
      fail(first_line(without_backtrace(failure.what())));
    }
    await_members(group, store, deadline);
    const auto failed = store.try_get("failed");
    if (!failed) return backend;
    // Not destroyed: that may wait for a thread of Gloo that waits for the rest of what a stranger has sent.
    if (backend) backend->abandon();
    if (attempt + 1 < kAttempts) {
      if (group.axis_rank == 0)
        log().warn("comm: the members of group {} connect again ({})", group.common_name(),
                   failed->substr(0, failed->find(';')));
      continue;
    }
    if (error) std::rethrow_exception(error);
    CommContext context;
    context.rank = group.own_rank();
    context.operation = "new_group";
    context.group = group.name;
    throw CommError(fmt::format("the members of the group could not connect: {}", *failed), context);
  }
}

// Connects this rank by shared memory to the members on its host; each host has a transport of its own.
void open_ucx(GroupState& group, const std::string& key, Clock::time_point deadline) {
  const WorldCore& core = *group.world;
  const int own = group.ranks[static_cast<std::size_t>(group.axis_rank)];
  int near = 0, own_position = 0;
  for (const int rank : group.ranks) {
    if (rank == own) own_position = near;
    group.ucx_position.push_back(core.hosts.same_host(rank, own) ? near++ : -1);
  }
  group.ucx_within_hosts = true;
  if (near < 2) return;
  const int host = core.hosts.host_of.empty() ? 0 : core.hosts.host_of[static_cast<std::size_t>(own)];
  const Store store = core.store.with_prefix(fmt::format("{}/host{}", key, host));
  group.ucx = std::make_shared<UcxTransport>(
      own_position, near, [&](const std::string& name, const std::string& bytes) { store.set(name, bytes); },
      [&](const std::string& name) { return store.get(name, deadline, "a member's UCX address"); },
      UcxOptions{.spin = std::nullopt, .ranks_on_host = core.env.local_world_size});
}

// Opens the communicators of a group that this rank belongs to. Collective over the members.
void open_backends(GroupState& group, P2PTransport p2p, const std::string& key, Clock::time_point deadline) {
  const WorldCore& core = *group.world;
  BackendOptions options;
  options.axis_rank = group.axis_rank;
  options.size = static_cast<int>(group.ranks.size());
  options.timeout = group.timeout;
  options.address = core.hosts.address_of(core.env.rank);
  options.device_index = core.gpu_index;
  if (core.fake) {
    group.cpu = group.cuda = make_fake_backend(options);
  } else {
    if (gloo_available()) group.cpu = connect_gloo(group, options, key, deadline);
    if (core.own_gpus) group.cuda = make_nccl_backend(core.store.with_prefix(key + "/nccl"), options);
    if (resolve(p2p) == P2PTransport::Ucx && options.size > 1) open_ucx(group, key, deadline);
  }
  // Gloo's members have waited for each other.
  const bool only_gloo = gloo_available() && !group.cuda && !group.ucx_within_hosts;
  if (!core.fake && options.size > 1 && !only_gloo)
    await_members(group, core.store.with_prefix(key), deadline);
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
