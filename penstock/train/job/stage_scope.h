// The model stage that a thread is computing, for messages.
//
//   const StageScope scope(3);                 // around the forward of stage 3
//   StageScope::current()                      // 3; std::nullopt outside any stage
//
// Thread safety: each thread has its own scope; autograd's worker threads have none.
#pragma once

#include <optional>

namespace penstock::train {

class StageScope {
 public:
  explicit StageScope(int stage) : before_(current_) { current_ = stage; }
  ~StageScope() { current_ = before_; }
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;

  static std::optional<int> current() { return current_ < 0 ? std::nullopt : std::optional<int>(current_); }

 private:
  inline static thread_local int current_ = -1;
  int before_;
};

}  // namespace penstock::train
