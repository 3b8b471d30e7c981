// The table of all fields of TrainConfig: the one place that knows their names, types, limits and help.
//
// To add a field: a member in config.h and a line in config_fields.cpp; then write the page again
// (PENSTOCK_UPDATE_DOCS=1 ./test -R train_config_test).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/train_config.h"

namespace penstock::train {

using FieldData = std::variant<std::int64_t, double, bool, std::string, std::vector<std::string>,
                               std::vector<std::int64_t>, std::vector<double>>;
// Where the value of a field lies in a config.
using FieldPlace = std::variant<std::int64_t*, double*, bool*, std::string*, std::vector<std::string>*,
                                std::vector<std::int64_t>*, std::vector<double>*>;

struct ConfigField {
  std::string_view section;
  std::string_view key;
  std::string_view help;                  // one line, no full stop
  std::function<FieldPlace(TrainConfig&)> place;
  // Numbers, each one of a list.
  double low = 0;
  double high = 0;
  bool above_low = false;                 // the lower limit itself is not allowed
  std::vector<std::string> choices = {};  // of a text; empty: any
  std::size_t count = 0;                  // of a list; 0: any

  std::string name() const { return std::string(section) + "." + std::string(key); }
  FieldData get(const TrainConfig& config) const;
  void set(TrainConfig& config, const FieldData& value) const;
  bool is_list() const;
  bool is_flag() const;
  // "whole number", "number", "true or false", "text", "list of ..."
  std::string type_text() const;
  // "from 1 to 65536", "one of a, b"; empty where anything goes.
  std::string range_text() const;
};

// In the order of writing; the fields of a section stand together.
const std::vector<ConfigField>& config_fields();
// Of the sections, in order, with the line that heads each.
struct ConfigSection {
  std::string_view name;
  std::string_view help;
};
const std::vector<ConfigSection>& config_sections();

// By "section.key", or by "key" where only one section has it. Throws ConfigError that begins with `where` for an unknown
// name (with the nearest one) and for one that several sections have.
const ConfigField& find_field(std::string_view name, std::string_view where,
                              std::span<const ConfigField> fields = config_fields());

// What other trainers call a key of ours: "learning_rate" -> "training.lr"; several keys for a name that may mean either, as a
// text for "did you mean ...?". Empty for names that nobody uses. '-' and '_' are the same.
std::string key_known_as(std::string_view name);

// One value with the place it was written at.
struct ConfigSetting {
  const ConfigField* field;
  FieldData value;
  std::string origin;  // "train.toml:7", "--lr"
};

// From words of the command line or of a preset. Throws ConfigError that begins with the origin.
ConfigSetting parse_setting(const ConfigField& field, const std::vector<std::string>& words, const std::string& origin);
// Throws unless the value is in range; choices become lower case.
void check_setting(ConfigSetting& setting);

// As TOML writes it.
std::string to_toml(const FieldData& value);

// config_arguments.cpp
std::vector<ConfigSetting> parse_arguments(const std::vector<std::string>& arguments);
// config_file.cpp, or config_file_absent.cpp without toml++
std::vector<ConfigSetting> parse_toml(std::string_view toml, std::string_view name);

// config.cpp: lays the settings over the preset that they name, later layers over earlier ones, and completes the whole.
ResolvedConfig resolve_settings(const std::vector<std::vector<ConfigSetting>>& layers);
// The bytes of a configuration file. Throws ConfigError.
std::string read_config_file(const std::filesystem::path& path);

// config_presets.cpp
struct ConfigPreset {
  std::string_view name;
  std::string_view help;
  // (field, value) for all that differs from the defaults.
  std::vector<std::pair<std::string_view, std::string_view>> values;
};
const std::vector<ConfigPreset>& config_presets();
// Throws ConfigError with the nearest name; `where` is the origin of the name.
const ConfigPreset& find_preset(std::string_view name, std::string_view where);

// config_check.cpp: fills in what is derived and throws ConfigError that lists everything that does not fit together.
void complete_config(ResolvedConfig& resolved);

}  // namespace penstock::train
