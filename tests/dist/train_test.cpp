// `penstock train` as users run it: real ranks, real signals, real deaths.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace train_test {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

class Train : public ::testing::Test {
 protected:
  void SetUp() override { write_text(folder); }

  static void write_text(const ScratchFolder& folder) {
    for (int file = 0; file < 12; ++file) {
      std::string text;
      for (int line = 0; line < 30; ++line)
        text += fmt::format("int value_{} = {};\n", file * line % 7, file + line);
      folder.write(fmt::format("text/{}.h", file), text);
    }
  }

  // Settings common to all runs of these tests; `name` is the folder.
  std::string flags(const std::string& name, int steps = kFew) const { return flags(folder, name, steps); }
  static std::string flags(const ScratchFolder& folder, const std::string& name, int steps) {
    return fmt::format(
        "--data '{}' --run_folder '{}' --preset tiny --width 32 --layers 4 --heads 2 --key_value_heads 2 "
        "--feed_width 64 "
        "--context 32 --microbatches 4 --microbatch_size 2 --steps {} --warmup_steps 2 --validate_every 6 "
        "--validate_batches 1 --validation_fraction 0.2 --checkpoint.every 2 --sample_tokens 16 --progress "
        "lines --device cpu",
        (folder / "text").string(), (folder / name).string(), steps);
  }
  static std::string penstock() { return "'" + environment("PENSTOCK_BIN") + "/penstock'"; }
  Ended train(const std::string& name, const std::string& more = "", int steps = kFew) const {
    return run_command(fmt::format("{} train {} {}", penstock(), flags(name, steps), more), 120s);
  }

  static constexpr int kFew = 12;
  // Enough steps to interrupt a run in the middle.
  static constexpr int kMany = 80;

  // The losses of a run of `steps` steps that nothing disturbs; trained once for all tests.
  static const std::map<int, double>& undisturbed_losses(int steps) {
    static std::map<int, std::map<int, double>> known;
    std::map<int, double>& result = known[steps];
    if (result.empty()) {
      const ScratchFolder folder;
      write_text(folder);
      const Ended ended =
          run_command(fmt::format("{} train {}", penstock(), flags(folder, "whole", steps)), 120s);
      EXPECT_EQ(ended.exit_code, 0) << ended.output;
      result = losses(folder, "whole");
      EXPECT_EQ(result.size(), static_cast<std::size_t>(steps));
    }
    return result;
  }

  // Maps step to loss, exactly; for a step that ran twice, the later value.
  std::map<int, double> losses(const std::string& name) const { return losses(folder, name); }
  static std::map<int, double> losses(const ScratchFolder& folder, const std::string& name) {
    std::map<int, double> result;
    std::ifstream file(folder / name / "metrics.jsonl");
    for (std::string line; std::getline(file, line);)
      if (const auto entry = nlohmann::json::parse(line); entry.at("type") == "step")
        result[entry.at("step")] = entry.at("loss");
    return result;
  }

  // A shell command that waits until the run has done `step` steps, for at most 60 s.
  std::string wait_for_step(const std::string& name, int step) const {
    return fmt::format(
        "for i in $(seq 3000); do grep -q '\"step\":{}[,}}]' '{}' 2>/dev/null && break; sleep 0.02; done",
        step, (folder / name / "metrics.jsonl").string());
  }

  ScratchFolder folder;
};

TEST_F(Train, RunsToTheEndAndLeavesEverything) {
  const Ended ended = train("run");
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  for (const char* left :
       {"config.toml", "metrics.jsonl", "data", "checkpoints/step-00000012/model.safetensors", "report.html"})
    EXPECT_TRUE(fs::exists(folder / "run" / left)) << left;
  EXPECT_FALSE(fs::exists(folder / "run" / "checkpoints" / "step-00000002"))
      << "only the last checkpoints are kept";
  EXPECT_TRUE(has_text(ended.output, "#include <")) << "a sample";
  const auto seen = losses("run");
  ASSERT_EQ(seen.size(), 12u);
  EXPECT_LT(seen.at(12), seen.at(1));
  // Again: there is nothing left to do.
  const Ended again = train("run");
  EXPECT_EQ(again.exit_code, 0) << again.output;
  EXPECT_EQ(losses("run"), seen);
}

