// require_agreement: equal lines pass, and a difference is the same error on every rank.
#include "penstock/comm/group/agreement.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <set>

#include "penstock/errors.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::comm {
namespace agreement_test {

using namespace std::chrono_literals;
using penstock::test::has_text;
using penstock::test::message_of;

// Returns the message on each rank if rank r passes lines[r].
std::set<std::string> messages(const std::vector<std::vector<std::string>>& lines) {
  std::set<std::string> found;
  std::mutex mutex;
  run_ranks(static_cast<int>(lines.size()), 20s, [&](World& world) {
    const std::string text = message_of<ValueError>([&] {
      require_agreement(world.group(), "things", lines[static_cast<std::size_t>(world.rank())],
                        "use the same");
    });
    // The group has not failed: all ranks took part in every operation.
    at::Tensor one = at::ones({1});
    world.group().all_reduce(one).wait();
    EXPECT_EQ(one.item<float>(), static_cast<float>(lines.size()));
    const std::lock_guard lock(mutex);
    found.insert(text);
  });
  return found;
}

TEST(Agreement, EqualLinesPass) {
  run_ranks(3, 20s, [](World& world) {
    EXPECT_NO_THROW(require_agreement(world.group(), "things", {"a", "b"}, "use the same"));
    EXPECT_NO_THROW(require_agreement(world.group(), "things", {}, "use the same"));
  });
}

TEST(Agreement, TheFirstDifferenceIsTheSameErrorOnEveryRank) {
  const auto found = messages({{"a", "b", "c"}, {"a", "b", "c"}, {"a", "x", "y"}});
  ASSERT_EQ(found.size(), 1U);
  EXPECT_TRUE(has_text(*found.begin(), "things: entry 1 on rank 2"));
  EXPECT_TRUE(has_text(*found.begin(), "x"));
  EXPECT_TRUE(has_text(*found.begin(), "b, as on rank 0"));
}

TEST(Agreement, ALineThatIsMissingDiffers) {
  const auto shorter = messages({{"a", "b"}, {"a"}});
  ASSERT_EQ(shorter.size(), 1U);
  EXPECT_TRUE(has_text(*shorter.begin(), "entry 1 on rank 1"));
  EXPECT_TRUE(has_text(*shorter.begin(), "no entry (there are only 1)"));
  const auto none = messages({{}, {"a"}});
  ASSERT_EQ(none.size(), 1U);
  EXPECT_TRUE(has_text(*none.begin(), "entry 0 on rank 1"));
}

TEST(Agreement, LinesAreNotJoined) {
  EXPECT_EQ(messages({{"ab", "c"}, {"a", "bc"}}).size(), 1U);
  EXPECT_EQ(messages({{"a\nb"}, {"a", "b"}}).size(), 1U);
}

}  // namespace agreement_test
}  // namespace penstock::comm
