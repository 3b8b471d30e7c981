// Parses numbers, for flags, configuration keys, environment variables and text formats alike.
//
//   const double tolerance = read_number("--tolerance", text, {.low = 0, .high = 1e9});
//   // "nan": --tolerance: got "nan", expected a number from 0 to 1000000000
//
// The whole text must be one decimal number. Empty text, NaN, infinities, values out of range of the type
// ("1e999"), hexadecimal, blanks, a leading '+' and trailing characters are refused.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace penstock {

// Return std::nullopt for malformed text.
std::optional<double> parse_number(std::string_view text);
std::optional<std::int64_t> parse_integer(std::string_view text);
std::optional<std::uint64_t> parse_unsigned(std::string_view text);
// A number with an optional suffix K, M, G, T, P or E (powers of 1024), KB, KiB, ..., or B, in any case.
std::optional<double> parse_scaled(std::string_view text);
// The same for a non-negative integer number of bytes below 8 EiB: "512", "64K", "1.5G", "16MB".
std::optional<std::int64_t> parse_bytes(std::string_view text);

// Both limits are included, except the lower one if `above_low` is set.
struct NumberRange {
  double low = 0;
  double high = std::numeric_limits<double>::max();
  bool above_low = false;

  bool contains(double value) const { return (above_low ? value > low : value >= low) && value <= high; }
  // "from 0 to 1", "above 0 up to 1000", "of at least 0".
  std::string text() const;
};

// Throw ConfigError: "WHAT: got "TEXT", expected a number from LOW to HIGH; REMEDY".
double read_number(std::string_view what, std::string_view text, const NumberRange& range,
                   std::string_view remedy = {});
std::int64_t read_integer(std::string_view what, std::string_view text, std::int64_t low, std::int64_t high,
                          std::string_view remedy = {});
std::int64_t read_bytes(std::string_view what, std::string_view text, std::int64_t low = 0,
                        std::string_view remedy = {});

// Formats a limit for messages: integers up to 1e15 without an exponent.
std::string number_text(double value);

}  // namespace penstock
