// Full disks, crashes and missing ranks: the last good checkpoint always survives, and the error says why.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>

#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"
#include "tests/checkpoint/file_ranks.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::checkpoint {
namespace checkpoint_fault_test {

using namespace std::chrono_literals;
using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

Spread on_two() {
  std::vector<Placements> placements(sample_tensors().size(), Placements{Shard{0}});
  placements[3] = {Replicate{}};  // the scalar
  return {{2}, placements};
}

// Runs in a separate process and returns the exit code. The process has one thread and ends without cleaning
// up.
int in_process(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    std::fflush(nullptr);
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Crash, BetweenAnyTwoPhasesLeavesAWholeCheckpoint) {
  for (const WritePhase phase : {WritePhase::FolderMade, WritePhase::PartsWritten, WritePhase::Checked,
                                 WritePhase::IndexWritten, WritePhase::Renamed, WritePhase::OldRemoved}) {
    const TemporaryFolder folder;
    WriteOptions options = small_blocks();
    options.keep_last = 1;
    save_alone(folder.path(), 1, options, 1);
    const int code = in_process([&] {
      WriteOptions crashing = options;
      crashing.at_phase = [&](WritePhase now, int) {
        if (now == phase) ::kill(::getpid(), SIGKILL);
      };
      save_alone(folder.path(), 2, crashing, 2);
      return 0;
    });
    ASSERT_EQ(code, -SIGKILL);
    const bool named = phase == WritePhase::Renamed || phase == WritePhase::OldRemoved;
    SingleRankAgreement agreement;
    {
      const auto opened = open_latest(agreement, folder.path());
      ASSERT_TRUE(opened);
      EXPECT_EQ(opened->checkpoint.step(), named ? 2 : 1) << "phase " << static_cast<int>(phase);
      EXPECT_TRUE(is_sample(opened->checkpoint, named ? 2 : 1));
    }
    EXPECT_EQ(clean_leftovers(folder.path()).size(), named ? 0u : 1u);
    save_alone(folder.path(), 3, options, 3);
    EXPECT_EQ(contents_of(folder.path()).size(), 1u) << "the next save succeeds";
  }
}

// A rank that fails anywhere ends the save on all ranks, with its message.
TEST(Failure, OfOneRankFailsAllRanks) {
  for (const int bad : {0, 1})
    for (const WritePhase phase :
         {WritePhase::FolderMade, WritePhase::PartsWritten, WritePhase::Checked, WritePhase::IndexWritten}) {
      if (bad == 1 && (phase == WritePhase::FolderMade || phase == WritePhase::IndexWritten))
        continue;  // only on rank 0
      const TemporaryFolder folder;
      save_alone(folder.path(), 1, small_blocks(), 1);
      WriteOptions options = small_blocks();
      options.at_phase = [&](WritePhase now, int rank) {
        if (now == phase && rank == bad) throw std::runtime_error("struck by lightning");
      };
      const auto errors = errors_on_ranks(
          2, [&](RankAgreement& agreement) { save(agreement, folder.path(), 2, on_two(), options); });
      EXPECT_EQ(errors[0], "rank " + std::to_string(bad) + ": struck by lightning");
      EXPECT_EQ(errors[1], errors[0]);
      EXPECT_EQ(contents_of(folder.path()).size(), 1u) << "the temporary folder is gone";
      SingleRankAgreement agreement;
      EXPECT_TRUE(is_sample(open_latest(agreement, folder.path())->checkpoint, 1));
    }
}

TEST(FullDisk, InTheMiddleOfARanksParts) {
  const TemporaryFolder folder;
  save_alone(folder.path(), 1, small_blocks(), 1);
  WriteOptions options = small_blocks();
  std::atomic<int> writes{0};
  options.fault = [&](const fs::path& path, std::uint64_t offset, std::uint64_t) {
    return path.filename() == "model.safetensors" && offset > 0 && ++writes == 3 ? ENOSPC : 0;
  };
  const auto errors = errors_on_ranks(
      2, [&](RankAgreement& agreement) { save(agreement, folder.path(), 2, on_two(), options); });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_TRUE(has_text(errors[0], "model.safetensors: No space left on device; free space there"));
  EXPECT_TRUE(has_text(errors[0], (folder.path() / ".step-00000002.writing").string()));
  EXPECT_EQ(contents_of(folder.path()).size(), 1u);
  SingleRankAgreement agreement;
  EXPECT_TRUE(is_sample(open_latest(agreement, folder.path())->checkpoint, 1));
}

// A real full disk: a file system of 64 KiB if the user may mount one, else a file size limit.
TEST(FullDisk, AsTheSystemReportsIt) {
  const TemporaryFolder folder;
  const int code = in_process([&] {
    const uid_t user = getuid();
    bool mounted = (user == 0 ? unshare(CLONE_NEWNS) : unshare(CLONE_NEWUSER | CLONE_NEWNS)) == 0;
    mounted = mounted && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
    mounted = mounted && mount("none", folder.path().c_str(), "tmpfs", 0, "size=64k") == 0;
    WriteOptions options = small_blocks();
    save_alone(folder.path(), 1, options, 1);
    if (mounted) {
      // The remaining space is not enough for a second checkpoint.
      int step = 2;
      std::string error;
      options.keep_last = 0;
      while (error.empty() && step < 50) {
        try {
          save_alone(folder.path(), step++, options, 1);
        } catch (const CheckpointError& failure) {
          error = failure.what();
        }
      }
      if (error.find("No space left on device; free space there") == std::string::npos) return 1;
      if (find_checkpoints(folder.path()).size() != static_cast<std::size_t>(step - 2)) return 2;
    } else {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{300, 300};
      setrlimit(RLIMIT_FSIZE, &limit);
      try {
        save_alone(folder.path(), 2, options, 2);
        return 3;
      } catch (const CheckpointError& failure) {
        if (std::string(failure.what()).find("File too large; raise the limit") == std::string::npos)
          return 4;
      }
    }
    for (const auto& entry : fs::directory_iterator(folder.path()))
      if (entry.path().filename().string().front() == '.') return 5;
    SingleRankAgreement agreement;
    return is_sample(open_latest(agreement, folder.path())->checkpoint, 1) ? 0 : 6;
  });
  EXPECT_EQ(code, 0);
}

TEST(Failure, AFolderThatCannotBeCreated) {
  const TemporaryFolder folder;
  write_text(folder.path() / "file", "x");
  EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { save_alone(folder.path() / "file" / "x", 1); }),
                       "Not a directory"));
}

