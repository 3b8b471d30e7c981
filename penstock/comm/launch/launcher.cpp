#include "penstock/comm/launch/launcher.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>

#include "penstock/base/describe.h"
#include "penstock/comm/launch/compute_environment.h"
#include "penstock/comm/launch/launch_attempt.h"
#include "penstock/comm/launch/launch_cores.h"
#include "penstock/comm/launch/launch_notices.h"
#include "penstock/comm/launch/node_session.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/errors.h"

extern char** environ;

namespace penstock::comm {

namespace {

using namespace std::chrono_literals;

constexpr const char* kExample = "for example: penstock launch -n 4 -- ./train --steps 100";

void check_nodes(const NodeOptions& nodes) {
  const auto need = [](bool holds, const char* what, const std::string& actual, const std::string& expected,
                       const char* remedy) {
    if (!holds) throw ConfigError(describe(std::string("launch: ") + what, actual, expected, remedy));
  };
  const std::string count = fmt::format("{}:{}", nodes.least_nodes, nodes.most_nodes);
  need(nodes.least_nodes >= 1 && nodes.least_nodes <= nodes.most_nodes && nodes.most_nodes <= kMaxNodes,
       "number of hosts", count, fmt::format("1 <= smallest <= largest <= {}", kMaxNodes),
       "set it with --nnodes N or --nnodes MIN:MAX");
  need(nodes.world == 0 || nodes.world >= nodes.most_nodes, "number of hosts", count,
       fmt::format("at most {}, one for each rank", nodes.world), "set fewer with --nnodes, or more ranks");
  need(!nodes.node_rank || (*nodes.node_rank >= 0 && *nodes.node_rank < nodes.most_nodes), "node rank",
       nodes.node_rank ? fmt::format("{}", *nodes.node_rank) : "",
       fmt::format("0 to {}", nodes.most_nodes - 1), "set it with --node-rank");
  need(!nodes.rdzv_host.empty() && nodes.rdzv_port >= 1 && nodes.rdzv_port <= 65535, "place where hosts meet",
       fmt::format("\"{}\", port {}", nodes.rdzv_host, nodes.rdzv_port), "host:port of node 0's host",
       "set it with --rdzv");
  need(nodes.join_timeout > 0ms && nodes.last_call >= 0ms && nodes.silence >= 1s, "time limits",
       fmt::format("{}, {} and {} ms", nodes.join_timeout.count(), nodes.last_call.count(),
                   nodes.silence.count()),
       "join timeout above 0, last call from 0, silence from 1 s", "");
  need(nodes.hosts.empty() ||
           (nodes.command_of_node && static_cast<int>(nodes.hosts.size()) == nodes.most_nodes),
       "hosts", fmt::format("{} names", nodes.hosts.size()), count, "list as many hosts as --nnodes says");
}

void check(const LaunchOptions& options) {
  const auto need = [](bool holds, const char* what, const std::string& actual, const std::string& expected,
                       const char* remedy) {
    if (!holds) throw ConfigError(describe(std::string("launch: ") + what, actual, expected, remedy));
  };
  need((options.nodes && options.nodes->world > 0) || (options.ranks >= 1 && options.ranks <= kMaxLocalRanks),
       "number of ranks", fmt::format("{}", options.ranks),
       fmt::format("1 to {} on one host", kMaxLocalRanks), "set it with -n");
  if (options.nodes) check_nodes(*options.nodes);
  need(!options.command.empty() && !options.command.front().empty(), "program to run", "none",
       "a program after --", kExample);
  need(options.restarts >= 0 && options.restarts <= 1'000'000, "number of restarts",
       fmt::format("{}", options.restarts), "0 to 1000000", "set it with --restarts");
  need(options.port >= 0 && options.port <= 65535, "port", fmt::format("{}", options.port),
       "1 to 65535, or 0 for a free one", "omit --port to use a free one");
  need(options.grace >= 0ms && options.grace <= 24h, "grace", fmt::format("{} ms", options.grace.count()),
       "0 s to one day", "set it with --grace");
  const auto stop_grace = options.stop_grace.value_or(options.grace);
  need(stop_grace >= 0ms && stop_grace <= 24h, "grace after a signal",
       fmt::format("{} ms", stop_grace.count()), "0 s to one day", "");
  need(options.kill_after >= 0ms && options.kill_after <= 24h, "time from SIGTERM to SIGKILL",
       fmt::format("{} ms", options.kill_after.count()), "0 s to one day", "");
  for (const auto& [name, value] : options.environment)
    need(!name.empty() && name.find('=') == std::string::npos && name.find('\0') == std::string::npos &&
             value.find('\0') == std::string::npos,
         "environment variable", fmt::format("\"{}\"", name),
         "a name without '=' and text without null bytes", "");
  for (const std::string& argument : options.command)
    need(argument.find('\0') == std::string::npos, "argument", "a null byte", "text without null bytes", "");
  need(options.port == 0 || port_is_free(options.port), "port", fmt::format("{}, in use", options.port),
       "a free one", "omit --port to use a free one");
}

// Ranks may listen on loopback or on any address, so the port must be free on all of them.
bool can_listen(int family, int port, int* chosen) {
  const Fd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return family == AF_INET6;  // a host without IPv6 does not make a port busy
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage address = {};
  socklen_t size = 0;
  if (family == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address);
    v6->sin6_family = AF_INET6;
    v6->sin6_addr = in6addr_any;
    v6->sin6_port = htons(static_cast<std::uint16_t>(port));
    size = sizeof *v6;
  } else {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&address);
    v4->sin_family = AF_INET;
    v4->sin_addr.s_addr = htonl(INADDR_ANY);
    v4->sin_port = htons(static_cast<std::uint16_t>(port));
    size = sizeof *v4;
  }
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0)
    return family == AF_INET6 && errno == EADDRNOTAVAIL;
  // Two sockets with SO_REUSEADDR may share an address until one listens.
  if (listen(fd.get(), 1) != 0) return false;
  if (chosen != nullptr) {
    sockaddr_in bound = {};
    socklen_t bound_size = sizeof bound;
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &bound_size) != 0) return false;
    *chosen = ntohs(bound.sin_port);
  }
  return true;
}

