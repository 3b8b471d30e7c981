// Text helpers for messages and commands.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

std::string to_lower(std::string_view text);

// The candidate with the smallest edit distance to `word`, or empty if none is close enough.
std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates);

// "512 B", "64.0 KiB", "8.0 MiB".
std::string format_bytes(std::uint64_t bytes);

// "0, 1, 2", for messages; long lists are cut with "...".
std::string format_list(const std::vector<int>& values, std::size_t at_most = 16);

}  // namespace penstock
