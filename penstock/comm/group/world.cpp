#include "penstock/world.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <exception>
#include <set>
#include <thread>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/log.h"
#include "penstock/base/text.h"
#include "penstock/comm/group/group_maker.h"
#include "penstock/comm/group/member_groups.h"
#include "penstock/comm/group/operators.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/record/recorder.h"
#include "penstock/comm/record/recorder_dump.h"
#include "penstock/comm/transport/tcp_listen.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

// Rank 0 decides and the others wait for its answer. They wait this much longer, so that its reason arrives
// before they time out themselves.
constexpr auto kAnswerSlack = std::chrono::seconds(3);
// Rank 0 hosts the store: before it ends after a negative verdict, it waits at most this long for the others
// to read it.
constexpr auto kVerdictReadTime = std::chrono::seconds(2);

// Every rank posts a text; rank 0 reads them all and posts a verdict for all ranks. `judge` runs on rank 0
// and returns the verdict, or sets an error text that becomes a ValueError on every rank. If ranks post
// nothing by the deadline, every rank throws a TimeoutError that names them.
std::string agree(
    const WorldCore& core, const std::string& topic, const std::string& own_text, Clock::time_point deadline,
    const std::function<std::string(const std::vector<std::string>&, std::string& error)>& judge) {
  const int size = core.env.world_size;
  const auto key = [&](int rank) { return fmt::format("{}/{}", topic, rank); };
  const auto begin = Clock::now();
  const auto context = [&] {
    CommContext where;
    where.rank = core.env.rank;
    where.operation = topic;
    where.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    return where;
  };
  core.store.set(key(core.env.rank), own_text);
  const std::string verdict_key = topic + "/verdict";
  if (core.env.rank == 0) {
    std::vector<std::string> texts(static_cast<std::size_t>(size));
    std::vector<int> missing;
    for (int rank = 0; rank < size; ++rank) {
      try {
        texts[static_cast<std::size_t>(rank)] =
            core.store.get(key(rank), deadline, fmt::format("rank {} to join {}", rank, topic));
      } catch (const TimeoutError&) {
        missing.push_back(rank);
      }
    }
    std::string error;
    const std::string verdict = missing.empty() ? judge(texts, error) : "";
    const bool bad = !missing.empty() || !error.empty();
    core.store.set(verdict_key, !missing.empty() ? "missing " + format_list(missing)
                                : !error.empty() ? "error " + error
                                                 : "ok " + verdict);
    const auto present = size - 1 - static_cast<std::int64_t>(missing.size());
    for (const auto until = Clock::now() + kVerdictReadTime;
         bad && Clock::now() < until && core.store.add(topic + "/heard", 0) < present;)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::string verdict;
  try {
    verdict =
        core.store.get(verdict_key, deadline + kAnswerSlack, fmt::format("rank 0's answer on {}", topic));
  } catch (const TimeoutError&) {
    std::vector<int> missing;
    for (int rank = 0; rank < size; ++rank)
      if (!core.store.has(key(rank))) missing.push_back(rank);
    verdict = "missing " +
              (missing.empty() ? std::string("0 (it joined, but did not answer)") : format_list(missing));
  }
  if (core.env.rank != 0 && !verdict.starts_with("ok ")) core.store.add(topic + "/heard", 1);
  if (verdict.starts_with("missing "))
    throw TimeoutError(
        fmt::format("{}: rank{} {} of {} did not join in time; start all {} ranks, or allow more time with "
                    "PENSTOCK_TIMEOUT_S",
                    topic, verdict.find(',') == std::string::npos ? "" : "s", verdict.substr(8), size, size),
        context());
  if (verdict.starts_with("error ")) throw ValueError(verdict.substr(6));
  return verdict.substr(3);
}

// A peer that dies closes its sockets. Gloo then writes to them without suppressing SIGPIPE, whose default
// action ends the process silently. A handler that the program installed is kept.
void survive_broken_pipes() {
  struct sigaction present {};
  if (sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL &&
      (present.sa_flags & SA_SIGINFO) == 0)
    std::signal(SIGPIPE, SIG_IGN);
}

// Exchanges the facts that ranks need to know about each other: one host or several, GPUs.
void exchange_host_facts(WorldCore& core, Clock::time_point deadline) {
  const std::string gpu = nccl_available() ? gpu_identity(core.env.local_rank, core.gpu_index) : "";
  const std::string verdict =
      agree(core, "rendezvous", own_host_name() + " " + (gpu.empty() ? "-" : gpu), deadline,
            [](const auto& texts, std::string&) {
              std::set<std::string> hosts, gpus;
              bool every_gpu = true;
              for (const std::string& text : texts) {
                hosts.insert(text.substr(0, text.find(' ')));
                every_gpu = every_gpu && !text.ends_with(" -") && gpus.insert(text).second;
              }
              return fmt::format("{} {}", hosts.size() == 1 ? 1 : 0, every_gpu ? 1 : 0);
            });
  core.one_host = verdict.starts_with("1");
  core.own_gpus = verdict.ends_with("1");
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
    exchange_host_facts(*core, deadline);
  } catch (const PeerLostError& error) {
    // The launcher says so; ranks of other hosts have not heard it.
    if (const auto lost = error.context().lost_rank;
        lost && core->monitor && !core->liveness->first_failure())
      core->monitor->report_lost(*lost, "it ended before all ranks had met");
    throw;
  }
  core->store.rendezvous_done();
  return World(std::move(core), options.p2p);
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
  constexpr std::uint64_t kLeastSharedMemory = 256u << 20;
  const bool processes_of_one_host = core_->one_host && core_->monitor != nullptr;
  if (env_text("PENSTOCK_P2P") || !ucx_available() || !processes_of_one_host) return P2PTransport::Auto;
  struct statvfs shared {};
  if (::statvfs("/dev/shm", &shared) != 0 ||
      static_cast<std::uint64_t>(shared.f_blocks) * shared.f_frsize < kLeastSharedMemory) {
    log().info(
        "comm: /dev/shm has less than {} MB, so point-to-point transfers use Gloo, not UCX; give the "
        "container more, or set PENSTOCK_P2P to choose",
        kLeastSharedMemory >> 20);
    return P2PTransport::Gloo;
  }
  return P2PTransport::Ucx;
}

void World::post_status(const std::string& key, const std::string& status) const {
  core_->store.set(fmt::format("word/{}/{}", core_->env.rank, key), status);
}

std::optional<std::string> World::status_of(int rank, const std::string& key) const {
  return core_->store.try_get(fmt::format("word/{}/{}", rank, key));
}

void World::fail(const std::string& reason) noexcept { core_->fail(reason); }

}  // namespace penstock::comm
