#include "penstock/base/exception_text.h"

#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <typeinfo>

namespace penstock {

std::string current_exception_text() {
  if (!std::current_exception()) return "no exception";
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    if (type == nullptr) return "an exception of an unknown type";
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(type->name(), nullptr, nullptr, &status), &std::free);
    return std::string("an exception of type ") + (status == 0 ? name.get() : type->name());
  }
}

}  // namespace penstock
