#include "penstock/cli/common/node_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/comm/launch/node_messages.h"
#include "penstock/comm/network/host_address.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace {

constexpr const char* kNodesOption = "--nnodes";
constexpr const char* kNodeRankOption = "--node-rank,--node_rank";
constexpr const char* kRdzvOption = "--rdzv,--rdzv-endpoint,--rdzv_endpoint";

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<long long>(seconds * 1000));
}

// Whether a name of --hosts is this host.
bool names_this_host(const std::string& name) {
  const auto own = comm::interface_addresses();
  for (const std::string& address : comm::addresses_of_name(name))
    if (comm::is_loopback(address) || !comm::interface_of(own, address).empty()) return true;
  return false;
}

}  // namespace

void add_node_flags(CLI::App& command, NodeFlags& flags) {
  flags.join_timeout_s = std::chrono::duration<double>(default_timeout()).count();
  flags.ssh = env_text("PENSTOCK_SSH").value_or("ssh -o BatchMode=yes");
  add_read_option(command, kNodesOption, "N|MIN:MAX",
                  "Number of hosts, or MIN:MAX: as many as join in time (default 1)",
                  [&flags](const std::string&, const std::string& text) {
                    parse_node_range(text);
                    flags.nodes = text;
                  });
  add_whole(command, kNodeRankOption, flags.node_rank, 0, comm::kMaxNodes - 1,
            "Number of this host; without it the host of --rdzv is 0 and the others follow as they join");
  command
      .add_option(kRdzvOption, flags.rdzv,
                  "Address of host 0, where the launchers meet; the port is 29400 unless it is given")
      ->type_name("HOST[:PORT]");
  add_number(command, "--join-timeout,--join_timeout", flags.join_timeout_s,
             {.low = 0, .high = 86'400, .above_low = true},
             "Seconds to wait for the smallest number of hosts (also: PENSTOCK_TIMEOUT_S)")
      ->type_name("S");
  add_number(command, "--last-call,--last_call", flags.last_call_s, {.low = 0, .high = 86'400},
             "Seconds to wait for more hosts once the smallest number has joined")
      ->type_name("S");
  command
      .add_option(
          "--hosts", flags.hosts,
          "Start the launchers of these hosts from here; the first is this host, the others are reached by "
          "--ssh")
      ->type_name("A,B,C");
  command
      .add_option("--ssh", flags.ssh,
                  "Command that executes a script on another host (default: ssh -o BatchMode=yes; also: "
                  "PENSTOCK_SSH)")
      ->type_name("COMMAND");
}

NodeRange parse_node_range(const std::string& text) {
  const auto colon = text.find(':');
  NodeRange range;
  range.least = static_cast<int>(
      read_integer(kNodesOption, text.substr(0, colon), 1, comm::kMaxNodes, "for example --nnodes 2 or 2:4"));
  range.most = colon == std::string::npos
                   ? range.least
                   : static_cast<int>(read_integer(kNodesOption, text.substr(colon + 1), 1, comm::kMaxNodes,
                                                   "for example --nnodes 2 or 2:4"));
  if (range.least > range.most)
    throw ConfigError(
        describe(kNodesOption, quote(text), "the smaller number first", "for example --nnodes 2:4"));
  return range;
}

RdzvPlace parse_rdzv(const std::string& text) {
  const auto bad = [&] {
    return ConfigError(describe("--rdzv", quote(text), "HOST, HOST:PORT or [IPv6 ADDRESS]:PORT",
                                "for example --rdzv node1:29400"));
  };
  RdzvPlace place;
  std::string port;
  if (text.starts_with('[')) {
    const auto close = text.find(']');
    if (close == std::string::npos) throw bad();
    place.host = text.substr(1, close - 1);
    if (close + 1 < text.size() && text[close + 1] != ':') throw bad();
    port = close + 1 < text.size() ? text.substr(close + 2) : "29400";
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    place.host = text.substr(0, text.find(':'));
    port = text.substr(text.find(':') + 1);
  } else {
    place.host = text;  // a name, or an IPv6 address without a port
    port = "29400";
  }
  if (place.host.empty() || place.host.find_first_of(" /\t") != std::string::npos) throw bad();
  place.port = static_cast<int>(read_integer("--rdzv (port)", port, 1, 65535));
  return place;
}

std::vector<std::string> parse_hosts(const std::string& text) {
  std::vector<std::string> hosts(1);
  for (const char c : text) {
    if (c == ',') {
      hosts.emplace_back();
    } else {
      hosts.back() += c;
    }
  }
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const bool repeated = std::count(hosts.begin(), hosts.end(), hosts[i]) > 1;
    // A name that begins with a dash would be an option of ssh.
    if (hosts[i].empty() || hosts[i].front() == '-' || repeated)
      throw ConfigError(describe("--hosts", quote(text), "names separated by commas, each once",
                                 "for example --hosts node1,node2"));
  }
  return hosts;
}

std::vector<std::string> without_options(const std::vector<std::string>& words,
                                         const std::vector<std::string>& with_value,
                                         const std::vector<std::string>& alone) {
  const auto is_one_of = [](const std::string& word, const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), word.substr(0, word.find('='))) != names.end();
  };
  std::vector<std::string> kept;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--") {
      kept.insert(kept.end(), words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
      break;
    }
    if (is_one_of(words[i], with_value)) {
      if (words[i].find('=') == std::string::npos) ++i;
    } else if (!is_one_of(words[i], alone)) {
      kept.push_back(words[i]);
    }
  }
  return kept;
}

