// Checks the PENSTOCK_ variables before a command runs. The library reads them where it needs them, which may
// be in the middle of a run, on one rank, or never.
#include <fmt/format.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/text.h"
#include "penstock/cli/common/commands.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/launch/launch_notices.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace {

constexpr std::string_view kPrefix = "PENSTOCK_";

struct Variable {
  const char* name;
  void (*check)(const char* name);
};

void any_text(const char*) {}

// Longer than any path can be: refused here, once, instead of by every rank with all of its bytes.
void path_text(const char* name) {
  const auto path = env_text(name);
  if (path && path->size() >= PATH_MAX)
    throw ConfigError(describe(name, fmt::format("a path of {} bytes", path->size()),
                               fmt::format("at most {} bytes", PATH_MAX - 1),
                               "set it to an existing folder"));
}

const std::vector<Variable>& variables() {
  static const std::vector<Variable> kVariables = {
      {"PENSTOCK_TIMEOUT_S", [](const char*) { default_timeout(); }},
      {"PENSTOCK_DEBUG", [](const char*) { debug_level(); }},
      {"PENSTOCK_LOG",
       [](const char* name) {
         env_choice(name, {"trace", "debug", "info", "warn", "error", "off"}, "info");
       }},
      {"PENSTOCK_P2P",
       [](const char* name) {
         env_choice(name, {"gloo", "ucx"}, "gloo");
       }},
      {"PENSTOCK_TRACE_TRANSFERS",
       [](const char* name) {
         env_choice(name, {"0", "1"}, "0");
       }},
      {"PENSTOCK_RECORDER_SIZE", [](const char* name) { env_int(name, 1, 1 << 20); }},
      {"PENSTOCK_UCX_SPIN_US", [](const char* name) { env_int(name, 0, 10'000'000); }},
      {"PENSTOCK_SHARE_GPUS", [](const char* name) { env_int(name, 0, 1); }},
      {"PENSTOCK_CXX", path_text},
      {"PENSTOCK_CACHE", path_text},
      {"PENSTOCK_CACHE_MB", [](const char* name) { env_int(name, 1, std::int64_t{1} << 40); }},
      {"PENSTOCK_PROGRESS_TTY", [](const char* name) { env_int(name, 0, 1 << 20); }},
      {"PENSTOCK_RESTART_COUNT", [](const char* name) { env_int(name, 0, 1'000'000); }},
      {"PENSTOCK_RENDEZVOUS",
       [](const char* name) {
         comm::parse_launch_env([&](const char* asked) {
           return std::string_view(asked) == name ? env_text(name) : std::nullopt;
         });
       }},
      {"PENSTOCK_RECORDER_DIR", path_text},
      {"PENSTOCK_LOG_DIR", path_text},
      {"PENSTOCK_STALL_DIR", path_text},
      {"PENSTOCK_NVRTC", path_text},
      {"PENSTOCK_LAUNCH_ID", any_text},
      {comm::kNoticesVariable, path_text},
      {comm::kSecretVariable,
       [](const char* name) {
         if (const auto secret = env_text(name)) comm::check_secret(*secret);
       }},
      {"PENSTOCK_SSH", any_text},
      {"PENSTOCK_RANK_ERRORS", path_text},
      {"PENSTOCK_RESTARTED_TO_COMPUTE", any_text},
  };
  return kVariables;
}

// Other variables with this prefix (PENSTOCK_HOME, ...) may be someone else's; a name that nearly matches a
// known one is probably a typo.
void warn_about_misspelled_names() {
  std::vector<std::string> endings;
  for (const Variable& variable : variables())
    endings.emplace_back(std::string_view(variable.name).substr(kPrefix.size()));
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    std::string_view name = *entry;
    name = name.substr(0, name.find('='));
    if (!name.starts_with(kPrefix) || name.size() == kPrefix.size()) continue;
    const std::string ending(name.substr(kPrefix.size()));
    std::string meant;
    for (const std::string& known : endings) {
      if (known == ending) {
        meant.clear();
        break;
      }
      if (meant.empty() && (known.starts_with(ending + "_") || ending.starts_with(known + "_")))
        meant = known;
    }
    if (meant.empty()) meant = nearest_name(ending, endings);
    if (!meant.empty() && meant != ending)
      fmt::print(stderr, "penstock: environment variable {} is not read; did you mean {}{}?\n", name, kPrefix,
                 meant);
  }
}

}  // namespace

void check_environment() {
  for (const Variable& variable : variables()) variable.check(variable.name);
  if (!env_text("PENSTOCK_LAUNCH_ID")) warn_about_misspelled_names();  // once, not once per rank
}

}  // namespace penstock::cli
