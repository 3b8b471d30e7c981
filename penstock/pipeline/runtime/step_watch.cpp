#include "penstock/pipeline/runtime/step_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "penstock/base/log.h"

namespace penstock {

namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

constexpr auto kPeriod = 250ms;       // between two checks of the progress
constexpr auto kRenewal = 1s;         // of the status of a rank that makes no progress
constexpr auto kPollPause = 50ms;     // between two reads of a roll call
constexpr auto kStoreSlack = 500ms;   // for the store to answer, beyond the time of a roll call
constexpr auto kHostLingers = 500ms;  // the host of the store, for the others to post their statuses
constexpr auto kReadingTime = 200ms;  // and to read them
constexpr double kFreshForS = 2.0;    // a more recent status needs no renewal
constexpr int kStoreHost = 0;
const char* const kKey = "pipeline.progress";

// Used to compare clocks of different hosts, to a fraction of a second.
std::int64_t wall_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Format: the time, "now" or "last", the place.
std::string encode_status(const RankPlace& place, bool last) {
  return fmt::format("{} {} {}", wall_now_ns(), last ? "last" : "now", encode_place(place));
}

struct ReceivedStatus {
  RankPlace place;
  bool last = false;
};

std::optional<ReceivedStatus> decode_status(const std::string& text) {
  std::int64_t written_ns = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), written_ns);
  const std::string_view left(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  const bool last = left.starts_with(" last ");
  if (failed != std::errc() || (!last && !left.starts_with(" now "))) return std::nullopt;
  auto place = decode_place(left.substr(last ? 6 : 5));
  if (!place) return std::nullopt;
  place->said_s_ago = std::max(0.0, static_cast<double>(wall_now_ns() - written_ns) / 1e9);
  return ReceivedStatus{std::move(*place), last};
}

}  // namespace

struct StepWatch::State {
  explicit State(Options given) : options(std::move(given)), stalled_after(report_after(options.timeout)) {}

  struct Question {
    RankPlace own;
    std::optional<int> lost;
    bool wait_for_others = false;
    SteadyClock::time_point deadline;
  };

  void run() {
    std::unique_lock lock(mutex);
    while (!stop) {
      wake.wait_for(lock, kPeriod, [&] { return stop || question.has_value(); });
      if (stop) break;
      try {
        if (question) {
          answer(lock);
        } else {
          post_progress(lock);
        }
      } catch (const std::exception& error) {
        // The store is gone, so nothing can be posted or read any more; the waits of the step report which
        // rank was lost.
        if (!lock.owns_lock()) lock.lock();
        log().debug("pipeline: the status of ranks could not be posted or read: {}", error.what());
        store_failed = true;
      }
      if (question) {
        question.reset();
        changed.notify_all();
      }
    }
    ended = true;
    changed.notify_all();
  }

  void post_progress(std::unique_lock<std::mutex>& lock) {
    if (store_failed || posted_last) return;
    const std::optional<RankPlace> place = options.look();
    if (!place) return;
    const double stalled_s = std::chrono::duration<double>(stalled_after).count();
    const bool stalled = place->state != RankPlace::State::Between && place->for_s >= stalled_s;
    const bool same = posted && posted->step == place->step && posted->state == place->state &&
                      posted->instruction == place->instruction;
    const auto since = SteadyClock::now() - posted_at;
    if (posted && (stalled ? same && since < kRenewal : since < stalled_after)) return;
    posted = place;
    posted_at = SteadyClock::now();
    lock.unlock();
    options.world.post_status(kKey, encode_status(*place, false));
    lock.lock();
  }

