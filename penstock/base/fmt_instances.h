#pragma once

// fmt 9 does not say that its library has the function that formats everything. Each translation unit that
// logs or appends would compile it again, with all of the formatting of numbers: 1.6 s of a compiler's time.
// It is instantiated once, in fmt_instances.cpp; fmt 10 and later declare it themselves. The build includes
// this header in front of every unit (cmake/Rooms.cmake).

#include <fmt/format.h>

#if FMT_VERSION >= 90000 && FMT_VERSION < 100000 && !defined(FMT_HEADER_ONLY)
FMT_BEGIN_NAMESPACE
namespace detail {
extern template void vformat_to<char>(buffer<char>&, basic_string_view<char>,
                                      basic_format_args<buffer_context<char>>, locale_ref);
}  // namespace detail
FMT_END_NAMESPACE
#endif
