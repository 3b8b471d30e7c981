#include "penstock/cli/common/number_options.h"

#include <fmt/format.h>

#include <utility>

#include "penstock/errors.h"

namespace penstock::cli {

CLI::Option* add_read_option(CLI::App& command, const std::string& names, const std::string& type,
                             const std::string& help,
                             std::function<void(const std::string& name, const std::string& text)> read) {
  std::string name = names;
  if (const std::size_t comma = name.find(','); comma != std::string::npos) name.insert(comma + 1, " ");
  const auto take = [name, read = std::move(read)](const CLI::results_t& given) {
    read(name, given.empty() ? std::string() : given.front());
    return true;
  };
  return command.add_option(names, CLI::callback_t(take), help)->type_name(type);
}

std::string whole_help(const std::string& help, std::int64_t low, std::int64_t high, std::int64_t now) {
  const std::string range = high == std::numeric_limits<std::int64_t>::max()
                                ? fmt::format("at least {}", low)
                                : fmt::format("{} to {}", low, high);
  // Help texts that state the default themselves need no second one.
  const bool states_default = help.find("default") != std::string::npos;
  return fmt::format(
      "{} ({}{})", help, range,
      now >= low && now <= high && !states_default ? fmt::format(", default {}", now) : std::string());
}

CLI::Option* add_number(CLI::App& command, const std::string& names, double& place, const NumberRange& range,
                        const std::string& help) {
  const bool states_default = help.find("default") != std::string::npos;
  const std::string shown = fmt::format(
      "{} ({}{})", help, range.text(),
      range.contains(place) && !states_default ? fmt::format(", default {}", place) : std::string());
  return add_read_option(command, names, "X", shown,
                         [&place, range](const std::string& name, const std::string& text) {
                           place = read_number(name, text, range);
                         });
}

CLI::Option* add_bytes(CLI::App& command, const std::string& names, std::uint64_t& place, std::int64_t low,
                       const std::string& help) {
  return add_read_option(command, names, "B", help,
                         [&place, low](const std::string& name, const std::string& text) {
                           place = static_cast<std::uint64_t>(read_bytes(name, text, low));
                         });
}

void refuse_options(const CLI::App& command, std::initializer_list<const char*> names, const std::string& why,
                    const std::string& remedy) {
  for (const char* name : names)
    if (command.count(name) > 0) throw ConfigError(fmt::format("{} has no effect {}; {}", name, why, remedy));
}

}  // namespace penstock::cli
