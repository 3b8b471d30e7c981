// How `penstock` exits when a command throws: one message on standard error and an exit code.
//
// Penstock's own exceptions explain the problem. An exception of LibTorch or of the standard library that
// reaches this point is a defect of Penstock and has its own exit code, so that tests can distinguish it from
// an expected error. The exception is running out of memory.
#pragma once

#include <string_view>

namespace penstock::cli {

// Exit codes of all commands. `launch`, and `train` with its ranks, return the code of the rank that failed
// first.
inline constexpr int kFailed = 1;   // a check or a run failed
inline constexpr int kUsage = 2;    // usage, configuration or a file that cannot be used
inline constexpr int kDefect = 70;  // a defect of Penstock: EX_SOFTWARE of sysexits.h

// Prints "penstock: ..." for the exception that is being handled and returns the exit code. Call it in a
// catch block. Never throws.
int report_failure() noexcept;

// Prints a message with control bytes escaped and its length limited.
void print_error(std::string_view message);

// Makes exceptions that escape from a thread, a destructor or a noexcept function end the process with the
// same message and kDefect instead of abort().
void report_failure_on_terminate();

}  // namespace penstock::cli