// Waits until all queued output is written. A stop signal ends the wait: the reader may never come back.
void drain(Terminal& terminal, LaunchSignals& signals) {
  std::vector<pollfd> list;
  for (terminal.pump(); !terminal.drained() && signals.take_stop() == 0; terminal.pump()) {
    list.assign(1, {signals.wake_fd(), POLLIN, 0});
    terminal.add_to_poll(list);
    poll(list.data(), list.size(), -1);
    signals.clear();
  }
}

}  // namespace

bool port_is_free(int port) {
  return can_listen(AF_INET, port, nullptr) && can_listen(AF_INET6, port, nullptr);
}

int free_port() {
  std::random_device random;
  std::uniform_int_distribution<int> below_outgoing(15'000, 32'767);
  for (int attempt = 0; attempt < 64; ++attempt) {
    const int port = below_outgoing(random);
    if (port_is_free(port)) return port;
  }
  int chosen = 0;
  if (!can_listen(AF_INET, 0, &chosen))
    throw StateError("launch: no free TCP port was found; close programs that listen, or give --port");
  return chosen;
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name : fmt::format("signal {}", signal);
}

std::vector<std::string> rank_environment(const LaunchContext& context, const AttemptPlan& plan,
                                          int local_rank, const std::string& notices) {
  const LaunchOptions& options = context.options;
  std::vector<std::string> entries;
  const auto is = [](const std::string& entry, const std::string& name) {
    return entry.size() > name.size() && entry[name.size()] == '=' &&
           entry.compare(0, name.size(), name) == 0;
  };
  const auto remove = [&](const std::string& name) {
    std::erase_if(entries, [&](const std::string& entry) { return is(entry, name); });
  };
  const auto set = [&](const std::string& name, const std::string& value) {
    remove(name);
    entries.push_back(name + "=" + value);
  };
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) entries.emplace_back(*entry);
  for (const auto& [name, value] : options.environment) set(name, value);
  const auto value_of = [&](const std::string& name) {
    const auto entry =
        std::find_if(entries.begin(), entries.end(), [&](const std::string& each) { return is(each, name); });
    return entry == entries.end() ? std::string() : entry->substr(name.size() + 1);
  };
  for (const auto& [name, value] : compute_environment(context.threads, value_of)) set(name, value);
  set("RANK", fmt::format("{}", plan.first_rank + local_rank));
  set("LOCAL_RANK", fmt::format("{}", local_rank));
  set("WORLD_SIZE", fmt::format("{}", plan.world_size));
  set("LOCAL_WORLD_SIZE", fmt::format("{}", plan.ranks));
  set("GROUP_RANK", fmt::format("{}", plan.node));
  set("GROUP_WORLD_SIZE", fmt::format("{}", plan.nodes));
  set("MASTER_ADDR", plan.master);
  set("MASTER_PORT", fmt::format("{}", plan.port));
  set("PENSTOCK_RESTART_COUNT", fmt::format("{}", plan.attempt));
  set("PENSTOCK_LAUNCH_ID", context.launch_id);
  if (value_of(kSecretVariable).empty() && !context.secret.empty()) set(kSecretVariable, context.secret);
  remove(kNoticesVariable);
  if (!notices.empty()) set(kNoticesVariable, notices);
  // With the variables of an outer torchrun, the ranks would look for a store that its agent hosts for its
  // own workers.
  remove("TORCHELASTIC_USE_AGENT_STORE");
  remove("TORCHELASTIC_RESTART_COUNT");
  return entries;
}

