#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"

namespace penstock::train {

std::vector<ConfigSetting> parse_arguments(const std::vector<std::string>& arguments) {
  std::vector<ConfigSetting> settings;
  std::set<const ConfigField*> seen;
  for (std::size_t i = 0; i < arguments.size();) {
    const std::string& argument = arguments[i++];
    if (argument.size() < 3 || !argument.starts_with("--"))
      throw ConfigError(describe("argument", quote(argument), "--key value",
                                 "put a key in front of it; docs/configuration.md lists all keys"));
    const std::size_t equals = argument.find('=');
    const std::string flag = argument.substr(0, equals);
    std::string name = flag.substr(2);
    std::replace(name.begin(), name.end(), '-', '_');
    if (name == "data") name = "data.sources";  // short form of the most common key
    const ConfigField& field = find_field(name, flag);
    std::vector<std::string> words;
    if (equals != std::string::npos) {
      words.push_back(argument.substr(equals + 1));
    } else {
      // One value, or for a list all values up to the next key. A negative number is a value: it has one
      // dash.
      const auto is_value = [&] { return i < arguments.size() && !arguments[i].starts_with("--"); };
      if (field.is_flag()) {
        if (is_value()) {
          words.push_back(arguments[i++]);
        } else {
          words.emplace_back("true");
        }
      } else {
        while (is_value() && (field.is_list() || words.empty())) words.push_back(arguments[i++]);
        if (words.empty())
          throw ConfigError(
              describe(flag, "nothing", field.type_text(), fmt::format("it means: {}", field.help)));
      }
    }
    if (!seen.insert(&field).second)
      throw ConfigError(describe(flag, fmt::format("{} given twice", field.name()), "each key once"));
    settings.push_back(parse_setting(field, words, flag));
  }
  return settings;
}

}  // namespace penstock::train
