// The options by which `penstock launch` and `penstock train` run on several hosts. Names and meaning are
// those of torchrun where it has them; its spelling with underscores is accepted, too.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "penstock/comm/launch/launcher.h"

namespace penstock::cli {

struct NodeFlags {
  std::string nodes;  // "2", "2:4"
  int node_rank = -1;
  std::string rdzv;  // "host:port"
  double join_timeout_s = 0;
  double last_call_s = 30;
  std::string hosts;  // "a,b,c"
  std::string ssh;
};

void add_node_flags(CLI::App& command, NodeFlags& flags);

// Returns what the options say, or std::nullopt for one host. `own_command`: what a launcher on another host
// executes, without the options of this header: they are inserted after the first `own_command_head` words.
// Throws ConfigError for options that contradict each other or have no effect.
std::optional<comm::NodeOptions> node_options(const CLI::App& command, const NodeFlags& flags,
                                              const std::vector<std::string>& own_command,
                                              std::size_t own_command_head);

// "2" or "2:4".
struct NodeRange {
  int least = 1, most = 1;
};
NodeRange parse_node_range(const std::string& text);

// "host", "host:port", "[fd00::1]:port"; the port is 29400 if there is none.
struct RdzvPlace {
  std::string host;
  int port = 29400;
};
RdzvPlace parse_rdzv(const std::string& text);

// Splits at commas. Throws ConfigError for an empty or repeated name.
std::vector<std::string> parse_hosts(const std::string& text);

// Returns the words of a command line without these options: `with_value` take the next word or follow '=';
// `alone` do not. Words after "--" are kept.
std::vector<std::string> without_options(const std::vector<std::string>& words,
                                         const std::vector<std::string>& with_value,
                                         const std::vector<std::string>& alone);

// The names of the options of this header, for without_options.
const std::vector<std::string>& node_option_names();

// The words with which this process was started; the first is the path of its program.
std::vector<std::string> own_command_line();

}  // namespace penstock::cli