int RankOutcome::code() const {
  if (signal != 0) return 128 + signal;
  return exit_code >= 0 ? exit_code : 1;
}

std::string RankOutcome::describe() const {
  if (signal != 0)
    return fmt::format("killed by {}{}{}", signal_name(signal), core_dumped ? " (core dumped)" : "",
                       sent_signal == signal ? " (sent by the launcher)" : "");
  std::string text = exit_code >= 0 ? fmt::format("exit code {}", exit_code)
                                    : "ended, its status was reaped by other code of this process";
  if (sent_signal != 0) text += fmt::format(" on {} from the launcher", signal_name(sent_signal));
  return text;
}

LaunchResult launch(const LaunchOptions& options) {
  check(options);
  LaunchSignals signals;
  Terminal terminal(options.out_fd, options.err_fd);
  LaunchResult result;

  const auto given = std::find_if(options.environment.rbegin(), options.environment.rend(),
                                  [](const auto& entry) { return entry.first == "PATH"; });
  const char* inherited = std::getenv("PATH");
  const LaunchedProgram program =
      find_program(options.command.front(), given != options.environment.rend() ? given->second
                                            : inherited                         ? inherited
                                                                                : "");
  if (program.exit_code != 0) {
    result.exit_code = program.exit_code;
    result.error = program.error;
    print_launcher_line(terminal, program.error);
    drain(terminal, signals);
    return result;
  }

  const Subreaper subreaper;
  OrphanGuard guard;
  std::optional<NodeSession> nodes;
  AttemptPlan plan;
  plan.ranks = plan.world_size = options.ranks;
  if (options.nodes) {
    std::optional<AttemptPlan> first;
    try {
      nodes.emplace(options, signals, terminal, guard);
      first = nodes->join();
    } catch (...) {
      nodes.reset();
      drain(terminal, signals);  // what ssh printed is often the reason
      throw;
    }
    if (!first) {
      result.stopped_by = nodes->stopped_by();
      result.exit_code = 128 + result.stopped_by;
      nodes.reset();
      drain(terminal, signals);
      return result;
    }
    plan = *first;
  }
  const LaunchContext context = {
      options,
      program.path,
      fmt::format("{}.{}", getpid(), std::chrono::steady_clock::now().time_since_epoch().count()),
      nodes ? std::string() : make_secret(),
      threads_per_rank(available_cores(), plan.ranks),
      signals,
      guard,
      terminal,
      nodes ? &*nodes : nullptr};
  for (int attempt = 0;; ++attempt) {
    plan.attempt = attempt;
    if (!nodes) plan.port = options.port != 0 ? options.port : free_port();
    AttemptResult ended = run_attempt(context, plan);
    std::optional<AttemptPlan> next;
    if (nodes && ended.start_code != 0)
      nodes->report_failure(plan.first_rank, ended.start_code, true, ended.error);
    if (nodes) next = nodes->finish(plan, ended);
    result.attempts = attempt + 1;
    result.ranks = std::move(ended.ranks);
    result.first_failed_rank = ended.first_failed_rank;
    result.stopped_by = ended.stopped_by;
    result.error = ended.error;
    result.exit_code = ended.start_code;
    if (!result.error.empty()) print_launcher_line(terminal, result.error);
    if (nodes) {
      result.exit_code = nodes->exit_code();
      if (!next) break;
      plan = *next;
      continue;
    }
    if (!result.first_failed_rank) break;

    const RankOutcome& first = result.ranks[static_cast<std::size_t>(*result.first_failed_rank)];
    result.exit_code = first.code();
    if (result.stopped_by != 0 || options.restarts == 0) break;
    if (std::find(options.final_exit_codes.begin(), options.final_exit_codes.end(), first.exit_code) !=
        options.final_exit_codes.end())
      break;
    if (options.explained && options.explained(first.rank)) break;
    const std::string why =
        fmt::format("rank {}, {} after {:.1f} s", first.rank, first.describe(), first.elapsed_s);
    if (attempt == options.restarts) {
      print_launcher_line(terminal, fmt::format("attempt {} of {} failed ({}); no restart is left",
                                                attempt + 1, options.restarts + 1, why));
      break;
    }
    if ((result.stopped_by = signals.take_stop()) != 0)
      break;  // it came while the attempt was being cleaned up
    print_launcher_line(terminal, fmt::format("attempt {} of {} failed ({}); starting attempt {}",
                                              attempt + 1, options.restarts + 1, why, attempt + 2));
  }
  if (result.stopped_by == SIGPIPE) result.exit_code = 128 + SIGPIPE;
  nodes.reset();  // shows what the other launchers still print
  drain(terminal, signals);
  return result;
}

}  // namespace penstock::comm
