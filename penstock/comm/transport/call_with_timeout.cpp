#include "penstock/comm/transport/call_with_timeout.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace penstock::comm {

namespace {

struct Job {
  std::function<void()> call;
  bool done = false;
  std::exception_ptr error;
};

}  // namespace

// Shared with the thread, which may outlive the owner.
struct CallWithTimeout::State {
  std::mutex mutex;
  std::condition_variable work, answer;
  std::deque<std::shared_ptr<Job>> jobs;  // the first one is running
  bool stuck = false;                     // a caller has abandoned it
  bool ending = false;

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return ending || !jobs.empty(); });
      if (jobs.empty()) return;
      const std::shared_ptr<Job> job = jobs.front();
      lock.unlock();
      std::exception_ptr error;
      try {
        job->call();
      } catch (...) {
        error = std::current_exception();
      }
      job->call = nullptr;  // destroying what it owns may take time
      lock.lock();
      job->error = std::move(error);
      job->done = true;
      jobs.pop_front();
      stuck = false;
      answer.notify_all();
    }
  }
};

CallWithTimeout::CallWithTimeout() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { state->serve(); }).detach();
}

CallWithTimeout::~CallWithTimeout() {
  const std::lock_guard lock(state_->mutex);
  state_->ending = true;
  state_->work.notify_all();
}

bool CallWithTimeout::run(std::function<void()> call, std::chrono::milliseconds limit) {
  const auto job = std::make_shared<Job>(Job{std::move(call), false, nullptr});
  std::unique_lock lock(state_->mutex);
  if (state_->stuck) return false;
  state_->jobs.push_back(job);
  state_->work.notify_all();
  if (!state_->answer.wait_for(lock, limit, [&] { return job->done; })) {
    const bool under_way = state_->jobs.front() == job;
    state_->stuck |= under_way;
    if (!under_way) state_->jobs.erase(std::find(state_->jobs.begin(), state_->jobs.end(), job));
    return false;
  }
  if (job->error) std::rethrow_exception(job->error);
  return true;
}

}  // namespace penstock::comm
