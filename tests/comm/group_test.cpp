// Groups over thread worlds: values, checks, errors. Real processes are tested in tests/dist.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/comm/group/group_maker.h"
#include "penstock/comm/group/self_test.h"
#include "penstock/comm/record/recorder.h"
#include "penstock/comm/transport/liveness.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/step_context.h"
#include "penstock/world.h"
#include "tests/comm/late_owner.h"
#include "tests/has_text.h"

namespace penstock::comm {
namespace group_test {

using namespace std::chrono_literals;
using test::has_text;

// Runs every rank, expects every one of them to throw, and returns the messages by rank.
template <class Error>
std::vector<std::string> errors_of(int size, const std::function<void(World&)>& body) {
  std::vector<std::string> messages(static_cast<std::size_t>(size));
  std::mutex mutex;
  run_ranks(size, 60s, [&](World& world) {
    std::string message;
    try {
      body(world);
      message = "no error";
    } catch (const Error& error) {
      message = error.what();
      world.fail(message);
    } catch (const std::exception& error) {
      message = std::string("another type: ") + error.what();
      world.fail(message);
    }
    std::lock_guard lock(mutex);
    messages[static_cast<std::size_t>(world.rank())] = message;
  });
  return messages;
}

class SelfTest : public ::testing::TestWithParam<int> {};

TEST_P(SelfTest, EveryOperationGivesTheRightValues) {
  run_ranks(GetParam(), 120s, [](World& world) {
    Group group = world.group();
    for (const auto& result : self_test(group, at::kCPU))
      EXPECT_TRUE(result.ok) << "rank " << world.rank() << " " << result.operation << ": " << result.error;
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, SelfTest, ::testing::Values(1, 2, 3, 5, 8));

TEST(Group, ReductionsInRankOrderAreBitwiseThoseOfOneProcess) {
  run_ranks(4, 60s, [](World& world) {
    const auto value = [](int rank) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + rank);
      return at::randn({4 * 1001}, generator);
    };
    const at::Tensor out = at::empty({1001});
    world.group().reduce_scatter(out, value(world.rank())).wait();
    at::Tensor sum = value(0).clone();
    for (int rank = 1; rank < 4; ++rank) sum += value(rank);
    EXPECT_TRUE(out.equal(sum.narrow(0, 1001 * world.rank(), 1001)));
  });
}

TEST(Group, HalfSumsRoundOnce) {
  run_ranks(4, 60s, [](World& world) {
    for (const auto type : {at::kBFloat16, at::kHalf})
      for (const std::int64_t count : {64, 100'000}) {
        // 1 + 3 * 0.001 is lost term by term in bfloat16 but not in float32.
        const auto term = [&](int rank) { return at::full({count}, rank == 0 ? 1.0 : 0.003, type); };
        at::Tensor tensor = term(world.rank());
        world.group().all_reduce(tensor).wait();
        at::Tensor expected = term(0).to(at::kFloat);
        for (int rank = 1; rank < 4; ++rank) expected += term(rank).to(at::kFloat);
        EXPECT_TRUE(tensor.equal(expected.to(type))) << c10::toString(type) << " " << count;
      }
  });
}

// As at::amax over the values of all ranks, whichever rank has the NaN.
TEST(Group, ExtremesKeepNaN) {
  run_ranks(3, 60s, [](World& world) {
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
      for (const std::int64_t count : {1, 2, 1000, 100'000})
        for (int holder = 0; holder < 3; ++holder)
          for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max}) {
            at::Tensor tensor = at::full({count}, 1.0 + world.rank(), type);
            if (world.rank() == holder) tensor[count / 2] = std::numeric_limits<double>::quiet_NaN();
            world.group().all_reduce(tensor, op).wait();
            at::Tensor expected = at::full({count}, op == ReduceOp::Min ? 1.0 : 3.0, type);
            expected[count / 2] = std::numeric_limits<double>::quiet_NaN();
            EXPECT_TRUE(at::allclose(tensor.to(at::kFloat), expected.to(at::kFloat), 0, 0, true))
                << c10::toString(type) << " " << count << ", NaN on rank " << holder;
          }
    at::Tensor scalar = at::scalar_tensor(world.rank());
    world.group().all_reduce(scalar, ReduceOp::Max).wait();
    EXPECT_EQ(scalar.item<float>(), 2);
  });
}

// A work that transfers more while it is waited for is not done before that.
TEST(Group, CompositionsAreNotDoneBeforeTheirSteps) {
  run_ranks(2, 60s, [](World& world) {
    const Group group = world.group();
    const at::Tensor large = at::full({100'000}, 1.0, at::kBFloat16), row = at::ones({3}),
                     rows = at::ones({2, 3});
    const std::vector<std::function<Work()>> starts{
        [&] { return group.all_reduce(large.clone(), ReduceOp::Max); },
        [&] {
          return group.all_reduce_coalesced({row.clone(), large.clone()});
        },
        [&] {
          return group.all_gather_coalesced({at::empty({2, 3})}, {row});
        },
        [&] { return group.reduce_scatter_coalesced({at::empty({3})}, {rows}); },
    };
    at::Tensor signal = at::zeros({1});
    for (std::size_t i = 0; i < starts.size(); ++i) {
      // The other rank has started, but takes part in the steps only after the signal.
      Work work = starts[i]();
      if (world.rank() == 0) {
        for (const auto end = std::chrono::steady_clock::now() + 100ms;
             std::chrono::steady_clock::now() < end;)
          if (work.done()) {
            ADD_FAILURE() << "operation " << i << " is done before the other rank has finished its part";
            break;
          }
        group.send(signal, 1);
      } else {
        group.recv(signal, 0);
      }
      work.wait();
      EXPECT_TRUE(work.done());
    }
  });
}

TEST(Group, StridedTensorsAndOtherTypes) {
  run_ranks(2, 60s, [](World& world) {
    const float own = static_cast<float>(world.rank() + 1);
    at::Tensor columns = at::full({4, 6}, own).t();
    world.group().all_reduce(columns).wait();
    EXPECT_TRUE(columns.equal(at::full({6, 4}, 3.0f)));
    at::Tensor flags = at::tensor({world.rank() == 0 ? 1 : 0, 1}).to(at::kBool);
    world.group().all_reduce(flags, ReduceOp::Min).wait();
    EXPECT_TRUE(flags.equal(at::tensor({0, 1}).to(at::kBool)));
    at::Tensor shorts = at::full({3}, world.rank() + 1, at::kShort);
    world.group().all_reduce(shorts).wait();
    EXPECT_TRUE(shorts.equal(at::full({3}, 3, at::kShort)));
    at::Tensor numbers = at::complex(at::full({2}, own), at::full({2}, -own));
    world.group().all_reduce(numbers, ReduceOp::Avg).wait();
    EXPECT_TRUE(at::real(numbers).equal(at::full({2}, 1.5f)));
    at::Tensor scalar = at::scalar_tensor(own);
    world.group().all_reduce(scalar).wait();
    EXPECT_EQ(scalar.item<float>(), 3.0f);
    at::Tensor none = at::empty({0});
    world.group().all_reduce(none).wait();
    // A receive into a column of a matrix.
    at::Tensor matrix = at::zeros({5, 3});
    if (world.rank() == 0) {
      world.group().send(at::arange(5.0), 1);
    } else {
      world.group().recv(matrix.select(1, 2).to(at::kFloat), 0, {.timeout = 10s});
      matrix = at::zeros({5, 3});
    }
    if (world.rank() == 1) {
      world.group().send(at::arange(5.0), 0);
    } else {
      const at::Tensor column = matrix.select(1, 2);
      world.group().recv(column, 1);
      EXPECT_TRUE(matrix.select(1, 2).equal(at::arange(5.0)));
      EXPECT_EQ(matrix.sum().item<float>(), 10.0f);
    }
  });
}

TEST(Group, TagsMatchInAnyOrderAndEqualTagsInOrder) {
  run_ranks(2, 60s, [](World& world) {
    Group group = world.group();
    if (world.rank() == 0) {
      std::vector<Work> works;
      for (int i = 0; i < 6; ++i)
        works.push_back(group.isend(at::full({i < 3 ? 10 : 50'000}, i), 1, {.tag = i % 3}));
      wait_all(works);
    } else {
      std::vector<at::Tensor> got(6);
      for (const int i : {2, 5, 0, 1, 3, 4}) {
        got[static_cast<std::size_t>(i)] = at::zeros({i < 3 ? 10 : 50'000}, at::kLong);
        group.recv(got[static_cast<std::size_t>(i)], 0, {.tag = i % 3});
      }
      for (int i = 0; i < 6; ++i)
        EXPECT_TRUE((got[static_cast<std::size_t>(i)] == i).all().item<bool>()) << i;
    }
  });
}

struct Mismatch {
  const char* name;
  at::ScalarType sent_type;
  std::int64_t sent;
  at::ScalarType expected_type;
  std::int64_t expected;
};

class MismatchTest : public ::testing::TestWithParam<Mismatch> {};

TEST_P(MismatchTest, IsAnErrorOnBothSidesThatNamesBoth) {
  const Mismatch& c = GetParam();
  std::vector<std::string> messages(2);
  EXPECT_THROW(run_ranks(2, 30s,
                         [&](World& world) {
                           try {
                             if (world.rank() == 0) {
                               world.group().send(at::zeros({c.sent}, c.sent_type), 1,
                                                  {.tag = 7, .label = "2F0"});
                               // A short message may be sent before the other side reports the error: the
                               // next one fails.
                               world.group().recv(at::zeros({1}), 1, {.tag = 8});
                             } else {
                               world.group().recv(at::zeros({c.expected}, c.expected_type), 0,
                                                  {.tag = 7, .label = "2F0"});
                             }
                           } catch (const std::exception& error) {
                             messages[static_cast<std::size_t>(world.rank())] = error.what();
                             throw;
                           }
                         }),
               std::exception);
  for (const auto& message : messages) {
    EXPECT_TRUE(has_text(message, "rank 0 sent"));
    EXPECT_TRUE(has_text(message, "rank 1 expected"));
    EXPECT_TRUE(has_text(message, "2F0"));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, MismatchTest,
                         ::testing::Values(Mismatch{"shorter", at::kFloat, 4, at::kFloat, 8},
                                           Mismatch{"longer", at::kFloat, 8, at::kFloat, 4},
                                           Mismatch{"dtype", at::kFloat, 8, at::kInt, 8},
                                           Mismatch{"largeForSmall", at::kFloat, 100'000, at::kFloat, 8},
                                           Mismatch{"smallForLarge", at::kFloat, 8, at::kFloat, 100'000},
                                           Mismatch{"largeShorter", at::kFloat, 50'000, at::kFloat, 100'000},
                                           Mismatch{"empty", at::kFloat, 0, at::kFloat, 1}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Group, SubgroupsAreMadeInOrderAndKeepGlobalRanks) {
  run_ranks(4, 60s, [](World& world) {
    Group odd = world.new_group({3, 1}, {.name = "odd"});
    Group even = world.new_group({0, 2}, {.name = "even"});
    Group mine = world.rank() % 2 == 1 ? odd : even;
    Group other = world.rank() % 2 == 1 ? even : odd;
    EXPECT_TRUE(mine.is_member());
    EXPECT_FALSE(other.is_member());
    EXPECT_THROW(other.barrier().wait(), StateError);
    at::Tensor sum = at::full({1}, world.rank());
    mine.all_reduce(sum).wait();
    EXPECT_EQ(sum.item<std::int64_t>(), world.rank() % 2 == 1 ? 4 : 2);
    if (world.rank() == 3) {
      EXPECT_EQ(odd.axis_rank(), 0);
    }
    at::Tensor from_three = at::full({1}, world.rank());
    if (odd.is_member()) {
      odd.broadcast(from_three, 3).wait();
      EXPECT_EQ(from_three.item<std::int64_t>(), 3);
      EXPECT_THROW(odd.broadcast(from_three, 0).wait(), ValueError);
      EXPECT_THROW(odd.send(from_three, 2), ValueError);
      EXPECT_THROW(odd.send(from_three, world.rank()), ValueError);
      EXPECT_THROW(odd.send(from_three, 1, {.tag = -1}), ValueError);
    }
    world.group().barrier().wait();
  });
}

TEST(Group, ListsThatDifferOrAreBadAreAnErrorOnEveryRank) {
  for (const auto& message : errors_of<ValueError>(3, [](World& world) {
         world.new_group(world.rank() == 2 ? std::vector<int>{0, 2} : std::vector<int>{0, 1});
       })) {
    EXPECT_TRUE(has_text(message, "rank 0 requested"));
    EXPECT_TRUE(has_text(message, "rank 2 requested"));
  }
  for (const auto& message : errors_of<ValueError>(3, [](World& world) { world.new_group({0, 1, 1}); }))
    EXPECT_TRUE(has_text(message, "rank 1 is listed twice"));
  for (const auto& message : errors_of<ValueError>(3, [](World& world) { world.new_group({0, 3}); }))
    EXPECT_TRUE(has_text(message, "rank 3 is outside the world of 3"));
  for (const auto& message : errors_of<ValueError>(2, [](World& world) { world.new_group({}); }))
    EXPECT_TRUE(has_text(message, "empty"));
}

TEST(Group, AMissingRankIsNamedOnEveryOther) {
  const auto messages = errors_of<TimeoutError>(3, [](World& world) {
    if (world.rank() == 1) {
      std::this_thread::sleep_for(9s);
      throw TimeoutError("stayed away", {});
    }
    world.new_group({0, 1, 2}, {.timeout = 3s});
  });
  EXPECT_TRUE(has_text(messages[0], "rank 1 of 3 did not join"));
  EXPECT_TRUE(has_text(messages[2], "rank 1 of 3 did not join"));
}

TEST(Group, TimeoutNamesTheMissingRankAndEndsTheGroup) {
  std::string on_rank0;
  try {
    run_ranks(2, 60s, [&](World& world) {
      if (world.rank() == 1) {
        std::this_thread::sleep_for(4s);
        return;
      }
      Group small = world.group();
      at::Tensor tensor = at::ones({4});
      try {
        small.all_reduce(tensor, ReduceOp::Sum, {.label = "step 3", .timeout = 500ms}).wait();
      } catch (const TimeoutError& error) {
        on_rank0 = error.what();
        EXPECT_EQ(error.context().label, "step 3");
        EXPECT_THROW(small.barrier().wait(), TimeoutError) << "the first error must be kept";
        throw;
      }
    });
    FAIL() << "no error";
  } catch (const TimeoutError&) {
  }
  EXPECT_TRUE(has_text(on_rank0, "no status from rank 1"));
  EXPECT_TRUE(has_text(on_rank0, "recorder-rank"));
}

// What ranks 0 and 1 say when rank 2 stops while their group is made; `stage`: the last one that it reached.
std::vector<std::string> errors_without_rank_2(std::chrono::milliseconds timeout, const std::string& stage) {
  const Store store = Store::in_process();
  if (!stage.empty()) {
    const Store place = store.with_prefix("key/gloo0");
    place.set(stage + "/2", "1");
    place.add(stage, 1);
  }
  std::vector<std::string> errors(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      const auto core = test::lone_core();
      core->env.rank = rank;
      core->env.world_size = 3;
      core->store = store;
      core->liveness = std::make_shared<Liveness>(3);
      core->liveness->note_silence(2, Clock::now() - 8s);
      try {
        make_group(core, {.name = "late", .key = "key", .ranks = {0, 1, 2}, .timeout = timeout},
                   Clock::now() + timeout);
      } catch (const TimeoutError& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  return errors;
}

TEST(Group, AMemberThatStopsWhileAGroupIsMadeIsNamed) {
  for (const std::string& error : errors_without_rank_2(1s, ""))
    EXPECT_TRUE(has_text(error, "rank 2 to begin to connect: nothing was heard from rank 2 for "));
  for (const std::string& error : errors_without_rank_2(5s, "begin to connect"))
    EXPECT_TRUE(has_text(error, "rank 2 to connect: nothing was heard from rank 2 for "));
}

TEST(Group, OneRanksFailureEndsTheWaitsOfAll) {
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> told = 0;
  EXPECT_THROW(run_ranks(4, 60s,
                         [&](World& world) {
                           if (world.rank() == 2) throw ConfigError("bad layer");
                           try {
                             if (world.rank() == 0) {
                               at::Tensor tensor = at::ones({1 << 20});
                               world.group().all_reduce(tensor).wait();
                             } else {
                               world.group().recv(at::zeros({3}), 2);
                             }
                           } catch (const PeerLostError& error) {
                             EXPECT_TRUE(has_text(error.what(), "rank 2 failed: bad layer"));
                             EXPECT_EQ(error.context().lost_rank, 2);
                             EXPECT_NE(dynamic_cast<const PeerFailedError*>(&error), nullptr);
                             ++told;
                             throw;
                           }
                         }),
               ConfigError);
  EXPECT_EQ(told, 3);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

TEST(Group, WrongArgumentsSayWhatToChange) {
  run_ranks(2, 60s, [](World& world) {
    Group group = world.group();
    const auto message = [](auto call) {
      try {
        call();
      } catch (const ValueError& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    EXPECT_TRUE(
        has_text(message([&] { group.all_gather(at::zeros({5}), at::zeros({3})).wait(); }), "2 x 3 = 6"));
    EXPECT_TRUE(has_text(message([&] { group.all_gather(at::zeros({6}, at::kInt), at::zeros({3})).wait(); }),
                         "dtype"));
    EXPECT_TRUE(has_text(message([&] { group.reduce_scatter(at::zeros({5}), at::zeros({3})).wait(); }),
                         "elements of input"));
    EXPECT_TRUE(has_text(message([&] { group.all_reduce(at::zeros({5}, at::kLong), ReduceOp::Avg).wait(); }),
                         "floating point"));
    EXPECT_TRUE(
        has_text(message([&] { group.all_reduce(at::zeros({5}, at::kBool)).wait(); }), "max for 'any'"));
    EXPECT_TRUE(
        has_text(message([&] { group.all_to_all(at::zeros({3}), at::zeros({3})).wait(); }), "multiple of 2"));
    EXPECT_TRUE(has_text(message([&] {
                           group.all_to_all(at::zeros({4}), at::zeros({4}), {1, 2}, {2, 2}).wait();
                         }),
                         "sum of the splits"));
    EXPECT_TRUE(has_text(message([&] {
                           group
                               .all_to_all(at::zeros({4}), at::zeros({4}),
                                           world.rank() == 0 ? std::vector<std::int64_t>{1, 3}
                                                             : std::vector<std::int64_t>{3, 1},
                                           {2, 2})
                               .wait();
                         }),
                         "rows kept"));
    EXPECT_TRUE(has_text(message([&] { group.all_gather_uneven({at::zeros({1})}, at::zeros({1})).wait(); }),
                         "one per member"));
    for (const int position : {-1, 2})
      EXPECT_TRUE(has_text(message([&] { group.rank_at(position); }),
                           fmt::format("got {}, expected 0 to 1", position)));
    EXPECT_EQ(group.rank_at(1), 1);
    EXPECT_THROW(group.send(at::Tensor(), 1 - world.rank()), TypeError);
    group.barrier().wait();  // still usable: nothing was transferred
  });
}

TEST(Group, SplitsThatDisagreeAreAnErrorNotWrongData) {
  EXPECT_THROW(run_ranks(2, 30s,
                         [](World& world) {
                           // Rank 0 expects two rows from rank 1, which sends one.
                           const std::vector<std::int64_t> splits = world.rank() == 0
                                                                        ? std::vector<std::int64_t>{2, 2}
                                                                        : std::vector<std::int64_t>{1, 3};
                           at::Tensor out = at::zeros({4, 3});
                           world.group().all_to_all(out, at::ones({4, 3}), splits, splits).wait();
                         }),
               MismatchError);
}

TEST(Group, DetailLevelComparesCollectivesBeforeTheyMove) {
  setenv("PENSTOCK_DEBUG", "detail", 1);
  const auto messages = errors_of<MismatchError>(2, [](World& world) {
    at::Tensor tensor = at::zeros({world.rank() == 0 ? 4 : 5});
    world.group().all_reduce(tensor).wait();
  });
  unsetenv("PENSTOCK_DEBUG");
  for (const auto& message : messages) {
    EXPECT_TRUE(has_text(message, "rank 0: all_reduce Float[4] sum"));
    EXPECT_TRUE(has_text(message, "rank 1: all_reduce Float[5] sum"));
  }
}

TEST(Group, DroppedWorkIsKeptAliveAndWarnedAbout) {
  WarningCapture capture;
  run_ranks(2, 60s, [](World& world) {
    if (world.rank() == 0) {
      { const Work dropped = world.group().isend(at::full({100'000}, 3.0f), 1); }
      world.group().barrier().wait();
    } else {
      at::Tensor got = at::zeros({100'000});
      world.group().recv(got, 0);
      EXPECT_TRUE((got == 3.0f).all().item<bool>());
      world.group().barrier().wait();
    }
  });
  ASSERT_EQ(capture.warnings().size(), 1u);
  EXPECT_TRUE(has_text(capture.warnings()[0].message, "dropped without wait()"));
}

// Returns the number of threads of this process with this scheduling policy.
int threads_under(int policy) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    if (sched_getscheduler(std::stoi(entry.path().filename())) == policy) ++count;
  return count;
}

// Whether at most so many are left soon: a thread that was joined is listed until the kernel has removed it.
bool comes_to(int policy, int most) {
  for (int i = 0; i < 2000; ++i) {
    if (threads_under(policy) <= most) return true;
    std::this_thread::sleep_for(5ms);
  }
  return false;
}

TEST(Group, OneBatchThreadServesTheSocketsOfAllGroups) {
  ASSERT_EQ(sched_getscheduler(0), SCHED_OTHER);
  ASSERT_TRUE(comes_to(SCHED_BATCH, 1));
  const int before = threads_under(SCHED_BATCH);  // failed groups and their thread live until exit
  std::atomic<int> most = 0;
  run_ranks(3, 60s, [&](World& world) {
    const Group pair = world.new_group({0, 1}), all = world.new_group({0, 1, 2});
    at::Tensor sum = torch::ones({2});
    all.all_reduce(sum).wait();
    EXPECT_EQ(sched_getscheduler(0), SCHED_OTHER);
    most = std::max(most.load(), threads_under(SCHED_BATCH));
    all.barrier().wait();
  });
  EXPECT_EQ(most, 1);
  EXPECT_TRUE(comes_to(SCHED_BATCH, before));  // ended with the last group
}

TEST(Group, TensorsWhoseMemoryIsNotTheirValuesAreRefused) {
  run_ranks(2, 30s, [](World& world) {
    const Group& group = world.group();
    const int peer = 1 - world.rank();
    const at::Tensor lazy = torch::ones({2}, at::kComplexFloat).conj(), fake = make_fake({2});
    EXPECT_THROW((void)group.isend(lazy, peer), ValueError);
    EXPECT_THROW((void)group.isend(fake, peer), TypeError);
    EXPECT_THROW((void)group.irecv(at::Tensor(), peer), TypeError);
    EXPECT_THROW((void)group.all_reduce(fake), TypeError);
    EXPECT_THROW((void)group.all_reduce(lazy), ValueError);
    EXPECT_THROW((void)group.all_gather(torch::empty({4}, at::kComplexFloat), lazy), ValueError);
    EXPECT_THROW((void)group.broadcast(torch::ones({2}).to_sparse(), 0), TypeError);
    at::Tensor sum = torch::ones({2});
    group.all_reduce(sum).wait();  // the group is still usable
    EXPECT_TRUE(at::equal(sum, torch::full({2}, 2.0)));
  });
}

TEST(Group, AnEmptyBatchDoesNothing) {
  run_ranks(2, 60s, [](World& world) { EXPECT_TRUE(world.group().batch_isend_irecv({}).empty()); });
}

TEST(Group, RecordsWhatItMoves) {
  Recorder::global().reset_totals();
  run_ranks(2, 60s, [](World& world) {
    at::Tensor tensor = at::ones({256});
    world.group().all_reduce(tensor, ReduceOp::Sum, {.label = "norms"}).wait();
  });
  const auto totals = Recorder::global().totals();
  EXPECT_EQ(totals.at("all_reduce").operations, 2u);
  EXPECT_EQ(totals.at("all_reduce").bytes, 2048u);
  const auto entries = Recorder::global().snapshot();
  EXPECT_EQ(entries.back().label.view(), "norms");
  EXPECT_EQ(entries.back().state, OperationState::Done);
}

TEST(FakeWorld, AnyRankAndSizeWithoutPeers) {
  World world = World::fake(3, 1024);
  EXPECT_EQ(world.rank(), 3);
  EXPECT_EQ(world.group().size(), 1024);
  at::Tensor tensor = at::ones({4});
  world.group().all_reduce(tensor).wait();
  const at::Tensor whole = at::zeros({1024, 2});
  world.group().all_gather(whole, at::full({2}, 5.0f)).wait();
  EXPECT_TRUE((whole == 5.0f).all().item<bool>());
  world.group().send(tensor, 7);
  world.group().recv(tensor, 9);
  Group half = world.new_group({1, 3, 5});
  EXPECT_EQ(half.axis_rank(), 1);
  EXPECT_FALSE(world.new_group({1, 5}).is_member());
  EXPECT_THROW(world.new_group({1, 1}), ValueError);
  EXPECT_THROW(World::fake(4, 4), ValueError);
}

// One rank times out long before another one that also waits: only the rank that does not wait is reported as
// silent.
TEST(Group, ARankThatStillWaitsIsNotSilent) {
  std::string said;
  const auto body = [&](World& world) {
    at::Tensor tensor = at::ones({8});
    // A long wait that succeeds leaves nothing behind.
    if (world.rank() == 2) std::this_thread::sleep_for(1s);
    world.group().all_reduce(tensor, ReduceOp::Sum, {.label = "earlier", .timeout = 3s}).wait();
    if (world.rank() == 1) {
      std::this_thread::sleep_for(5s);
      return;
    }
    try {
      world.group()
          .all_reduce(tensor, ReduceOp::Sum, {.label = "later", .timeout = world.rank() == 0 ? 3s : 6s})
          .wait();
    } catch (const TimeoutError& error) {
      if (world.rank() == 0) said = error.what();
      throw;
    }
  };
  EXPECT_THROW(run_ranks(3, 30s, body), TimeoutError);
  EXPECT_NE(said.find("no status from rank 1 ("), std::string::npos) << said;
  EXPECT_NE(said.find("rank 2 is in all_reduce \"later\""), std::string::npos) << said;
}

// One rank alone calls all operations; no other rank answers.
TEST(Group, CommunicatesNothingInATrialRun) {
  run_ranks(2, 20s, [](World& world) {
    const Group group = world.group();
    if (world.rank() == 0) {
      StepContext context;
      context.trial = true;
      const StepGuard guard(context);
      for (const bool fake : {false, true}) {
        const auto full = [&](std::int64_t rows) {
          return fake ? make_fake({rows, 3}) : at::full({rows, 3}, 5.0);
        };
        const auto expect_value = [&](const at::Tensor& tensor, double value) {
          EXPECT_TRUE(fake || tensor.eq(value).all().item<bool>());
        };
        const at::Tensor sum = full(2), sent = full(2), all = full(4), part = full(1), got = full(2),
                         exchanged = full(2);
        const std::vector<at::Tensor> uneven = {full(2), full(1)};
        group.all_reduce(sum).wait();
        group.broadcast(sum, 1).wait();
        group.all_gather(all, sent).wait();
        group.all_gather_uneven(uneven, sent).wait();
        group.reduce_scatter(part, sent).wait();
        group.all_to_all(exchanged, sent).wait();
        group.send(sent, 1);
        group.recv(got, 1);
        std::vector<Work> works = group.batch_isend_irecv({P2POp::send(sent, 1), P2POp::recv(got, 1)});
        wait_all(works);
        group.barrier().wait();
        expect_value(sum, 5.0);
        expect_value(sent, 5.0);
        for (const at::Tensor& received : {all, uneven[0], uneven[1], part, exchanged, got})
          expect_value(received, 0.0);
      }
    }
    at::Tensor one = at::ones({1});
    group.all_reduce(one).wait();
    EXPECT_EQ(one.item<float>(), 2);
  });
}

TEST(RunRanks, ABodyThatHangsInCommunicationIsEnded) {
  EXPECT_THROW(run_ranks(2, 1s,
                         [](World& world) {
                           if (world.rank() == 0) world.group().recv(at::zeros({1}), 1, {.timeout = 60s});
                           std::this_thread::sleep_for(2s);
                         }),
               CommError);
}

}  // namespace group_test
}  // namespace penstock::comm
