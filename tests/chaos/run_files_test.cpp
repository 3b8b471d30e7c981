// What the fault campaign reads from a run, and what it damages.
#include "tests/chaos/run_files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "penstock/base/files.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace run_files_test {

namespace fs = std::filesystem;
using chaos::Damage;

class RunFolder : public ::testing::Test {
 protected:
  void metrics(const std::string& text) const { std::ofstream(folder.path / "metrics.jsonl") << text; }
  TemporaryFolder folder;
};

TEST_F(RunFolder, TheLaterOfTwoLossesCountsAndAnIncompleteLineDoesNot) {
  EXPECT_EQ(chaos::read_progress(folder.path).last_step, 0) << "no file";
  metrics(R"({"type":"start","first_step":0}
{"type":"step","step":1,"loss":5.5}
{"type":"step","step":2,"loss":5.25}
{"type":"checkpoint","step":1}
{"type":"step","step":3,"loss":4.0}
{"type":"start","first_step":1}
{"type":"step","step":2,"loss":5.125}
{"type":"step","step":4,"lo)");
  const chaos::RunProgress progress = chaos::read_progress(folder.path);
  EXPECT_EQ(progress.losses, (chaos::Losses{{1, 5.5}, {2, 5.125}})) << "step 3 is repeated";
  EXPECT_EQ(progress.continued_after, 1);
  EXPECT_EQ(progress.last_step, 2);
}

TEST_F(RunFolder, ALossThatIsNotFiniteIsNoLoss) {
  metrics("{\"type\":\"step\",\"step\":1,\"loss\":null}\n");
  EXPECT_TRUE(chaos::read_progress(folder.path).losses.empty());
}

class CheckpointFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"step-00000004", "step-00000008", ".step-00000012.writing"}) {
      fs::create_directories(folder.path / name);
      for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json", "index.json"})
        std::ofstream(folder.path / name / file) << std::string(500, 'm') << name << file;
    }
    std::ofstream(folder.path / ".writer").flush();
  }
  TemporaryFolder folder;
};

TEST_F(CheckpointFolder, CompleteOnesAreCompared) {
  const chaos::Checkpoints before = chaos::read_checkpoints(folder.path);
  ASSERT_EQ(before.size(), 2u);
  EXPECT_EQ(chaos::step_of(before.rbegin()->first), 8);
  EXPECT_TRUE(chaos::lost_checkpoints(before, before).empty());
  EXPECT_EQ(chaos::unfinished_saves(folder.path), (std::vector<std::string>{".step-00000012.writing"}));
  remove_tree(folder.path / "step-00000004");
  std::ofstream(folder.path / "step-00000008" / "state.json") << "another";
  const auto lost = chaos::lost_checkpoints(before, chaos::read_checkpoints(folder.path));
  ASSERT_EQ(lost.size(), 2u);
  EXPECT_EQ(lost[0], "step-00000004 is gone");
  EXPECT_TRUE(has_text(lost[1], "changed: state.json"));
}

TEST_F(CheckpointFolder, EveryDamageChangesTheFileThatItNames) {
  std::set<std::string> files;
  for (const Damage damage : {Damage::FlippedByte, Damage::Truncated, Damage::MissingFile, Damage::EmptyFile})
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      const fs::path copy = folder.path / fmt::format("copy-{}-{}", static_cast<int>(damage), seed);
      fs::create_directory(copy);
      for (const auto& entry : fs::directory_iterator(folder.path / "step-00000008"))
        fs::copy(entry.path(), copy / entry.path().filename());
      const FolderState before = state_of(copy, false);
      const std::string file = chaos::damage_checkpoint(copy, damage, seed);
      files.insert(file);
      const std::string kind = damage == Damage::MissingFile ? "gone: " : "changed: ";
      EXPECT_EQ(difference(before, state_of(copy, false)), kind + file + "\n");
    }
  EXPECT_EQ(files.size(), 4u) << "not every file is ever damaged";
}

}  // namespace run_files_test
}  // namespace penstock::test
