// Numeric options of commands, parsed by base/number.h: NaN, infinities, trailing characters and values
// outside the stated range are usage errors that name the option.
//
//   add_whole(*command, "--steps", flags->steps, 1, 10000, "Steps to compare");
//
// The help shows the range, and the default if `place` holds a value in that range.
#pragma once

#include <CLI/CLI.hpp>
#include <concepts>
#include <cstdint>
#include <functional>
#include <string>

#include "penstock/base/number.h"

namespace penstock::cli {

// `read` is called with the option's name ("-n, --ranks") and the text; it throws ConfigError for invalid
// text.
CLI::Option* add_read_option(CLI::App& command, const std::string& names, const std::string& type,
                             const std::string& help,
                             std::function<void(const std::string& name, const std::string& text)> read);

// "Steps to compare (1 to 10000, default 3)"
std::string whole_help(const std::string& help, std::int64_t low, std::int64_t high, std::int64_t now);

template <std::integral T>
CLI::Option* add_whole(CLI::App& command, const std::string& names, T& place, std::int64_t low,
                       std::int64_t high, const std::string& help) {
  return add_read_option(command, names, "N", whole_help(help, low, high, static_cast<std::int64_t>(place)),
                         [&place, low, high](const std::string& name, const std::string& text) {
                           place = static_cast<T>(read_integer(name, text, low, high));
                         });
}

CLI::Option* add_number(CLI::App& command, const std::string& names, double& place, const NumberRange& range,
                        const std::string& help);

// A number of bytes with an optional suffix. `help` states the meaning and the default.
CLI::Option* add_bytes(CLI::App& command, const std::string& names, std::uint64_t& place, std::int64_t low,
                       const std::string& help);

// Throws ConfigError that names the first of these options that was given: "--ranks has no effect WHY; leave
// it out".
void refuse_options(const CLI::App& command, std::initializer_list<const char*> names, const std::string& why,
                    const std::string& remedy = "leave it out");

}  // namespace penstock::cli
