// Soft mismatches go through one sink: logged by default, captured by tests.
//
// Thread safe. A capture sees every warning of the process while it lives, whichever thread raised it.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

struct Warning {
  std::string category;  // "comm", "pipeline", ...
  std::string message;
};

void warn(std::string_view category, std::string_view message);

// As `warn`, but a (category, message) pair that was already raised in this process is dropped.
void warn_once(std::string_view category, std::string_view message);

// While alive, warnings are collected here instead of being logged; captures nest, the innermost one wins.
// Also forgets what `warn_once` has seen, so that a test does not depend on the tests before it.
class WarningCapture {
 public:
  WarningCapture();
  ~WarningCapture();
  WarningCapture(const WarningCapture&) = delete;
  WarningCapture& operator=(const WarningCapture&) = delete;

  std::vector<Warning> warnings() const;

 private:
  friend void warn(std::string_view, std::string_view);
  mutable std::mutex mutex_;
  std::vector<Warning> collected_;
};

}  // namespace penstock
