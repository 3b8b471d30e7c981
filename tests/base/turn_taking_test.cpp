// Two threads that take turns: the order is theirs, not that of the scheduler; failures end both.
#include "penstock/base/turn_taking.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/has_text.h"

namespace penstock {
namespace turn_taking_test {

using namespace std::chrono_literals;
using test::has_text;

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

// Without a lock: the thread sanitizer sees it if both parties run at the same time.
std::string interleaved(unsigned seed) {
  std::string order;
  TurnTaking turns(30s);
  std::mt19937 random(seed);
  const auto pieces_of = [&] { return static_cast<int>(random() % 7); };
  const auto run = [&order, &turns](int party, int pieces) {
    if (party == 1) turns.await_first_turn();
    for (int i = 0; i < pieces; ++i) {
      order += static_cast<char>((party == 0 ? 'a' : 'A') + i);
      turns.hand_over(party);
    }
    turns.finish(party);
  };
  const int first = pieces_of(), second = pieces_of();
  std::thread other(run, 1, second);
  run(0, first);
  other.join();
  EXPECT_FALSE(turns.error());
  std::string expected;
  for (int i = 0; i < std::max(first, second); ++i) {
    if (i < first) expected += static_cast<char>('a' + i);
    if (i < second) expected += static_cast<char>('A' + i);
  }
  EXPECT_EQ(order, expected);
  return order;
}

TEST(TurnTaking, TheOrderIsThatOfTheHandOvers) {
  for (unsigned seed = 0; seed < 200; ++seed) EXPECT_EQ(interleaved(seed), interleaved(seed));
}

TEST(TurnTaking, AFinishedPartyIsNotWaitedFor) {
  TurnTaking turns(30s);
  turns.finish(1);
  EXPECT_FALSE(turns.hand_over(0));
  EXPECT_FALSE(turns.hand_over(0));
  turns.finish(0);
  EXPECT_FALSE(turns.error());
}

// Whoever fails first: the other one is cancelled where it waits, and its own end does not count.
TEST(TurnTaking, AFailureCancelsTheOtherParty) {
  for (const int failing : {0, 1}) {
    SCOPED_TRACE(failing);
    TurnTaking turns(30s);
    bool cancelled = false;
    const auto run = [&](int party) {
      try {
        if (party == 1) turns.await_first_turn();
        if (party != failing) {
          turns.hand_over(party);
          turns.hand_over(party);
          ADD_FAILURE() << "not cancelled";
        }
        throw std::runtime_error("cause");
      } catch (const TurnCancelled&) {
        cancelled = true;
        turns.fail(party, std::current_exception());
      } catch (const std::exception&) {
        turns.fail(party, std::current_exception());
      }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    EXPECT_TRUE(cancelled);
    EXPECT_EQ(text_of(turns.error()), "cause");
  }
}

// A party that blocks does not block the other one for ever.
TEST(TurnTaking, WaitingHasALimit) {
  TurnTaking turns(20ms);
  std::thread other([&] { EXPECT_THROW(turns.await_first_turn(), StateError); });
  other.join();
  EXPECT_THROW(turns.hand_over(0), TurnCancelled);
  EXPECT_TRUE(has_text(text_of(turns.error()), "one half waits for the other"));
}

}  // namespace turn_taking_test
}  // namespace penstock
