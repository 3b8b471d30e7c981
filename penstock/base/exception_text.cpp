#include "penstock/base/exception_text.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <typeinfo>

namespace penstock {

std::string current_exception_text() {
  if (!std::current_exception()) return "no exception";
  try {
    throw;
  } catch (const std::exception& error) {
    return without_backtrace(error.what());
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    if (type == nullptr) return "an exception of an unknown type";
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(
        abi::__cxa_demangle(type->name(), nullptr, nullptr, &status), &std::free);
    return std::string("an exception of type ") + (status == 0 ? name.get() : type->name());
  }
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

std::string without_json_tag(std::string_view text) {
  const std::size_t end = text.starts_with("[json.exception.") ? text.find("] ") : std::string_view::npos;
  return std::string(end == std::string_view::npos ? text : text.substr(end + 2));
}

std::string without_backtrace(std::string_view text) {
  std::size_t end = text.size();
  // These come from c10::Error, from allocator checks, and from builds that symbolize backtraces themselves.
  for (const std::string_view mark : {"\nException raised from ", "\nframe #", "\nC++ CapturedTraceback:"})
    end = std::min(end, text.find(mark));
  while (end > 0 && text[end - 1] == '\n') --end;
  return std::string(text.substr(0, end));
}

}  // namespace penstock
