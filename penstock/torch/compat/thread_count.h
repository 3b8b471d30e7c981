// The number of threads that operators use: LibTorch's, and OpenBLAS's, which may be a separate pool.
#pragma once

namespace penstock {

struct ThreadCounts {
  int operators = 1;
  int blas = 1;
};

ThreadCounts thread_counts();

// Applies to operators that start from now on, in this thread and in threads it starts. No other thread may
// be computing.
void set_thread_counts(const ThreadCounts& counts);

// Sets both counts to `threads` within a scope.
class ThreadCountScope {
 public:
  explicit ThreadCountScope(int threads) : before_(thread_counts()) { set_thread_counts({threads, threads}); }
  ~ThreadCountScope() { set_thread_counts(before_); }
  ThreadCountScope(const ThreadCountScope&) = delete;
  ThreadCountScope& operator=(const ThreadCountScope&) = delete;

 private:
  ThreadCounts before_;
};

}  // namespace penstock
