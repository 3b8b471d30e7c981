// Replaces config_file.cpp in builds without toml++.
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"

namespace penstock::train {

std::vector<ConfigSetting> parse_toml(std::string_view, std::string_view name) {
  throw ConfigError(
      describe(fmt::format("{}: configuration file", name), "a build without toml++", "",
               "install libtomlplusplus-dev (or set PENSTOCK_EXTRA_INCLUDE) and rebuild, or pass the "
               "values as --section.key value"));
}

}  // namespace penstock::train
