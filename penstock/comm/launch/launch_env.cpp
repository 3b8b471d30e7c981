#include "penstock/comm/launch/launch_env.h"

#include <fmt/format.h>

#include <cstdint>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/comm/launch/launch_notices.h"
#include "penstock/comm/network/host_address.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using Get = std::function<std::optional<std::string>(const char*)>;

int to_int(const std::string& name, const std::string& text, int low, int high) {
  return static_cast<int>(read_integer(fmt::format("environment variable {}", name), text, low, high,
                                       "let the launcher set it, or unset it to run one rank"));
}

std::optional<int> get_int(const Get& get, const char* name, int low, int high) {
  const auto text = get(name);
  if (!text) return std::nullopt;
  return to_int(name, *text, low, high);
}

int need_int(const Get& get, const char* name, int low, int high, const char* because) {
  if (const auto value = get_int(get, name, low, high)) return *value;
  throw ConfigError(fmt::format(
      "environment variable {} is not set, but {} is; set both, or neither to run one rank", name, because));
}

constexpr int kMaxWorld = 1 << 20;

// Ranks of one job must agree on a port without communicating: it is derived from the job's identity, away
// from the usual ports.
int port_of_job(const std::string& job) {
  std::uint32_t hash = 2166136261u;
  for (const unsigned char c : job) hash = (hash ^ c) * 16777619u;
  return 20000 + static_cast<int>(hash % 12000u);  // 32768 and above are for outgoing connections
}

// An IPv6 address before a port is written in brackets.
std::string without_brackets(const std::string& host) {
  return host.size() > 2 && host.front() == '[' && host.back() == ']' ? host.substr(1, host.size() - 2)
                                                                      : host;
}

Rendezvous parse_rendezvous(const std::string& text) {
  const auto bad = [&](const char* expected) {
    return ConfigError(describe("environment variable PENSTOCK_RENDEZVOUS", quote(text), expected));
  };
  Rendezvous place;
  if (text.starts_with("file://")) {
    place.kind = Rendezvous::Kind::File;
    place.path = text.substr(7);
    if (place.path.empty() || place.path.front() != '/') throw bad("file:// followed by an absolute path");
    return place;
  }
  if (!text.starts_with("tcp://")) throw bad("tcp://host:port or file:///path");
  const auto colon = text.rfind(':');
  place.kind = Rendezvous::Kind::Tcp;
  place.host = without_brackets(text.substr(6, colon - 6));
  if (colon <= 5 || place.host.empty()) throw bad("tcp://host:port");
  place.port = to_int("PENSTOCK_RENDEZVOUS (port)", text.substr(colon + 1), 1, 65535);
  return place;
}

// Fills in the rendezvous from MASTER_ADDR and MASTER_PORT, with `host` and `port` as defaults.
void set_tcp(LaunchEnv& env, const Get& get, const std::string& host, int port) {
  env.rendezvous.kind = Rendezvous::Kind::Tcp;
  env.rendezvous.host = without_brackets(get("MASTER_ADDR").value_or(host));
  env.rendezvous.port = get_int(get, "MASTER_PORT", 1, 65535).value_or(port);
  if (env.rendezvous.host.empty())
    throw ConfigError(
        fmt::format("{} started ranks on several hosts, but MASTER_ADDR is not set; set it to the address of "
                    "rank 0's host",
                    env.launcher));
}

void check(const LaunchEnv& env, const char* rank_name, const char* size_name) {
  if (env.rank >= env.world_size)
    throw ConfigError(describe(fmt::format("environment variable {}", rank_name), fmt::format("{}", env.rank),
                               fmt::format("a rank below {} = {}", size_name, env.world_size),
                               "let the launcher set both"));
  if (env.local_rank >= env.local_world_size)
    throw ConfigError(describe("local rank", fmt::format("{}", env.local_rank),
                               fmt::format("a number below the local world size {}", env.local_world_size),
                               "let the launcher set both"));
}

}  // namespace

std::string Rendezvous::describe() const {
  switch (kind) {
    case Kind::None:
      return "none";
    case Kind::Tcp:
      return fmt::format("tcp://{}", address_and_port(host, port));
    case Kind::File:
      return fmt::format("file://{}", path);
  }
  return {};
}

bool Rendezvous::loopback_only() const {
  if (kind != Kind::Tcp) return kind == Kind::None;
  return host == "localhost" || host.starts_with("127.") || is_loopback(host);
}