// One rank dies; all restart from the last checkpoint and reach the losses of an undisturbed run, bit for
// bit.
TEST_F(Train, AKilledRankCostsNothing) {
  const Ended ended = run_command(
      fmt::format("{} train {} --restarts 2 & run=$!; {}; pkill -KILL -n -f 'train --[w]orker {}'; wait $run",
                  penstock(), flags("killed", kMany), wait_for_step("killed", 5),
                  (folder / "killed").string()),
      150s);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(losses("killed"), undisturbed_losses(kMany));
  EXPECT_TRUE(has_text(ended.output, "continues after step")) << ended.output;
}

TEST_F(Train, SigtermSavesAndEndsWell) {
  const Ended ended =
      run_command(fmt::format("{} train {} & run=$!; {}; kill -TERM $run; wait $run", penstock(),
                              flags("stopped", 100'000), wait_for_step("stopped", 3)),
                  120s);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  const auto seen = losses("stopped");
  ASSERT_FALSE(seen.empty());
  EXPECT_TRUE(
      fs::exists(folder / "stopped" / "checkpoints" / fmt::format("step-{:08}", seen.rbegin()->first)))
      << ended.output;
}

// Stopped under one layout, continued under another: pipelines produce the same bits.
TEST_F(Train, ContinuesUnderAnotherLayout) {
  const Ended begun = run_command(fmt::format("{} train {} & run=$!; {}; kill -TERM $run; wait $run",
                                              penstock(), flags("moved", kMany), wait_for_step("moved", 5)),
                                  120s);
  ASSERT_EQ(begun.exit_code, 0) << begun.output;
  ASSERT_LT(losses("moved").size(), static_cast<std::size_t>(kMany)) << "it ended before it could be stopped";
  const Ended ended = train("moved", "--pp 4 --schedule GPipe", kMany);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(losses("moved"), undisturbed_losses(kMany));
}

TEST_F(Train, MpirunGivesTheSameLosses) {
  ASSERT_EQ(run_command("command -v mpirun").exit_code, 0)
      << "mpirun is one of the packages the bootstrap installs";
  const Ended ended = run_command(
      fmt::format(
          "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n 2 {} train {}",
          penstock(), flags("mpi")),
      120s);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(losses("mpi"), undisturbed_losses(kFew));
}

TEST_F(Train, DamageIsNamedAndThePreviousCheckpointIsUsedIfAllowed) {
  ASSERT_EQ(train("run", "", 8).exit_code, 0);
  const fs::path file = folder / "run" / "checkpoints" / "step-00000008" / "model.safetensors";
  std::vector<std::uint8_t> bytes = read_bytes(file);
  bytes[bytes.size() / 2] ^= 1;
  write_bytes(file, bytes);
  const Ended refused = train("run", "--fallback false");
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_TRUE(has_text(refused.output, "model.safetensors")) << refused.output;
  const Ended used = train("run");
  EXPECT_EQ(used.exit_code, 0) << used.output;
  EXPECT_TRUE(has_text(used.output, "continues after step 6")) << used.output;
}

TEST_F(Train, MistakesSayWhatToChange) {
  const Ended key = train("bad", "--learning_rat 1");
  EXPECT_EQ(key.exit_code, 2);
  const Ended layout = train("bad", "--tp 3");
  EXPECT_EQ(layout.exit_code, 2);
  EXPECT_TRUE(has_text(layout.output, "heads")) << layout.output;
  const Ended data = run_command(
      fmt::format("{} train --data /nowhere --run_folder '{}'", penstock(), (folder / "bad").string()));
  EXPECT_NE(data.exit_code, 0);
  EXPECT_TRUE(has_text(data.output, "/nowhere")) << data.output;
}

}  // namespace train_test
}  // namespace penstock::test
