#include "penstock/cli/common/failure.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/base/out_of_memory.h"
#include "penstock/base/printable.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace {

constexpr std::size_t kLongestMessage =
    8000;  // bytes; a list of all that is wrong in a configuration has its place

int defect(std::string_view what) {
  print_error(
      fmt::format("internal error: {}\nThis is a defect of Penstock. Please report it with the command that "
                  "you ran; PENSTOCK_LOG=debug shows more.",
                  what));
  return kDefect;
}

int no_memory(std::string_view what) {
  print_error(
      fmt::format("not enough memory: {} could not be allocated; choose smaller sizes (model.context, "
                  "layout.microbatch_size, ...), more ranks on more machines, or close other programs",
                  what));
  return kFailed;
}

int explain() {
  try {
    throw;
  } catch (const InvariantError& error) {
    return defect(error.what());
  } catch (const ConfigError& error) {
    print_error(error.what());
    return kUsage;
  } catch (const std::exception& error) {
    if (const auto what = out_of_memory(error)) return no_memory(*what);
    if (dynamic_cast<const Error*>(&error) != nullptr) {
      print_error(without_backtrace(error.what()));
      return kFailed;
    }
    log().debug("{}", error.what());
    return defect(current_exception_text());
  } catch (...) {
    return defect(current_exception_text());
  }
}

[[noreturn]] void end_on_terminate() {
  // A second exception while the first is explained, or two threads at once: the first one speaks.
  static std::atomic_flag speaking = ATOMIC_FLAG_INIT;
  if (speaking.test_and_set()) ::_exit(kDefect);
  if (std::current_exception()) {
    report_failure();
  } else {
    defect("ended without an exception");
  }
  std::fflush(stdout);
  ::_exit(kDefect);
}

}  // namespace

void print_error(std::string_view message) {
  std::fflush(stdout);
  fmt::print(stderr, "penstock: {}\n", printable(shortened(message, kLongestMessage)));
  std::fflush(stderr);
}

int report_failure() noexcept {
  try {
    return explain();
  } catch (...) {  // no memory for the message, or nobody reads standard error
    std::fputs("penstock: failed, and the reason could not be printed\n", stderr);
    return kDefect;
  }
}

void report_failure_on_terminate() { std::set_terminate(end_on_terminate); }

}  // namespace penstock::cli
