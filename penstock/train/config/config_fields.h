// The table of all fields of TrainConfig: their names, types, limits and help texts.
//
// To add a field, add a member in penstock/train_config.h and a line in config_fields.cpp, then regenerate
// the documentation page (PENSTOCK_UPDATE_DOCS=1 ./test -R train_config_test).
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
// Pointer to the value of a field in a config.
using FieldPlace = std::variant<std::int64_t*, double*, bool*, std::string*, std::vector<std::string>*,
                                std::vector<std::int64_t>*, std::vector<double>*>;

struct ConfigField {
  std::string_view section;
  std::string_view key;
  std::string_view help;  // one line, no full stop
  std::function<FieldPlace(TrainConfig&)> place;
  // Limits of numbers, or of each number in a list.
  double low = 0;
  double high = 0;
  bool above_low = false;                 // the lower limit itself is not allowed
  std::vector<std::string> choices = {};  // of a string; empty: any
  std::size_t count = 0;                  // length of a list; 0: any
  bool takes_numbers = false;             // of a string: may be written as a number, too

  std::string name() const { return std::string(section) + "." + std::string(key); }
  FieldData get(const TrainConfig& config) const;
  void set(TrainConfig& config, const FieldData& value) const;
  bool is_list() const;
  bool is_flag() const;
  // "a whole number", "a number", "true or false", "a string", "a list of ..."
  std::string type_text() const;
  // "from 1 to 65536", "out of a, b"; empty if there is no limit.
  std::string range_text() const;
};

// In the order of writing; the fields of a section are adjacent.
const std::vector<ConfigField>& config_fields();
// The sections in order, each with its heading.
struct ConfigSection {
  std::string_view name;
  std::string_view help;
};
const std::vector<ConfigSection>& config_sections();

// Finds a field by "section.key", or by "key" if only one section has it. Throws ConfigError that begins with
// `where` for an unknown name (with the nearest name) and for a key that several sections have.
const ConfigField& find_field(std::string_view name, std::string_view where,
                              std::span<const ConfigField> fields = config_fields());

// Returns Penstock's key for a name that other trainers use: "learning_rate" -> "training.lr". For a name
// with several meanings, returns all of these keys as text for "did you mean ...?". Returns an empty string
// for unknown names. '-' and '_' are equivalent.
std::string key_for_synonym(std::string_view name);

// One value and where it was set.
struct ConfigSetting {
  const ConfigField* field;
  FieldData value;
  std::string origin;  // "train.toml:7", "--lr"
};

// Parses words of the command line or of a preset. Throws ConfigError that begins with the origin.
ConfigSetting parse_setting(const ConfigField& field, const std::vector<std::string>& words,
                            const std::string& origin);
// Throws ConfigError unless the value is in range. Converts choices to lower case.
void check_setting(ConfigSetting& setting);

// Formats a value as TOML.
std::string to_toml(const FieldData& value);

// config_arguments.cpp
std::vector<ConfigSetting> parse_arguments(const std::vector<std::string>& arguments);
// config_file.cpp, or config_file_absent.cpp without toml++
std::vector<ConfigSetting> parse_toml(std::string_view toml, std::string_view name);

// config.cpp: applies the settings on top of the preset that they name, later layers over earlier ones, and
// completes the result.
ResolvedConfig resolve_settings(const std::vector<std::vector<ConfigSetting>>& layers);
// Returns the contents of a configuration file. Throws ConfigError.
std::string read_config_file(const std::filesystem::path& path);

// config_presets.cpp
struct ConfigPreset {
  std::string_view name;
  std::string_view help;
  // (field, value) for everything that differs from the defaults.
  std::vector<std::pair<std::string_view, std::string_view>> values;
};
const std::vector<ConfigPreset>& config_presets();
// Throws ConfigError with the nearest name. `where` is the origin of the name.
const ConfigPreset& find_preset(std::string_view name, std::string_view where);

// config_check.cpp: fills in derived values. Throws ConfigError that lists all inconsistencies.
void complete_config(ResolvedConfig& resolved);

}  // namespace penstock::train