LaunchEnv parse_launch_env(const Get& get) {
  LaunchEnv env;
  if (get("RANK") || get("WORLD_SIZE")) {
    env.launcher = "penstock or torchrun";
    env.rank = need_int(get, "RANK", 0, kMaxWorld - 1, "WORLD_SIZE");
    env.world_size = need_int(get, "WORLD_SIZE", 1, kMaxWorld, "RANK");
    const auto local_size = get_int(get, "LOCAL_WORLD_SIZE", 1, kMaxWorld);
    env.knows_local = local_size.has_value() || env.world_size == 1;
    env.local_world_size = local_size.value_or(env.world_size);
    env.local_rank = get_int(get, "LOCAL_RANK", 0, kMaxWorld - 1).value_or(env.rank % env.local_world_size);
    check(env, "RANK", "WORLD_SIZE");
    set_tcp(env, get, env.local_world_size == env.world_size ? "127.0.0.1" : "", 29500);
    if (get("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True") {
      env.rendezvous.hosted_by_rank0 = false;
      // The agent's store outlives a restart of the workers: keys of an earlier attempt must not be visible.
      env.rendezvous.prefix = "attempt" + get("TORCHELASTIC_RESTART_COUNT").value_or("0");
    }
  } else if (get("OMPI_COMM_WORLD_SIZE")) {
    env.launcher = "Open MPI";
    env.rank = need_int(get, "OMPI_COMM_WORLD_RANK", 0, kMaxWorld - 1, "OMPI_COMM_WORLD_SIZE");
    env.world_size = need_int(get, "OMPI_COMM_WORLD_SIZE", 1, kMaxWorld, "OMPI_COMM_WORLD_RANK");
    env.local_rank = get_int(get, "OMPI_COMM_WORLD_LOCAL_RANK", 0, kMaxWorld - 1).value_or(env.rank);
    env.local_world_size = get_int(get, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxWorld).value_or(env.world_size);
    check(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    env.job = get("PMIX_NAMESPACE").value_or(get("OMPI_MCA_ess_base_jobid").value_or("ompi"));
    set_tcp(env, get, env.local_world_size == env.world_size ? "127.0.0.1" : "", port_of_job(env.job));
  } else if (get("SLURM_STEP_ID") && get("SLURM_PROCID") && get("SLURM_LOCALID")) {
    // A job step, that is, started by srun; the batch script itself has no SLURM_LOCALID of a step and runs
    // as one rank.
    env.launcher = "Slurm";
    env.rank = need_int(get, "SLURM_PROCID", 0, kMaxWorld - 1, "SLURM_STEP_ID");
    const char* size_name = get("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    env.world_size = need_int(get, size_name, 1, kMaxWorld, "SLURM_PROCID");
    env.local_rank = need_int(get, "SLURM_LOCALID", 0, kMaxWorld - 1, "SLURM_PROCID");
    const int nodes =
        get_int(get, get("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES", 1, kMaxWorld)
            .value_or(1);
    env.local_world_size =
        nodes == 1 ? env.world_size : std::max(env.local_rank + 1, (env.world_size + nodes - 1) / nodes);
    check(env, "SLURM_PROCID", size_name);
    const auto node_list = get("SLURM_STEP_NODELIST").value_or(get("SLURM_JOB_NODELIST").value_or(""));
    env.job = get("SLURM_JOB_ID").value_or("0") + "." + *get("SLURM_STEP_ID");
    set_tcp(env, get, nodes == 1 ? "127.0.0.1" : first_slurm_host(node_list), port_of_job(env.job));
  }
  if (const auto place = get("PENSTOCK_RENDEZVOUS")) {
    Rendezvous chosen = parse_rendezvous(*place);
    chosen.prefix = env.rendezvous.prefix;
    env.rendezvous = chosen;
  }
  if (env.world_size == 1 && env.launcher == "none") env.rendezvous = {};
  if (const auto secret = get(kSecretVariable)) {
    check_secret(*secret);
    env.secret = *secret;
  }
  env.notices = get(kNoticesVariable).value_or("");
  return env;
}

std::string rendezvous_secret(const LaunchEnv& env) {
  if (!env.secret.empty()) return env.secret;
  return fmt::format("no secret; port {}, {} ranks, job {}", env.rendezvous.port, env.world_size, env.job);
}

std::string listen_address(const LaunchEnv& env) {
  const bool one_host = env.knows_local && env.local_world_size == env.world_size;
  if (env.rendezvous.kind == Rendezvous::Kind::Tcp)
    return listen_at(env.rendezvous.host, one_host).bind_address();
  if (one_host) return "127.0.0.1";
  const std::vector<Candidate> own = candidate_addresses(routes_to(""));
  return own.empty() || own.front().own.empty() ? "127.0.0.1" : own.front().own;
}

LaunchEnv launch_env() { return parse_launch_env(env_text); }

std::string first_slurm_host(const std::string& node_list) {
  const auto open = node_list.find('[');
  const auto comma = node_list.find(',');
  if (open == std::string::npos || comma < open) return node_list.substr(0, comma);
  const auto end = node_list.find_first_of("-,]", open + 1);
  if (end == std::string::npos)
    throw ConfigError(penstock::describe("Slurm node list", fmt::format("\"{}\"", node_list),
                                         "a closing bracket", "set MASTER_ADDR to rank 0's host"));
  // Node names may continue after the bracket ("rack[1-2]-gpu"), up to the next comma.
  const auto close = node_list.find(']', end);
  const auto rest_end = node_list.find(',', close == std::string::npos ? end : close);
  const std::string rest =
      close == std::string::npos ? "" : node_list.substr(close + 1, rest_end - close - 1);
  return node_list.substr(0, open) + node_list.substr(open + 1, end - open - 1) + rest;
}

}  // namespace penstock::comm
