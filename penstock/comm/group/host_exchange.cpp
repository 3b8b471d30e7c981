#include "penstock/comm/group/host_exchange.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "penstock/base/env.h"
#include "penstock/base/log.h"
#include "penstock/base/number.h"
#include "penstock/comm/group/world_agreement.h"
#include "penstock/comm/network/host_address.h"
#include "penstock/comm/network/host_identity.h"
#include "penstock/comm/network/host_map.h"
#include "penstock/comm/network/reach.h"
#include "penstock/comm/transport/tcp_listen.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

bool has_shared_memory() {
  struct statvfs shared {};
  return ucx_available() && ::statvfs("/dev/shm", &shared) == 0 &&
         static_cast<std::uint64_t>(shared.f_blocks) * shared.f_frsize >= kLeastSharedMemoryBytes;
}

// Fills in `hosts`.
void exchange_facts(WorldCore& core, Clock::time_point deadline) {
  core.hosts.nccl = nccl_available();
  if (core.env.world_size == 1) return;
  const bool by_tcp = core.env.rendezvous.kind == Rendezvous::Kind::Tcp;
  if (core.env.rank == 0) core.store.set("run", random_text());
  // Kept until the verdict: then every rank has looked for the file that it may have created.
  const HostIdentity identity(core.store.get("run", deadline, "rank 0 to join the rendezvous"));
  HostFacts facts;
  facts.host = identity.text();
  facts.name = own_host_name();
  const Routes routes = routes_to(by_tcp ? core.env.rendezvous.host : "");
  facts.candidates = candidate_addresses(routes);
  facts.chosen = !routes.chosen_interface.empty();
  facts.shared_memory = has_shared_memory();
  facts.nccl = nccl_available();
  const std::string verdict = agree(core, "rendezvous", encode_facts(facts), deadline,
                                    [](const std::vector<std::string>& texts, std::string& error) {
                                      std::vector<HostFacts> all;
                                      for (const std::string& text : texts) all.push_back(decode_facts(text));
                                      const HostMap map = make_host_map(all, error);
                                      return error.empty() ? encode_map(map) : "";
                                    });
  core.hosts = decode_map(verdict);
  if (!core.env.knows_local) {
    const std::vector<int> here = core.hosts.ranks_on_host_of(core.env.rank);
    core.env.local_world_size = static_cast<int>(here.size());
    core.env.local_rank = static_cast<int>(std::find(here.begin(), here.end(), core.env.rank) - here.begin());
  }
  const std::string interface = interface_of(routes.interfaces, core.hosts.address_of(core.env.rank));
  // NCCL would take the first interface that is up. It reads this when the first communicator is made.
  if (core.hosts.nccl && !core.hosts.one_host() && !interface.empty() && !env_text("NCCL_SOCKET_IFNAME"))
    ::setenv("NCCL_SOCKET_IFNAME", ("=" + interface).c_str(), 0);
  log().debug("comm: {} listens here; {} host{}", core.hosts.describe(core.env.rank),
              core.hosts.first_ranks().size(), core.hosts.one_host() ? "" : "s");
}

// The lowest rank of each host tries to connect to those of all other hosts. An error on every rank says
// which cannot be reached.
void check_that_hosts_reach_each_other(const WorldCore& core, Clock::time_point deadline) {
  constexpr auto kReachTime = std::chrono::seconds(15);
  constexpr auto kSlack = std::chrono::seconds(3);  // the others wait for those that try until the deadline
  const HostMap& hosts = core.hosts;
  if (hosts.one_host()) return;
  const std::vector<int> first = hosts.first_ranks();
  const bool tries = std::find(first.begin(), first.end(), core.env.rank) != first.end();
  std::optional<ReachablePort> own;
  std::string problem;
  try {
    if (tries) own.emplace(hosts.address_of(core.env.rank));
  } catch (const StateError& error) {
    problem = error.what();
  }
  const auto failed = [&](const std::vector<std::string>& texts, std::string& error) {
    for (const int rank : first)
      if (const std::string& text = texts[static_cast<std::size_t>(rank)]; text.starts_with("!"))
        error += fmt::format("{}{} {}", error.empty() ? "" : "; ", hosts.describe(rank), text.substr(1));
  };
  const std::string ports = agree(
      core, "network",
      !problem.empty() ? "!" + problem
      : own            ? fmt::format("{}", own->port())
                       : "-",
      deadline,
      [&](const std::vector<std::string>& texts, std::string& error) {
        failed(texts, error);
        std::string list;
        for (const int rank : first) list += texts[static_cast<std::size_t>(rank)] + ",";
        return list;
      },
      Wrong::Network);
  if (tries) {
    std::vector<ReachTarget> targets;
    std::size_t at = 0;
    for (const int rank : first) {
      const std::size_t end = ports.find(',', at);
      const std::string port = ports.substr(at, end - at);
      at = end + 1;
      if (rank != core.env.rank)
        targets.push_back({hosts.describe(rank), hosts.address_of(rank),
                           static_cast<int>(read_integer("port of another rank", port, 1, 65535))});
    }
    problem = unreachable_targets(targets, std::min(deadline, Clock::now() + kReachTime));
  }
  agree(
      core, "connections", problem.empty() ? "-" : "!cannot reach " + problem, deadline + kSlack,
      [&](const std::vector<std::string>& texts, std::string& error) -> std::string {
        failed(texts, error);
        if (!error.empty())
          error +=
              "; open the TCP ports between the hosts, or set MASTER_ADDR or GLOO_SOCKET_IFNAME so that the "
              "ranks use a network that connects them";
        return "";
      },
      Wrong::Network);
}

// Finds out whether every rank has a GPU of its own.
void exchange_gpus(WorldCore& core, Clock::time_point deadline) {
  if (!core.hosts.nccl) return;
  const std::string gpu = gpu_identity(core.env.local_rank, core.gpu_index);
  // Two hosts may have GPUs at the same place, and two containers on one machine may have the same GPU.
  const std::string machine = machine_identity();
  core.own_gpus = agree(core, "gpus", fmt::format("{} {}", machine, gpu), deadline,
                        [](const std::vector<std::string>& texts, std::string&) -> std::string {
                          std::set<std::string> gpus;
                          const bool every =
                              std::all_of(texts.begin(), texts.end(), [&](const std::string& text) {
                                return !text.ends_with(" ") && gpus.insert(text).second;
                              });
                          return every ? "1" : "0";
                        }) == "1";
}

}  // namespace

void exchange_hosts(WorldCore& core, Clock::time_point deadline) {
  exchange_facts(core, deadline);
  check_that_hosts_reach_each_other(core, deadline);
  exchange_gpus(core, deadline);
}

}  // namespace penstock::comm
