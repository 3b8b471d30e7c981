// Two parties on two threads that take turns: one of them runs at any time, and each decides where it lets
// the other one run. What both do is therefore in an order that does not depend on the timing of threads.
//
//   TurnTaking turns(std::chrono::minutes(10));          // party 0 begins
//   thread of party 0: a(); turns.hand_over(0); c(); turns.finish(0);
//   thread of party 1: turns.await_first_turn(); b(); turns.finish(1);              // order: a b c
//
// A party that fails says so; the other one then gets a TurnCancelled where it waits, or at its next
// hand_over(). Everything a party did before it handed over happens before what the other one does next, so
// that both may use the same objects without locks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

#include "penstock/errors.h"

namespace penstock {

// The other party has failed. Not an error of its own: TurnTaking::error() has the cause.
class TurnCancelled : public Error {
 public:
  TurnCancelled() : Error("cancelled, because the other half of an overlapped unit has failed") {}
};

class TurnTaking {
 public:
  // `limit`: how long a party waits for its turn before it gives up. Only a party that blocks for a reason
  // of its own makes the other wait that long.
  explicit TurnTaking(std::chrono::milliseconds limit) : limit_(limit) {}

  // Lets the other party run until it hands over or finishes. Returns false, at once, if the other party has
  // finished. Throws TurnCancelled if it has failed, StateError after the limit, which is then the error of
  // both.
  bool hand_over(int party);
  // Party 1 waits here for its first turn. Throws as hand_over.
  void await_first_turn();

  // The party takes no further turns.
  void finish(int party);
  // The same, for a party that fails. The first error counts.
  void fail(int party, std::exception_ptr error);

  // The first error; null if there is none. After both parties have finished.
  std::exception_ptr error() const;

 private:
  void await_turn(int party, std::unique_lock<std::mutex>& lock);

  const std::chrono::milliseconds limit_;
  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  int turn_ = 0;
  bool finished_[2] = {false, false};
  std::exception_ptr error_;
};

}  // namespace penstock
