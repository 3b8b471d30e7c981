// Numbers from text: the one reader for flags, configuration keys, environment variables and the numbers in text formats.
//
//   const double tolerance = read_number("--tolerance", text, {.low = 0, .high = 1e9});
//   // "nan": --tolerance: got "nan", expected a number from 0 to 1000000000
//
// The whole text must be one decimal number. NaN, infinities, values that the type cannot hold ("1e999"), hexadecimal,
// blanks, a leading '+' and anything after the number are refused, and so is an empty text.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace penstock {

// std::nullopt for anything that is not such a number.
std::optional<double> parse_number(std::string_view text);
std::optional<std::int64_t> parse_whole(std::string_view text);
std::optional<std::uint64_t> parse_unsigned(std::string_view text);
// A number with an optional suffix K, M, G, T, P or E, each a further power of 1024; also KB, KiB, ..., and B alone; any case.
std::optional<double> parse_scaled(std::string_view text);
// The same for a whole number of bytes that is not negative and below 8 EiB: "512", "64K", "1.5G", "16MB".
std::optional<std::int64_t> parse_bytes(std::string_view text);

// Both limits are allowed values unless `above_low` is set, which excludes the lower one.
struct NumberRange {
  double low = 0;
  double high = std::numeric_limits<double>::max();
  bool above_low = false;

  bool contains(double value) const { return (above_low ? value > low : value >= low) && value <= high; }
  // "from 0 to 1", "above 0 up to 1000", "of at least 0".
  std::string text() const;
};

// Throw ConfigError: "WHAT: got "TEXT", expected a number from LOW to HIGH; REMEDY".
double read_number(std::string_view what, std::string_view text, const NumberRange& range, std::string_view remedy = {});
std::int64_t read_whole(std::string_view what, std::string_view text, std::int64_t low, std::int64_t high,
                        std::string_view remedy = {});
std::int64_t read_bytes(std::string_view what, std::string_view text, std::int64_t low = 0, std::string_view remedy = {});

// Whole numbers without an exponent up to 1e15, as limits are read by people.
std::string number_text(double value);

}  // namespace penstock
