// Checks of options in penstock/models/plan, and names of parameters.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/plan/element_count.h"

namespace penstock::models {

// Throws ConfigError that names the key model.`key`, unless `good`.
inline void require_option(bool good, std::string_view key, const std::string& actual,
                           const std::string& expected, const std::string& remedy = {}) {
  if (!good) throw ConfigError(describe(fmt::format("model.{}", key), actual, expected, remedy));
}

inline void require_at_least(std::int64_t least, std::string_view key, std::int64_t value,
                             const std::string& remedy = {}) {
  require_option(value >= least, key, fmt::format("{}", value), fmt::format("at least {}", least), remedy);
}

// The full name of a parameter: "blocks.3" and "gamma" make "blocks.3.gamma".
inline std::string parameter_name(std::string_view prefix, std::string_view name) {
  return prefix.empty() ? std::string(name) : fmt::format("{}.{}", prefix, name);
}

}  // namespace penstock::models
