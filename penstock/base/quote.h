// Quotes foreign text in messages: it may be binary, very long, or contain terminal escape sequences.
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>

#include "penstock/base/printable.h"

namespace penstock {

// In double quotes, on one line: printable(), with \n and \t for newlines and tabs; long text is cut and ends
// with "...".
std::string quote(std::string_view text, std::size_t at_most = 64);

// "1 file", "3 files". Pass `plural` for words whose plural is not formed with an s.
std::string count_of(unsigned long long count, std::string_view word, std::string_view plural = {});
template <std::signed_integral Count>
std::string count_of(Count count, std::string_view word, std::string_view plural = {}) {
  return count_of(static_cast<unsigned long long>(count < 0 ? 0 : count), word, plural);
}

}  // namespace penstock
