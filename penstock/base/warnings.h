// Warnings: logged by default, captured by tests.
//
// Thread safety: all functions are thread-safe. A capture receives the warnings of all threads of the
// process.
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

// Like `warn`, but drops a (category, message) pair that was already raised in this process.
void warn_once(std::string_view category, std::string_view message);

// While alive, collects warnings instead of logging them. Captures nest; the innermost one receives the
// warnings. Also resets what `warn_once` has seen, so that a test does not depend on earlier tests.
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
