// How `penstock` ends when a command throws: one message on standard error and an exit code.
//
// Penstock's own exceptions explain themselves. An exception of LibTorch or of the standard library that arrives here was explained by nobody:
// that is a defect of Penstock, and its exit code says so, so that tests can tell it from a refusal. Only memory that ran out is no defect.
#pragma once

#include <string_view>

namespace penstock::cli {

// Exit codes of all commands. `launch`, and `train` with its ranks, return that of the rank that failed first.
inline constexpr int kFailed = 1;   // a check or a run failed
inline constexpr int kUsage = 2;    // usage, configuration or a file that cannot be used
inline constexpr int kDefect = 70;  // of Penstock itself: EX_SOFTWARE of sysexits.h

// Prints "penstock: ..." about the exception that is being handled and returns the exit code. To be called in a catch block. Never throws.
int report_failure() noexcept;

// Prints a message as all of them are printed: no control bytes, no megabytes.
void print_error(std::string_view message);

// Exceptions that leave a thread, a destructor or a noexcept function end the process with the same sentence and kDefect instead of abort().
void report_failure_on_terminate();

}  // namespace penstock::cli
