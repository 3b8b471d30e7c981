// Reading environment variables: absent or empty means "not set", a malformed value is a ConfigError that names the variable.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace penstock {

std::optional<std::string> env_text(const char* name);

// A whole decimal number within [low, high].
std::optional<long long> env_int(const char* name, long long low, long long high);

// One of `choices`, compared without case; `fallback` when not set.
std::string env_choice(const char* name, const std::vector<std::string>& choices, const std::string& fallback);

// Deadline of every communication that was not given its own: PENSTOCK_TIMEOUT_S, default 300 s.
std::chrono::milliseconds default_timeout();

// How much is checked and recorded at run time: PENSTOCK_DEBUG, else TORCH_DISTRIBUTED_DEBUG, default off.
enum class DebugLevel { Off, Info, Detail };
DebugLevel debug_level();

}  // namespace penstock
