#include "penstock/base/warnings.h"

#include <algorithm>
#include <set>
#include <utility>

#include "penstock/base/log.h"

namespace penstock {

namespace {

struct Sink {
  std::mutex mutex;
  std::vector<WarningCapture*> captures;
  std::set<std::pair<std::string, std::string>> seen_once;
};

Sink& sink() {
  static Sink instance;
  return instance;
}

}  // namespace

void warn(std::string_view category, std::string_view message) {
  Sink& target = sink();
  std::lock_guard lock(target.mutex);
  if (target.captures.empty()) {
    log().warn("{}: {}", category, message);
    return;
  }
  WarningCapture& capture = *target.captures.back();
  std::lock_guard capture_lock(capture.mutex_);
  capture.collected_.push_back({std::string(category), std::string(message)});
}

void warn_once(std::string_view category, std::string_view message) {
  {
    std::lock_guard lock(sink().mutex);
    if (!sink().seen_once.emplace(category, message).second) return;
  }
  warn(category, message);
}

WarningCapture::WarningCapture() {
  std::lock_guard lock(sink().mutex);
  sink().captures.push_back(this);
  sink().seen_once.clear();
}

WarningCapture::~WarningCapture() {
  std::lock_guard lock(sink().mutex);
  std::erase(sink().captures, this);
}

std::vector<Warning> WarningCapture::warnings() const {
  std::lock_guard lock(mutex_);
  return collected_;
}

}  // namespace penstock
