// Reads the configuration of a command from its command line.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/cli/common/commands.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace {

// Arguments that are not flags of the command are taken as configuration keys; reports misspelled flags as
// flags.
void refuse_near_flags(const CLI::App& command, const std::vector<std::string>& arguments) {
  std::vector<std::string> names, flags;
  for (const std::string& key : train::config_keys()) {
    names.push_back("--" + key);
    names.push_back("--" + key.substr(key.find('.') + 1));
  }
  for (const CLI::Option* option : command.get_options())
    if (!option->get_group().empty())
      for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  std::vector<std::string> all = flags;
  all.insert(all.end(), names.begin(), names.end());
  for (const std::string& argument : arguments) {
    if (!argument.starts_with("--")) continue;
    const std::string flag = argument.substr(0, argument.find('='));
    std::string key = flag;
    std::replace(key.begin() + 2, key.end(), '-', '_');
    if (std::find(names.begin(), names.end(), key) != names.end() || flag == "--data") continue;
    const std::string meant = nearest_name(flag, all);
    if (std::find(flags.begin(), flags.end(), meant) != flags.end())
      throw ConfigError(describe("unknown flag", quote(flag), "", fmt::format("did you mean {}?", meant)));
  }
}

}  // namespace

bool has_effect_without_run(const std::string& key) {
  return !key.starts_with("checkpoint.") && !key.starts_with("output.");
}

void refuse_keys(const train::ResolvedConfig& resolved, const std::string& command,
                 const std::function<bool(const std::string& key)>& used) {
  for (const auto& [key, origin] : resolved.origins)
    if (origin.starts_with("--") && !used(key))
      throw ConfigError(
          fmt::format("{}: {} has no effect in penstock {}; leave it out", origin, key, command));
}

train::ConfigSources config_sources(const CLI::App& command) {
  train::ConfigSources sources;
  std::vector<std::string> rest = command.remaining();
  if (!rest.empty() && !rest.front().starts_with("-")) {
    sources.file = rest.front();
    rest.erase(rest.begin());
  }
  refuse_near_flags(command, rest);
  sources.arguments = rest;
  return sources;
}

}  // namespace penstock::cli
