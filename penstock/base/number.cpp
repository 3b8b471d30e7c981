#include "penstock/base/number.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <system_error>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

template <class T>
std::optional<T> parse(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Removes the suffix from `text` and returns its factor.
double take_scale(std::string_view& text) {
  constexpr std::string_view kLetters = "kmgtpe";
  std::string_view rest = text;
  const bool bytes = !rest.empty() && lower(rest.back()) == 'b';
  if (bytes) rest.remove_suffix(1);
  const bool binary = bytes && rest.size() > 1 && lower(rest.back()) == 'i';
  if (binary) rest.remove_suffix(1);
  const std::size_t power = rest.empty() ? std::string_view::npos : kLetters.find(lower(rest.back()));
  if (power == std::string_view::npos) {
    if (bytes && !binary) text = rest;  // accepts "512B"; "512iB" is left unchanged and refused
    return 1;
  }
  rest.remove_suffix(1);
  text = rest;
  return std::pow(1024.0, static_cast<double>(power + 1));
}

}  // namespace

std::optional<double> parse_number(std::string_view text) {
  const std::optional<double> value = parse<double>(text);
  return value && std::isfinite(*value) ? value : std::nullopt;
}

std::optional<std::int64_t> parse_integer(std::string_view text) { return parse<std::int64_t>(text); }

std::optional<std::uint64_t> parse_unsigned(std::string_view text) { return parse<std::uint64_t>(text); }

std::optional<double> parse_scaled(std::string_view text) {
  const double scale = take_scale(text);
  const std::optional<double> value = parse_number(text);
  if (!value || !std::isfinite(*value * scale)) return std::nullopt;
  return *value * scale;
}

std::optional<std::int64_t> parse_bytes(std::string_view text) {
  // Integers are exact where a double would not be.
  if (const auto whole = parse_integer(text)) return *whole >= 0 ? whole : std::nullopt;
  std::string_view digits = text;
  const double scale = take_scale(digits);
  const std::optional<double> value = parse_number(digits);
  if (!value || *value < 0 || !(*value * scale < 0x1p63)) return std::nullopt;
  // "1.5G" is a number of bytes, "1.5" is not.
  if (scale == 1 && *value != std::floor(*value)) return std::nullopt;
  return static_cast<std::int64_t>(*value * scale);
}

std::string number_text(double value) {
  if (std::abs(value) < 1e15 && value == std::floor(value)) return fmt::format("{:.0f}", value);
  return fmt::format("{}", value);
}

std::string NumberRange::text() const {
  const bool open = high == std::numeric_limits<double>::max();
  if (open) return fmt::format("{} {}", above_low ? "above" : "of at least", number_text(low));
  if (above_low) return fmt::format("above {} up to {}", number_text(low), number_text(high));
  return fmt::format("from {} to {}", number_text(low), number_text(high));
}

double read_number(std::string_view what, std::string_view text, const NumberRange& range,
                   std::string_view remedy) {
  const std::optional<double> value = parse_number(text);
  if (!value || !range.contains(*value))
    throw ConfigError(describe(what, quote(text), fmt::format("a number {}", range.text()), remedy));
  return *value;
}

std::int64_t read_integer(std::string_view what, std::string_view text, std::int64_t low, std::int64_t high,
                          std::string_view remedy) {
  const std::optional<std::int64_t> value = parse_integer(text);
  if (!value || *value < low || *value > high)
    throw ConfigError(describe(what, quote(text),
                               high == std::numeric_limits<std::int64_t>::max()
                                   ? fmt::format("a whole number of at least {}", low)
                                   : fmt::format("a whole number from {} to {}", low, high),
                               remedy));
  return *value;
}

std::int64_t read_bytes(std::string_view what, std::string_view text, std::int64_t low,
                        std::string_view remedy) {
  const std::optional<std::int64_t> value = parse_bytes(text);
  if (!value || *value < low)
    throw ConfigError(describe(what, quote(text),
                               fmt::format("bytes, such as 512, 64K or 1.5G{}",
                                           low > 0 ? fmt::format(", at least {}", low) : ", below 8 EiB"),
                               remedy));
  return *value;
}

}  // namespace penstock
