#include "penstock/world.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <exception>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/base/text.h"
#include "penstock/comm/group/group_maker.h"
#include "penstock/comm/group/host_exchange.h"
#include "penstock/comm/group/member_groups.h"
#include "penstock/comm/group/operators.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/comm/group/world_agreement.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/record/recorder.h"
#include "penstock/comm/record/recorder_dump.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

// A peer that dies closes its sockets. Gloo then writes to them without suppressing SIGPIPE, whose default
// action ends the process silently. A handler that the program installed is kept.
void survive_broken_pipes() {
  struct sigaction present {};
  if (sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL &&
      (present.sa_flags & SA_SIGINFO) == 0)
    std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

// Destroyed with the last copy of the World.
struct World::Membership {
  explicit Membership(std::shared_ptr<WorldCore> world_core) : core(std::move(world_core)) {}
  ~Membership() {
    if (std::uncaught_exceptions() > exceptions) core->fail("an exception ended the program");
  }
  std::shared_ptr<WorldCore> core;
  int exceptions = std::uncaught_exceptions();
};

World::World(std::shared_ptr<WorldCore> core, P2PTransport p2p)
    : core_(std::move(core)),
      member_groups_(std::make_shared<MemberGroups>(core_)),
      membership_(std::make_shared<Membership>(core_)) {
  std::vector<int> all(static_cast<std::size_t>(core_->env.world_size));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  GroupOptions options;
  options.name = "world";
  options.p2p = p2p;
  everyone_ = new_group(all, options);
}

World World::from_env(const WorldOptions& options) { return connect(launch_env(), options); }

World World::connect(const LaunchEnv& env, const WorldOptions& options) {
  register_operators();
  const auto timeout = options.timeout.count() > 0 ? options.timeout : default_timeout();
  const auto deadline = Clock::now() + timeout;
  if (env.world_size > 1) {
    set_log_rank(env.rank);
    survive_broken_pipes();
  }
  if (env.world_size > 1 && env.rendezvous.kind == Rendezvous::Kind::None)
    throw ConfigError(fmt::format(
        "no rendezvous is configured for {} ranks; set MASTER_ADDR and MASTER_PORT, or PENSTOCK_RENDEZVOUS",
        env.world_size));
  Recorder::global().set_rank(env.rank);
  Recorder::global().set_world_size(env.world_size);
  if (const auto folder = recorder_directory()) install_fatal_signal_dump(*folder, env.rank);
  auto core = std::make_shared<WorldCore>(
      WorldCore{.env = env,
                .store = env.world_size == 1 ? Store::in_process() : Store::connect(env, deadline),
                .liveness = std::make_shared<Liveness>(env.world_size),
                .monitor = nullptr,
                .timeout = timeout});
  if (env.world_size > 1) {
    core->monitor = std::make_unique<Monitor>(env, core->store, core->liveness, deadline, timeout);
    core->store.watch(core->liveness, env.rank);
  }
  try {
    exchange_hosts(*core, deadline);
    core->store.rendezvous_done();
    return World(core, options.p2p);
  } catch (const PeerLostError& error) {
    // A rank that ended before all had met, as the launcher says: ranks of other hosts have not heard of it.
    if (const auto lost = error.context().lost_rank;
        lost && core->monitor && !core->liveness->first_failure())
      core->monitor->report_lost(*lost, "it ended before all ranks had met");
    throw;
  } catch (const std::exception& error) {
    // The others wait for this rank: they end with its reason instead of their deadline.
    core->fail(without_backtrace(error.what()));
    throw;
  }
}

World World::fake(int rank, int size) {
  // Several fake ranks may exist in one process: each has its own group names.
  return make_fake(rank, size, fmt::format("@fake{}.{}", rank, size));
}

World World::fake_with_real_names(int rank, int size) { return make_fake(rank, size, ""); }

World World::make_fake(int rank, int size, const std::string& name_suffix) {
  register_operators();
  if (size < 1 || rank < 0 || rank >= size)
    throw ValueError(
        describe("fake world", fmt::format("rank {} of {}", rank, size), "a rank from 0 to size - 1"));
  auto core = std::make_shared<WorldCore>(WorldCore{.env = {},
                                                    .store = Store::in_process(),
                                                    .liveness = std::make_shared<Liveness>(size),
                                                    .monitor = nullptr,
                                                    .timeout = default_timeout(),
                                                    .fake = true});
  core->env.rank = rank;
  core->env.world_size = size;
  core->env.local_rank = rank;
  core->env.local_world_size = size;
  core->name_suffix = name_suffix;
  return World(std::move(core), P2PTransport::Gloo);
}

int World::rank() const { return core_->env.rank; }
int World::size() const { return core_->env.world_size; }
int World::local_rank() const { return core_->env.local_rank; }
int World::local_size() const { return core_->env.local_world_size; }

Group World::new_group(const std::vector<int>& ranks, const GroupOptions& options) {
  WorldCore& core = *core_;
  const int number = core.next_group++;
  const std::string key = fmt::format("group{}", number);
  const std::string base = options.name.empty() ? key : options.name;
  const auto timeout = options.timeout.count() > 0 ? options.timeout : core.timeout;
  const auto deadline = Clock::now() + timeout;
  const std::string own_text = fmt::format("{} [{}]", base, format_list(ranks, ranks.size()));
  const auto judge = [&](const std::vector<std::string>& texts, std::string& error) -> std::string {
    for (std::size_t rank = 1; rank < texts.size(); ++rank)
      if (texts[rank] != texts[0])
        error = fmt::format(
            "new_group: rank 0 requested {}, rank {} requested {}; every rank must create the same groups in "
            "the same order",
            texts[0], rank, texts[rank]);
    if (const std::string bad = validation_error(ranks, core.env.world_size); error.empty() && !bad.empty())
      error = fmt::format("new_group {}: {}", own_text, bad);
    return "";
  };
  try {
    if (core.fake || core.env.world_size == 1) {
      std::string error;
      judge({own_text}, error);
      if (!error.empty()) throw ValueError(error);
    } else {
      agree(core, "new_group " + key, own_text, deadline, judge);
    }
    return Group(make_group(
        core_, {.name = base, .key = key, .ranks = ranks, .timeout = timeout, .p2p = options.p2p}, deadline));
  } catch (...) {
    rethrow_as_group_error(core, base, "new_group " + own_text);
  }
}

Group World::group_of(const std::vector<int>& ranks, std::chrono::milliseconds timeout) const {
  return group_of(ranks, MemberGroupOptions{.purpose = {}, .timeout = timeout});
}

Group World::group_of(const std::vector<int>& ranks, const MemberGroupOptions& options) const {
  if (options.purpose.find_first_of(";/") != std::string::npos)
    throw ValueError(describe("purpose of a group", options.purpose, "text without ';' and '/'",
                              "use letters, digits and dots"));
  if (options.purpose.empty() && options.p2p == P2PTransport::Auto && ranks == everyone_.ranks())
    return everyone_;
  return member_groups_->get(ranks, options);
}

P2PTransport World::low_latency_transport() const {
  const HostMap& hosts = core_->hosts;
  if (env_text("PENSTOCK_P2P") || !ucx_available() || core_->monitor == nullptr || !hosts.has_neighbours())
    return P2PTransport::Auto;
  if (hosts.shared_memory) return P2PTransport::Ucx;
  log().info(
      "comm: a host with several ranks has less than {} MB in /dev/shm or no UCX, so point-to-point "
      "transfers use "
      "Gloo; give the container more, or set PENSTOCK_P2P to choose",
      kLeastSharedMemoryBytes >> 20);
  return P2PTransport::Gloo;
}

void World::post_status(const std::string& key, const std::string& status) const {
  core_->store.set(fmt::format("word/{}/{}", core_->env.rank, key), status);
}

std::optional<std::string> World::status_of(int rank, const std::string& key) const {
  return core_->store.try_get(fmt::format("word/{}/{}", rank, key));
}

std::optional<std::string> World::why_gone(int rank) const {
  Liveness& liveness = *core_->liveness;
  const auto since = liveness.silent_since(rank);
  const auto now = Clock::now();
  if (since && now - *since >= core_->timeout && liveness.state_of(rank).state == RankState::Running) {
    const std::string reason = silence_text("it", now - *since);
    liveness.report({rank, RankState::Lost, reason});
    if (core_->monitor && rank != 0) core_->monitor->report_lost(rank, reason);
  }
  const RankEvent event = liveness.state_of(rank);
  return event.state == RankState::Running ? std::nullopt : std::optional(event.describe());
}

void World::fail(const std::string& reason) noexcept { core_->fail(reason); }

}  // namespace penstock::comm
