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

namespace penstock::pipeline {

namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

constexpr auto kPeriod = 250ms;         // between two looks
constexpr auto kRenewal = 1s;           // of the word of a rank that stands still
constexpr auto kPollPause = 50ms;       // between two questions of a roll call
constexpr auto kStoreSlack = 500ms;     // for the store to answer, beyond the time of a roll call
constexpr auto kHostLingers = 500ms;    // the host of the store, for the others to leave their words
constexpr auto kReadingTime = 200ms;    // and to read them
constexpr double kFreshForS = 2.0;      // a word that is younger needs no renewal
constexpr int kStoreHost = 0;
const char* const kKey = "pipeline.progress";

// Clocks of different hosts are compared here, to a fraction of a second.
std::int64_t wall_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// On the wire: the time, "now" or "last", the place.
std::string envelope(const RankPlace& place, bool last) {
  return fmt::format("{} {} {}", wall_now_ns(), last ? "last" : "now", to_word(place));
}

struct Word {
  RankPlace place;
  bool last = false;
};

std::optional<Word> open_envelope(const std::string& text) {
  std::int64_t written_ns = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), written_ns);
  const std::string_view left(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  const bool last = left.starts_with(" last ");
  if (failed != std::errc() || (!last && !left.starts_with(" now "))) return std::nullopt;
  auto place = from_word(left.substr(last ? 6 : 5));
  if (!place) return std::nullopt;
  place->said_s_ago = std::max(0.0, static_cast<double>(wall_now_ns() - written_ns) / 1e9);
  return Word{std::move(*place), last};
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
          look_around(lock);
        }
      } catch (const std::exception& error) {
        // The store is gone, and with it everything that could be told or heard; the waits of the step say who was lost.
        if (!lock.owns_lock()) lock.lock();
        log().debug("pipeline: no word could be left or read: {}", error.what());
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

  void look_around(std::unique_lock<std::mutex>& lock) {
    if (store_failed || said_last) return;
    const std::optional<RankPlace> place = options.look();
    if (!place) return;
    const double stalled_s = std::chrono::duration<double>(stalled_after).count();
    const bool stalled = place->state != RankPlace::State::Between && place->for_s >= stalled_s;
    const bool same = told && told->step == place->step && told->state == place->state && told->instruction == place->instruction;
    const auto since = SteadyClock::now() - told_at;
    if (told && (stalled ? same && since < kRenewal : since < stalled_after)) return;
    told = place;
    told_at = SteadyClock::now();
    lock.unlock();
    options.world.post_status(kKey, envelope(*place, false));
    lock.lock();
  }

  void answer(std::unique_lock<std::mutex>& lock) {
    const Question asked = *question;
    if (store_failed) return;
    said_last = true;
    lock.unlock();
    options.world.post_status(kKey, envelope(asked.own, true));
    const bool host = options.world.rank() == kStoreHost;
    bool all_read = false;
    while (!all_read) {
      all_read = true;
      for (const int rank : options.ranks) {
        if (rank == options.world.rank()) continue;
        const auto text = options.world.status_of(rank, kKey);
        const auto word = text ? open_envelope(*text) : std::nullopt;
        // The host of the store stays until everybody else has said all there is to say.
        const bool enough = word && (word->last || (!host && word->place.said_s_ago <= kFreshForS));
        if (rank != asked.lost && !enough) all_read = false;
        const double too_old_s = std::chrono::duration<double>(stalled_after).count() + kFreshForS;
        if (word && (word->last || rank == asked.lost || word->place.said_s_ago <= too_old_s)) {
          const std::lock_guard guard(mutex);
          note(word->place, rank);
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

  // Needs the lock.
  void note(const RankPlace& place, int rank) {
    const auto at = std::find_if(heard.begin(), heard.end(), [&](const RankPlace& each) { return each.rank == rank; });
    if (at != heard.end()) *at = place;
  }

  const Options options;
  const std::chrono::milliseconds stalled_after;

  std::mutex mutex;  // guards what follows
  std::condition_variable wake, changed;
  bool stop = false;
  bool ended = false;
  bool said_last = false;
  bool store_failed = false;
  std::optional<RankPlace> told;
  SteadyClock::time_point told_at;
  std::optional<Question> question;
  std::vector<RankPlace> heard;
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
    thread_->thread.detach();  // in a store that does not answer; it touches nothing but its own state any more
  }
}

std::chrono::milliseconds StepWatch::report_after(std::chrono::milliseconds timeout) {
  return std::min(timeout / 3, std::chrono::milliseconds(10s));
}

void StepWatch::start() {
  if (thread_) return;
  thread_ = std::make_unique<Thread>(Thread{std::thread([state = state_] { state->run(); })});
}

std::vector<RankPlace> StepWatch::ask(const RankPlace& own, std::optional<int> lost, bool wait_for_others, std::chrono::milliseconds limit) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.heard.clear();
  for (const int rank : state.options.ranks) {
    RankPlace& place = state.heard.emplace_back();
    place.rank = rank;
    if (rank == own.rank) place = own;
  }
  if (thread_) {
    state.question = State::Question{own, lost, wait_for_others, SteadyClock::now() + limit};
    state.wake.notify_all();
    state.changed.wait_for(lock, limit + kReadingTime + kStoreSlack, [&] { return !state.question; });
  }
  const bool answered = thread_ && !state.question && !state.store_failed;
  std::vector<RankPlace> places = state.heard;
  for (RankPlace& place : places) {
    if (place.rank == lost) place.state = RankPlace::State::Lost;
    // Only the host of a store that does not answer is to blame for that.
    if (place.state == RankPlace::State::NoWord && !answered && place.rank != kStoreHost) place.error = fmt::format("the store, which rank {} hosts, does not answer", kStoreHost);
  }
  return places;
}

std::vector<RankPlace> StepWatch::roll_call(const RankPlace& own, std::optional<int> lost) {
  return ask(own, lost, true, kRollCallTime);
}

void StepWatch::last_word(const RankPlace& own) {
  ask(own, std::nullopt, false, kHostLingers);
}

}  // namespace penstock::pipeline
