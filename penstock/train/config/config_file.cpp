// Reads configuration files with toml++.
#include <fmt/format.h>
#include <toml++/toml.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"

namespace penstock::train {

namespace {

std::string kind_of(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table:
      return "a section";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::string:
      return fmt::format("the string {}", quote(node.as_string()->get()));
    case toml::node_type::integer:
      return fmt::format("{}", node.as_integer()->get());
    case toml::node_type::floating_point:
      return to_toml(FieldData(node.as_floating_point()->get()));  // 3.0, not 3
    case toml::node_type::boolean:
      return node.as_boolean()->get() ? "true" : "false";
    default:
      return "a date or time";
  }
}

// Converts one value to the field's type. A whole number is accepted for a number; nothing else is converted.
template <class T>
bool read(const toml::node& node, T& value) {
  if constexpr (std::is_same_v<T, double>) {
    if (const auto* whole = node.as_integer()) {
      value = static_cast<double>(whole->get());
      return true;
    }
  }
  const auto found = node.value_exact<T>();
  if (found) value = *found;
  return found.has_value();
}

template <class T>
bool read(const toml::node& node, std::vector<T>& list) {
  const toml::array* items = node.as_array();
  if (items == nullptr) return false;
  list.clear();
  for (const toml::node& item : *items) {
    T value{};
    if (!read(item, value)) return false;
    list.push_back(std::move(value));
  }
  return true;
}

[[noreturn]] void unknown_section(std::string_view section, const std::string& where) {
  std::vector<std::string> names;
  for (const ConfigSection& known : config_sections()) names.emplace_back(known.name);
  const std::string nearest = nearest_name(section, names);
  throw ConfigError(describe(fmt::format("{}: unknown section", where), fmt::format("[{}]", section), "",
                             nearest.empty() ? "docs/configuration.md lists all sections"
                                             : fmt::format("did you mean [{}]?", nearest)));
}

}  // namespace

std::vector<ConfigSetting> parse_toml(std::string_view text, std::string_view name) {
  toml::table document;
  try {
    document = toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw ConfigError(printable(fmt::format("{}:{}: column {}: {}", name, error.source().begin.line,
                                            error.source().begin.column, error.description())));
  }
  std::vector<ConfigSetting> settings;
  for (const auto& [section, node] : document) {
    const std::string where = fmt::format("{}:{}", name, section.source().begin.line);
    const toml::table* fields = node.as_table();
    if (fields == nullptr) {
      const ConfigField& meant = find_field(section.str(), where);
      throw ConfigError(describe(fmt::format("{}: key", where),
                                 fmt::format("\"{}\" outside any section", section.str()), "",
                                 fmt::format("put it under [{}]", meant.section)));
    }
    bool known = false;
    for (const ConfigSection& item : config_sections()) known = known || item.name == section.str();
    if (!known) unknown_section(section.str(), where);
    for (const auto& [key, value] : *fields) {
      const std::string origin = fmt::format("{}:{}", name, key.source().begin.line);
      const ConfigField& field = find_field(fmt::format("{}.{}", section.str(), key.str()), origin);
      ConfigSetting setting{&field, field.get(TrainConfig{}), origin};
      if (field.takes_numbers && value.is_number()) {
        setting.value = kind_of(value);
      } else if (!std::visit([&node_value = value](auto& to) { return read(node_value, to); }, setting.value))
        throw ConfigError(describe(fmt::format("{}: {}", origin, field.name()), kind_of(value),
                                   field.type_text(), fmt::format("it means: {}", field.help)));
      check_setting(setting);
      settings.push_back(std::move(setting));
    }
  }
  return settings;
}

}  // namespace penstock::train
