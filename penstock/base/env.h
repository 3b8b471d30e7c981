// Reads environment variables. Absent or empty means "not set"; a malformed value throws ConfigError that
// names the variable.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace penstock {

std::optional<std::string> env_text(const char* name);

// A decimal integer within [low, high].
std::optional<long long> env_int(const char* name, long long low, long long high);

// One of `choices`, ignoring case; `fallback` if not set.
std::string env_choice(const char* name, const std::vector<std::string>& choices,
                       const std::string& fallback);

// Default timeout of communication: PENSTOCK_TIMEOUT_S, 300 s if not set.
std::chrono::milliseconds default_timeout();

// How much is checked and recorded at run time: PENSTOCK_DEBUG, then TORCH_DISTRIBUTED_DEBUG, off by default.
enum class DebugLevel { Off, Info, Detail };
DebugLevel debug_level();

}  // namespace penstock
