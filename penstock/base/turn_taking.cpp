#include "penstock/base/turn_taking.h"

#include <fmt/format.h>

#include <utility>

#include "penstock/base/describe.h"

namespace penstock {

void TurnTaking::await_turn(int party, std::unique_lock<std::mutex>& lock) {
  const bool came = changed_.wait_for(lock, limit_, [&] { return turn_ == party || error_; });
  if (error_) throw TurnCancelled();
  if (came) return;
  const StateError error(describe(
      "an overlapped unit", fmt::format("one half waits for the other since {} s", limit_.count() / 1000.0),
      "halves that compute and exchange only",
      "do not wait for the other half, nor run a backward inside of a forward, or turn overlapping off"));
  error_ = std::make_exception_ptr(error);
  changed_.notify_all();
  throw error;
}

bool TurnTaking::hand_over(int party) {
  std::unique_lock lock(mutex_);
  if (error_) throw TurnCancelled();
  if (finished_[1 - party]) return false;
  turn_ = 1 - party;
  changed_.notify_all();
  await_turn(party, lock);
  return true;
}

void TurnTaking::await_first_turn() {
  std::unique_lock lock(mutex_);
  await_turn(1, lock);
}

void TurnTaking::finish(int party) {
  const std::lock_guard lock(mutex_);
  finished_[party] = true;
  turn_ = 1 - party;
  changed_.notify_all();
}

void TurnTaking::fail(int party, std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
  finished_[party] = true;
  turn_ = 1 - party;
  changed_.notify_all();
}

std::exception_ptr TurnTaking::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

}  // namespace penstock