const std::vector<std::string>& node_option_names() {
  static const std::vector<std::string> kNames = {
      "--nnodes",       "--node-rank",    "--node_rank", "--rdzv",      "--rdzv-endpoint", "--rdzv_endpoint",
      "--join-timeout", "--join_timeout", "--last-call", "--last_call", "--hosts",         "--ssh"};
  return kNames;
}

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\0', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  if (!words.empty()) words.front() = std::filesystem::read_symlink("/proc/self/exe").string();
  return words;
}

std::optional<comm::NodeOptions> node_options(const CLI::App& command, const NodeFlags& flags,
                                              const std::vector<std::string>& own_command,
                                              std::size_t own_command_head) {
  comm::NodeOptions options;
  const auto given = [&](const char* name) { return command.count(name) > 0; };
  if (given("--hosts")) {
    options.hosts = parse_hosts(flags.hosts);
    options.least_nodes = options.most_nodes = static_cast<int>(options.hosts.size());
    refuse_options(command, {"--nnodes", "--node-rank"}, "with --hosts, which lists every host");
    if (options.hosts.size() == 1)
      throw ConfigError(
          describe("--hosts", quote(flags.hosts), "at least two hosts", "leave it out for one host"));
    if (!names_this_host(options.hosts.front()))
      throw ConfigError(describe("--hosts", quote(options.hosts.front()),
                                 "a name of this host first: rank 0 runs where the command is started",
                                 fmt::format("run the command on {}", options.hosts.front())));
  } else if (given("--nnodes")) {
    const NodeRange range = parse_node_range(flags.nodes);
    options.least_nodes = range.least;
    options.most_nodes = range.most;
    refuse_options(command, {"--ssh"}, "without --hosts");
  }
  if (options.most_nodes == 1) {
    refuse_options(command, {"--node-rank", "--rdzv", "--join-timeout", "--last-call", "--ssh"},
                   "on one host", "leave it out, or set the number of hosts with --nnodes");
    return std::nullopt;
  }
  if (options.least_nodes == options.most_nodes)
    refuse_options(command, {"--last-call"}, "without a range of hosts",
                   "leave it out, or set --nnodes MIN:MAX");
  if (given("--node-rank")) options.node_rank = flags.node_rank;
  if (!options.hosts.empty()) options.node_rank = 0;
  if (!given("--rdzv") && options.hosts.empty())
    throw ConfigError(
        fmt::format("--rdzv is missing: {} hosts need a place where they meet; set it on every host to "
                    "the address of the first one, for example --rdzv node1:29400",
                    flags.nodes));
  const RdzvPlace place = parse_rdzv(given("--rdzv") ? flags.rdzv : options.hosts.front());
  options.rdzv_host = place.host;
  options.rdzv_port = place.port;
  if (options.most_nodes > 1 && comm::is_loopback(place.host) && !options.hosts.empty())
    throw ConfigError(describe("--hosts", quote(place.host),
                               "a name by which the other hosts reach this one first",
                               "or set it with --rdzv"));
  options.join_timeout = milliseconds_of(flags.join_timeout_s);
  options.last_call = milliseconds_of(flags.last_call_s);
  options.silence = std::max<std::chrono::milliseconds>(default_timeout(), std::chrono::seconds(2));
  options.ssh = flags.ssh;
  const std::string rdzv = comm::address_and_port(options.rdzv_host, options.rdzv_port);
  options.command_of_node = [own_command, own_command_head, count = options.most_nodes, rdzv,
                             timeout = flags.join_timeout_s](int node) {
    std::vector<std::string> words = own_command;
    const std::vector<std::string> inserted = {
        "--nnodes",       std::to_string(count),     "--node-rank", std::to_string(node), "--rdzv", rdzv,
        "--join-timeout", fmt::format("{}", timeout)};
    words.insert(words.begin() + static_cast<std::ptrdiff_t>(own_command_head), inserted.begin(),
                 inserted.end());
    return words;
  };
  return options;
}

}  // namespace penstock::cli