  void answer(std::unique_lock<std::mutex>& lock) {
    const Question asked = *question;
    if (store_failed) return;
    posted_last = true;
    lock.unlock();
    options.world.post_status(kKey, encode_status(asked.own, true));
    const bool host = options.world.rank() == kStoreHost;
    bool all_read = false;
    while (!all_read) {
      all_read = true;
      for (const int rank : options.ranks) {
        if (rank == options.world.rank()) continue;
        const auto text = options.world.status_of(rank, kKey);
        const auto status = text ? decode_status(*text) : std::nullopt;
        // The host of the store stays until all others have posted their last status.
        const bool enough = status && (status->last || (!host && status->place.said_s_ago <= kFreshForS));
        if (rank != asked.lost && !enough) all_read = false;
        const double too_old_s = std::chrono::duration<double>(stalled_after).count() + kFreshForS;
        if (status && (status->last || rank == asked.lost || status->place.said_s_ago <= too_old_s)) {
          const std::lock_guard guard(mutex);
          note(status->place, rank);
        }
      }
      if (!asked.wait_for_others && !host) break;
      std::unique_lock guard(mutex);
      if (stop || SteadyClock::now() >= asked.deadline) break;
      if (!all_read) wake.wait_for(guard, kPollPause, [&] { return stop; });
    }
    lock.lock();
    if (host && all_read) wake.wait_for(lock, kReadingTime, [&] { return stop; });
  }

  // Requires the lock.
  void note(const RankPlace& place, int rank) {
    const auto at =
        std::find_if(places.begin(), places.end(), [&](const RankPlace& each) { return each.rank == rank; });
    if (at != places.end()) *at = place;
  }

  const Options options;
  const std::chrono::milliseconds stalled_after;

  std::mutex mutex;  // guards what follows
  std::condition_variable wake, changed;
  bool stop = false;
  bool ended = false;
  bool posted_last = false;
  bool store_failed = false;
  std::optional<RankPlace> posted;
  SteadyClock::time_point posted_at;
  std::optional<Question> question;
  std::vector<RankPlace> places;
};

struct StepWatch::Thread {
  std::thread thread;
};

StepWatch::StepWatch(Options options) : state_(std::make_shared<State>(std::move(options))) {}

StepWatch::~StepWatch() {
  if (!thread_) return;
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->wake.notify_all();
  const bool ended = state_->changed.wait_for(lock, kStoreSlack, [&] { return state_->ended; });
  lock.unlock();
  if (ended) {
    thread_->thread.join();
  } else {
    thread_->thread
        .detach();  // blocked in a store that does not answer; from now on it touches only its own state
  }
}

std::chrono::milliseconds StepWatch::report_after(std::chrono::milliseconds timeout) {
  return std::min(timeout / 3, std::chrono::milliseconds(10s));
}

void StepWatch::start() {
  if (thread_) return;
  thread_ = std::make_unique<Thread>(Thread{std::thread([state = state_] { state->run(); })});
}

std::vector<RankPlace> StepWatch::ask(const RankPlace& own, std::optional<int> lost, bool wait_for_others,
                                      std::chrono::milliseconds limit) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.places.clear();
  for (const int rank : state.options.ranks) {
    RankPlace& place = state.places.emplace_back();
    place.rank = rank;
    if (rank == own.rank) place = own;
  }
  if (thread_) {
    state.question = State::Question{own, lost, wait_for_others, SteadyClock::now() + limit};
    state.wake.notify_all();
    state.changed.wait_for(lock, limit + kReadingTime + kStoreSlack, [&] { return !state.question; });
  }
  const bool answered = thread_ && !state.question && !state.store_failed;
  std::vector<RankPlace> places = state.places;
  for (RankPlace& place : places) {
    if (place.rank == lost) place.state = RankPlace::State::Lost;
    // Only the host of an unresponsive store is to blame for it.
    if (place.state == RankPlace::State::NoStatus && !answered && place.rank != kStoreHost)
      place.error = fmt::format("the store, which rank {} hosts, does not answer", kStoreHost);
  }
  return places;
}

std::vector<RankPlace> StepWatch::roll_call(const RankPlace& own, std::optional<int> lost) {
  return ask(own, lost, true, kRollCallTime);
}

void StepWatch::post_last_place(const RankPlace& own) { ask(own, std::nullopt, false, kHostLingers); }

}  // namespace penstock
