// Error messages in one shape everywhere, and checks of internal contracts.
#pragma once

#include <string>
#include <string_view>

namespace penstock {

// "what: got ACTUAL, expected EXPECTED; REMEDY". Empty parts are left out.
std::string describe(std::string_view what, std::string_view actual, std::string_view expected,
                     std::string_view remedy = {});

// Throws InvariantError that names the place.
[[noreturn]] void invariant_failed(const char* condition, const char* file, int line, std::string_view why);

}  // namespace penstock

// Stays on in release builds: a broken contract must never become wrong numbers.
#define PENSTOCK_INVARIANT(condition, why)                                 \
  do {                                                                     \
    if (!(condition)) [[unlikely]]                                         \
      ::penstock::invariant_failed(#condition, __FILE__, __LINE__, (why)); \
  } while (false)
