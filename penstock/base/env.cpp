#include "penstock/base/env.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock {

std::optional<std::string> env_text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<long long> env_int(const char* name, long long low, long long high) {
  const auto text = env_text(name);
  if (!text) return std::nullopt;
  return read_integer(fmt::format("environment variable {}", name), *text, low, high,
                      fmt::format("set {} to such a number or unset it", name));
}

std::string env_choice(const char* name, const std::vector<std::string>& choices,
                       const std::string& fallback) {
  auto text = env_text(name);
  if (!text) return fallback;
  const std::string lower = to_lower(*text);
  if (std::find(choices.begin(), choices.end(), lower) == choices.end())
    throw ConfigError(describe(fmt::format("environment variable {}", name), quote(*text),
                               fmt::format("one of {}", fmt::join(choices, ", ")),
                               fmt::format("set {} to one of them or unset it", name)));
  return lower;
}

std::chrono::milliseconds default_timeout() {
  return std::chrono::seconds(env_int("PENSTOCK_TIMEOUT_S", 1, 7 * 24 * 3600).value_or(300));
}

DebugLevel debug_level() {
  const std::vector<std::string> levels = {"off", "info", "detail"};
  const char* name = env_text("PENSTOCK_DEBUG") ? "PENSTOCK_DEBUG" : "TORCH_DISTRIBUTED_DEBUG";
  const std::string level = env_choice(name, levels, "off");
  return level == "detail" ? DebugLevel::Detail : level == "info" ? DebugLevel::Info : DebugLevel::Off;
}

}  // namespace penstock
