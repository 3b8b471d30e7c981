// Error handling of the examples: prints a message instead of "terminate called".
//
//   int main() try {
//     ...
//   } catch (...) {
//     return failure("pipeline");
//   }
#pragma once

#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>

// Call it in a catch block: prints the message of the exception and returns the exit code 1. Omits the stack
// trace that LibTorch's errors carry.
inline int failure(const char* program) {
  try {
    throw;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
  } catch (...) {
    std::fprintf(stderr, "%s: an exception of an unknown type\n", program);
  }
  return 1;
}