TEST(Failure, StateThatIsNotJson) {
  const TemporaryFolder folder;
  SingleRankAgreement agreement;
  const SavePlan plan = agree_on_plan(agreement, 1, [] { return std::vector<AnnouncedTensor>{}; });
  EXPECT_TRUE(has_text(message_of<CheckpointError>([&] {
                         write_checkpoint(agreement, folder.path(), 1, plan, {}, "{oops", small_blocks());
                       }),
                       "text that is not JSON"));
}

TEST(RankAgreement, AMissingRankIsNamedAtTheDeadline) {
  const auto errors = errors_on_ranks(
      3,
      [&](RankAgreement& agreement) {
        if (agreement.rank() != 1) agreement.agree("plan", [] {});
      },
      2s);
  EXPECT_TRUE(has_text(errors[0], "\"plan\" was not agreed on before the deadline: rank 1 did not join"));
  EXPECT_EQ(errors[1], "");
  EXPECT_EQ(errors[2], errors[0]);
  const auto without_first = errors_on_ranks(
      2,
      [&](RankAgreement& agreement) {
        if (agreement.rank() != 0) agreement.agree("plan", [] {});
      },
      2s);
  EXPECT_TRUE(has_text(without_first[1], "rank 0 did not answer"));
}

// A round that one rank has abandoned ends at once for the others, and the next one succeeds.
TEST(RankAgreement, AnAbandonedRoundIsNoticedAndTheNextSucceeds) {
  Statuses statuses;
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> heard(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      ThreadBoard board(statuses, rank, 2);
      {
        StatusBoardAgreement agreement(board);
        agreement.begin_round(begin + 60s);
        if (rank == 1) agreement.give_up();
        try {
          for (int i = 0; i < 2; ++i) agreement.agree("first", [] {});
        } catch (const CheckpointError& error) {
          heard[static_cast<std::size_t>(rank)] = error.what();
        }
        if (rank == 1) return;
        EXPECT_TRUE(has_text(heard[0], "rank 1 has abandoned it"));
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(has_text(heard[1], "rank 1 abandoned it"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
}

// Whatever the deadline of the round is. The ranks that wait for another one hear whom it misses.
TEST(RankAgreement, ARankThatIsGoneEndsTheRoundAtOnce) {
  Statuses statuses;
  statuses.end(2, "rank 2 was lost: killed");
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> heard(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      ThreadBoard board(statuses, rank, 3);
      StatusBoardAgreement agreement(board);
      agreement.begin_round(begin + 60s);
      try {
        agreement.agree("plan", [] {});
      } catch (const PeerLostError& error) {
        heard[static_cast<std::size_t>(rank)] = std::string("lost: ") + error.what();
        EXPECT_EQ(error.context().lost_rank, 2);
      } catch (const CheckpointError& error) {
        heard[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(
      has_text(heard[0], "lost: rank 2 was lost: killed, while rank 0 waited for its part in a checkpoint"));
  EXPECT_TRUE(has_text(heard[1], "rank 0 has abandoned it while rank 1 was at \"plan\": rank 2 was lost"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
}

TEST(RankAgreement, WhatARankPostedBeforeItEndedCounts) {
  Statuses statuses;
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  std::thread other([&] {
    ThreadBoard board(statuses, 1, 2);
    StatusBoardAgreement agreement(board);
    agreement.begin_round(deadline);
    agreement.agree("plan", [] {});
  });
  while (!statuses.status_of(1)) std::this_thread::sleep_for(1ms);
  statuses.end(1, "rank 1 has left the world");
  ThreadBoard board(statuses, 0, 2);
  StatusBoardAgreement agreement(board);
  agreement.begin_round(deadline);
  EXPECT_NO_THROW(agreement.agree("plan", [] {}));
  other.join();
}

TEST(RankAgreement, RoundsAfterAFailureSucceed) {
  Statuses statuses;
  std::vector<int> good(3, 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      ThreadBoard board(statuses, rank, 3);
      StatusBoardAgreement agreement(board);
      for (int round = 0; round < 20; ++round) {
        agreement.begin_round(std::chrono::steady_clock::now() + 30s);
        const bool fails = round % 2 == 0;
        try {
          const Bytes sum = agreement.agree(
              "count",
              [&] {
                if (fails && rank == round % 3) throw CheckpointError("no");
                return Bytes{static_cast<std::uint8_t>(rank + round)};
              },
              [](const std::vector<Bytes>& results) {
                Bytes total{0};
                for (const Bytes& one : results) total[0] = static_cast<std::uint8_t>(total[0] + one.at(0));
                return total;
              });
          if (!fails && sum == Bytes{static_cast<std::uint8_t>(3 + 3 * round)})
            ++good[static_cast<std::size_t>(rank)];
        } catch (const CheckpointError& error) {
          if (fails && error.what() == "rank " + std::to_string(round % 3) + ": no")
            ++good[static_cast<std::size_t>(rank)];
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, (std::vector<int>{20, 20, 20}));
}

}  // namespace checkpoint_fault_test
}  // namespace penstock::checkpoint
