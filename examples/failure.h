// How the examples end when something fails: with a message instead of "terminate called".
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

// In a catch block: prints what the exception says and returns the exit code 1. LibTorch's errors carry a stack trace, which helps
// nobody who runs an example.
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
