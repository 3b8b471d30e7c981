#include "penstock/cli/common/status_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>

namespace penstock::cli {

struct StatusLine::Impl {
  explicit Impl(std::string the_what) : what(std::move(the_what)), writer([this] { write(); }) {}
  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      done = true;
    }
    changed.notify_all();
    writer.join();
    if (shown && terminal) std::fputs("\r\x1b[K", stderr);
  }

  void write() {
    const auto pause = terminal ? std::chrono::milliseconds(200) : std::chrono::milliseconds(5000);
    std::unique_lock lock(mutex);
    for (auto next = begin + std::chrono::seconds(1); !changed.wait_until(lock, next, [&] { return done; });
         next += pause) {
      const auto seconds =
          std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - begin).count();
      fmt::print(stderr, "{}{}: {}{}, {} s{}", terminal ? "\r" : "", what, doing,
                 share < 0 ? std::string() : fmt::format(", {:.0f} %", 100 * share), seconds,
                 terminal ? "\x1b[K" : "\n");
      std::fflush(stderr);
      shown = true;
    }
  }

  const std::string what;
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  bool shown = false;
  std::string doing = "starting";
  double share = -1;
  std::thread writer;  // last member: the thread uses all others
};

StatusLine::StatusLine(std::string what) : impl_(std::make_unique<Impl>(std::move(what))) {}
StatusLine::~StatusLine() = default;

void StatusLine::show(const std::string& doing, double share) {
  const std::lock_guard lock(impl_->mutex);
  impl_->doing = doing;
  impl_->share = share;
}

}  // namespace penstock::cli
