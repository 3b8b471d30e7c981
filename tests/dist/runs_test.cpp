// Run folders: starts that are refused, and runs that continue, move, are copied, or run out of disk space.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

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
#include "tests/train/folder_state.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace runs_test {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

std::string penstock() { return "'" + environment("PENSTOCK_BIN") + "/penstock'"; }

class Runs : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"text", "other"})
      for (int file = 0; file < 12; ++file) {
        std::string text;
        for (int line = 0; line < 30; ++line)
          text += fmt::format("int {}_{} = {};\n", name, file * line % 7, file + line);
        folder.write(fmt::format("{}/{}.h", name, file), text);
      }
  }

  std::string flags(const std::string& name, int steps) const {
    return fmt::format(
        "--data '{}' --run_folder '{}' --pp 2 --preset tiny --width 32 --layers 4 --heads 2 "
        "--key_value_heads 2 "
        "--feed_width 64 --context 32 --microbatches 4 --microbatch_size 2 --steps {} --warmup_steps 2 "
        "--validate_every 0 --validation_fraction 0.2 --checkpoint.every 2 --sample_tokens 0 --trace_steps 1 "
        "--progress lines --device cpu --transport gloo",
        path("text"), path(name), steps);
  }
  std::string path(const std::string& name) const { return (folder / name).string(); }
  Ended run(const std::string& words, std::chrono::seconds limit = 100s) const {
    return run_command(penstock() + " " + words, limit);
  }
  Ended train(const std::string& name, int steps, const std::string& more = "") const {
    return run("train " + flags(name, steps) + " " + more);
  }

  std::map<int, double> losses(const std::string& name) const {
    std::map<int, double> result;
    std::ifstream file(folder / name / "metrics.jsonl");
    for (std::string line; std::getline(file, line);)
      if (const auto entry = nlohmann::json::parse(line); entry.at("type") == "step")
        result[entry.at("step")] = entry.at("loss");
    return result;
  }

  // The steps of the lines of one type.
  std::vector<int> steps_of(const std::string& name, const std::string& type) const {
    std::vector<int> steps;
    std::ifstream file(folder / name / "metrics.jsonl");
    for (std::string line; std::getline(file, line);)
      if (const auto entry = nlohmann::json::parse(line); entry.at("type") == type)
        steps.push_back(entry.at("step"));
    return steps;
  }

  void expect_refused(const std::string& name, const std::string& words,
                      const std::vector<std::string>& said) const {
    const FolderState before = state_of(folder / name);
    const Ended ended = run(words);
    EXPECT_NE(ended.exit_code, 0) << words << "\n" << ended.output;
    EXPECT_NE(ended.exit_code, Ended::kTimedOut) << words;
    EXPECT_EQ(difference(before, state_of(folder / name)), "") << words << "\n" << ended.output;
    for (const std::string& part : said) EXPECT_TRUE(has_text(ended.output, part)) << words;
  }

  void damage(const fs::path& file) const {
    std::vector<std::uint8_t> bytes = read_bytes(file);
    bytes.at(bytes.size() / 2) ^= 1;
    write_bytes(file, bytes);
  }

  ScratchFolder folder;
};

TEST_F(Runs, ARefusedStartChangesNothing) {
  ASSERT_EQ(train("run", 4).exit_code, 0);
  const std::string resume = "resume '" + path("run") + "' ";
  expect_refused("run", "train " + flags("run", 8) + " --layers 6", {});  // twice the same key
  expect_refused("run", "train --run_folder '" + path("run") + "' --width 64 --feed_width 128",
                 {"model.width = 64 (--width), but the run was started with 32", "model.feed_width = 128",
                  "--run_folder"});
  expect_refused("run", resume + "--data '" + path("other") + "'",
                 {"data.sources = [\"" + path("other") + "\"] (--data), but the run was started with [\"" +
                      path("text") + "\"]",
                  "--resume"});
  expect_refused("run", resume + "--context 64 --seed 7 --optimizer sgd",
                 {"model.context = 64 (--context), but the run was started with 32",
                  "training.seed = 7 (--seed), but the run was started with 1", "training.optimizer"});
  expect_refused("run", resume + "--resume never", {"checkpoint.resume", "the newest of step 4"});
  expect_refused("run", resume + "--resume '" + path("run/checkpoints/step-00000002") + "'",
                 {"checkpoint.resume", "another --run_folder"});
  expect_refused("run", resume + "--no_such_key 3", {"no_such_key"});
  expect_refused("run", resume + "--pp 3 --schedule Interleaved1F1B --virtual_stages 2", {"layers"});
  // Errors that only the ranks can detect.
  damage(folder / "run/checkpoints/step-00000004/model.safetensors");
  expect_refused("run", resume + "--steps 8 --fallback false", {"model.safetensors"});
  damage(folder / "run/checkpoints/step-00000002/model.safetensors");
  expect_refused("run", resume + "--steps 8", {"model.safetensors"});
}

TEST_F(Runs, ADataSetThatChangedInItsPlaceIsRefused) {
  ASSERT_EQ(run(fmt::format("data make --out '{}' --source '{}'", path("shards"), path("text"))).exit_code,
            0);
  const std::string settings = flags("run", 4);
  const std::string without_data = settings.substr(settings.find("--run_folder"));
  ASSERT_EQ(run(fmt::format("train {} --shards '{}'", without_data, path("shards"))).exit_code, 0);
  // The same tokens in another place are the same data.
  fs::rename(folder / "shards", folder / "moved");
  const Ended moved = run(fmt::format("resume '{}' --steps 6 --shards '{}'", path("run"), path("moved")));
  EXPECT_EQ(moved.exit_code, 0) << moved.output;
  ASSERT_EQ(run(fmt::format("data make --out '{}' --source '{}' --overwrite", path("moved"), path("other")))
                .exit_code,
            0);
  expect_refused("run", "resume '" + path("run") + "' --steps 8", {"data of the run", "fingerprint"});
}

TEST_F(Runs, OneProcessTrainsInAFolder) {
  ASSERT_EQ(train("run", 4).exit_code, 0);
  const Ended both = run_command(
      fmt::format(
          "{0} resume '{1}' --steps 100000 --checkpoint.every 100000 >'{2}' 2>&1 & first=$!; for i "
          "in $(seq 3000); do grep -q '\"step\":7,' '{1}/metrics.jsonl' && break; sleep 0.02; done; cp "
          "'{1}/config.toml' '{2}.toml'; "
          "{0} train --run_folder '{1}' --steps 50; code=$?; cmp '{1}/config.toml' '{2}.toml' && "
          "echo 'the same'; kill -TERM $first; wait $first; echo \"first ended with $?\"; exit $code",
          penstock(), path("run"), path("first.log")),
      100s);
  EXPECT_EQ(both.exit_code, 2) << both.output;
  EXPECT_TRUE(has_text(both.output, "another process is training in it"));
  EXPECT_TRUE(has_text(both.output, "the same"));
  EXPECT_TRUE(has_text(both.output, "first ended with 0"));
  // The lock of a killed process does not count.
  const Ended killed = run_command(
      fmt::format(
          "lines() {{ wc -l <'{1}/metrics.jsonl'; }}; before=$(lines); "
          "{0} resume '{1}' --steps 100000 --checkpoint.every 100000 & first=$!; for i in $(seq 3000); do "
          "[ $(lines) -gt $before ] && break; sleep 0.02; done; kill -KILL $first; wait $first; sleep 2; "
          "{0} resume '{1}' --steps 40 --checkpoint.every 100",
          penstock(), path("run")),
      100s);
  EXPECT_EQ(killed.exit_code, 0) << killed.output;
}

TEST_F(Runs, ARefusedNewRunLeavesNoFolder) {
  const Ended ended = run(fmt::format("train {} --device cuda",
                                      flags("new/run", 4).substr(0, flags("new/run", 4).find("--device"))));
  EXPECT_NE(ended.exit_code, 0) << ended.output;
  EXPECT_FALSE(fs::exists(folder / "new")) << ended.output;
  const Ended damaged = train("second", 4, "--resume '" + path("nowhere/step-00000004") + "'");
  EXPECT_NE(damaged.exit_code, 0) << damaged.output;
  EXPECT_FALSE(fs::exists(folder / "second")) << damaged.output;
}

TEST_F(Runs, TheFolderAloneIsEnoughToContinue) {
  ASSERT_EQ(train("whole", 8).exit_code, 0);
  ASSERT_EQ(train("run", 8, "--time_limit_s 1e-9").exit_code, 0);
  ASSERT_EQ(losses("run").size(), 1u);
  const std::string before = [&] {
    const auto bytes = read_bytes(folder / "run/config.toml");
    return std::string(bytes.begin(), bytes.end());
  }();
  // From another working folder, and with another layout.
  const Ended more = run_command(
      fmt::format("cd / && {} train --run_folder '{}' --steps 4 --time_limit_s 0", penstock(), path("run")));
  EXPECT_EQ(more.exit_code, 0) << more.output;
  EXPECT_TRUE(has_text(more.output, "continues after step 1"));
  const Ended ended = run_command(
      fmt::format("cd / && {} resume '{}' --steps 8 --pp 4 --schedule GPipe", penstock(), path("run")));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  const Ended nothing_left = run("resume '" + path("run") + "'");
  EXPECT_EQ(nothing_left.exit_code, 0) << nothing_left.output;
  // --steps 4 changes the learning rate curve for a while; the test only checks that every step was done.
  EXPECT_EQ(losses("run").size(), 8u);
  EXPECT_EQ(losses("run").at(1), losses("whole").at(1));
  EXPECT_TRUE(has_text(before, "steps = 8  # --steps"));
  const auto bytes = read_bytes(folder / "run/config.toml");
  const std::string after(bytes.begin(), bytes.end());
  EXPECT_TRUE(has_text(after, "pp = 4  # --pp"));
  EXPECT_TRUE(has_text(after, "width = 32  # --width")) << "earlier settings keep their origin";
}

TEST_F(Runs, ResumingAFolderWithoutARunIsAnError) {
  EXPECT_EQ(run("resume").exit_code, 2);
  const Ended none = run("resume '" + path("text") + "'");
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_TRUE(has_text(none.output, "the folder of a run, with its config.toml"));
  EXPECT_TRUE(
      has_text(run("resume /nowhere/step-00000004").output, "run folder that contains the checkpoint"));
  EXPECT_TRUE(has_text(run("resume --help").output, "penstock resume runs/tiny-20270131-093005 --steps 500"));
}

TEST_F(Runs, ARunThatBeganElsewhereContinuesFromItsOwnCheckpoints) {
  ASSERT_EQ(train("first", 4).exit_code, 0);
  ASSERT_EQ(train("second", 6, "--resume '" + path("first/checkpoints/step-00000004") + "'").exit_code, 0);
  const Ended ended = run("resume '" + path("second") + "' --steps 8");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "continues after step 6")) << ended.output;
  const Ended turned = run("resume --steps 8 '" + path("second") + "'");
  EXPECT_EQ(turned.exit_code, 2);
  EXPECT_TRUE(has_text(turned.output, "the folder of the run as the first argument")) << turned.output;
}

TEST_F(Runs, CopiedAndMovedRunsContinueWhereTheyAre) {
  ASSERT_EQ(train("whole", 8).exit_code, 0);
  ASSERT_EQ(train("run", 8, "--time_limit_s 1e-9").exit_code, 0);
  const FolderState original = state_of(folder / "run");
  ASSERT_EQ(run_command("cp -r '" + path("run") + "' '" + path("copy") + "'").exit_code, 0);
  const Ended copied = run("resume '" + path("copy") + "' --time_limit_s 0");
  EXPECT_EQ(copied.exit_code, 0) << copied.output;
  EXPECT_EQ(difference(original, state_of(folder / "run")), "") << "the original";
  EXPECT_EQ(losses("copy"), losses("whole"));
  fs::create_directory(folder / "deep");
  fs::rename(folder / "run", folder / "deep/moved");
  const Ended moved = run("train --run_folder '" + path("deep/moved") + "' --time_limit_s 0");
  EXPECT_EQ(moved.exit_code, 0) << moved.output;
  EXPECT_FALSE(fs::exists(folder / "run"));
  EXPECT_EQ(losses("deep/moved"), losses("whole"));
  EXPECT_EQ(run("generate '" + path("deep/moved") + "' --prompt int --tokens 4").exit_code, 0);
}

// Earlier versions wrote the path of the folder.
TEST_F(Runs, AConfigurationThatNamesItsFormerPlaceIsUnderstood) {
  ASSERT_EQ(train("run", 4).exit_code, 0);
  const auto bytes = read_bytes(folder / "run/config.toml");
  std::string text(bytes.begin(), bytes.end());
  const std::string empty = "run_folder = \"\"";
  ASSERT_NE(text.find(empty), std::string::npos);
  text.replace(text.find(empty), empty.size(), "run_folder = \"" + path("run") + "\"");
  folder.write("run/config.toml", text);
  ASSERT_EQ(run_command("cp -r '" + path("run") + "' '" + path("copy") + "'").exit_code, 0);
  const FolderState original = state_of(folder / "run");
  // The file itself as the configuration: continues its run, in the folder of the file.
  EXPECT_EQ(run("train '" + path("copy/config.toml") + "' --steps 6").exit_code, 0);
  EXPECT_EQ(losses("copy").size(), 6u);
  ASSERT_EQ(run_command("cp -r '" + path("run") + "' '" + path("second") + "'").exit_code, 0);
  EXPECT_EQ(run("resume '" + path("second") + "' --steps 7").exit_code, 0);
  EXPECT_EQ(losses("second").size(), 7u);
  EXPECT_EQ(difference(original, state_of(folder / "run")), "");
}

// ------------------------------------------------------------------------------------------------ full disks

// A file size limit stops only the checkpoint: its model takes more than 100 KiB, everything else less.
TEST_F(Runs, ACheckpointThatCannotBeWrittenIsReportedAndRetried) {
  ASSERT_EQ(train("run", 4).exit_code, 0);
  const FolderState before = state_of(folder / "run/checkpoints", false);
  const Ended ended = run_command(
      fmt::format("bash -c \"ulimit -f 100; exec {} resume '{}' --steps 8\"", penstock(), path("run")), 100s);
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "checkpoint of step 6 was not saved"));
  EXPECT_TRUE(has_text(ended.output, "File too large"));
  EXPECT_TRUE(has_text(ended.output, "training continues"));
  EXPECT_FALSE(has_text(ended.output, "step 6: checkpoint saved"));
  EXPECT_TRUE(has_text(ended.output, "ended without saving the last checkpoint after step 8 of 8"));
  EXPECT_EQ(difference(before, state_of(folder / "run/checkpoints", false)), "")
      << "failed checkpoints are removed, older ones are intact";
  EXPECT_EQ(steps_of("run", "checkpoint"), (std::vector<int>{2, 4}));
  EXPECT_EQ(steps_of("run", "checkpoint_failed"), (std::vector<int>{6, 8, 8, 8}));
  EXPECT_EQ(losses("run").size(), 8u);
  const Ended again = run("resume '" + path("run") + "'");
  EXPECT_EQ(again.exit_code, 0) << again.output;
  EXPECT_TRUE(has_text(again.output, "continues after step 4"));
  EXPECT_TRUE(fs::exists(folder / "run/checkpoints/step-00000008"));
}

TEST_F(Runs, WithoutAnOlderCheckpointTheRunEnds) {
  const Ended ended = run_command(
      fmt::format("bash -c \"ulimit -f 100; exec {} train {}\"", penstock(), flags("run", 100)), 100s);
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "there is no older checkpoint"));
  EXPECT_LT(losses("run").size(), 20u) << "soon after the first one failed";
  EXPECT_EQ(state_of(folder / "run/checkpoints").size(), 2u) << "the folder and its lock";
}

// A real full disk, if the kernel lets a test mount one.
TEST_F(Runs, AFullDiskIsSurvived) {
  if (run_command("unshare -rm sh -c 'mount -t tmpfs -o size=64k none /mnt'").exit_code != 0)
    GTEST_SKIP() << "this system does not allow mounting a file system";
  ASSERT_EQ(train("run", 4).exit_code, 0);
  fs::create_directory(folder / "disk");
  const std::string script = fmt::format(
      "mount -t tmpfs -o size=1600k none '{0}' && cp -r '{1}' '{0}/run' && {2} resume '{0}/run' --steps 8; "
      "code=$?; ls -a '{0}/run/checkpoints'; cp -r '{0}/run' '{3}'; exit $code",
      path("disk"), path("run"), penstock(), path("result"));
  folder.write("script.sh", script);
  const Ended ended = run_command("unshare -rm sh '" + path("script.sh") + "'", 100s);
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "No space left on device"));
  for (const auto& entry : fs::directory_iterator(folder / "result/checkpoints"))
    EXPECT_FALSE(has_text(entry.path().filename().string(), ".writing"));
  EXPECT_TRUE(fs::exists(folder / "result/checkpoints/step-00000004/index.json"));
  std::ifstream metrics(folder / "result/metrics.jsonl");
  for (std::string line; std::getline(metrics, line);)
    EXPECT_TRUE(nlohmann::json::accept(line)) << "only complete lines: " << line;
}

// ---------------------------------------------------------------------------------- ranks that do not answer

TEST_F(Runs, AStoppedRankCostsTheDeadlineAndSeconds) {
  const Ended ended = run_command(
      fmt::format(
          "{} train {} --timeout_s 10 --grace_s 2 >'{}' 2>&1 & run=$!; for i in $(seq 900); do grep -q "
          "'\"step\":3,' '{}/metrics.jsonl' 2>/dev/null && break; sleep 0.1; done; "
          "pkill -STOP -n -f 'train --[w]orker {}'; begin=$(date +%s); wait $run; echo \"ended after "
          "$(($(date +%s) - begin)) s with $?\"; cat '{}'",
          penstock(), flags("run", 100000), path("log"), path("run"), path("run"), path("log")),
      200s);
  const std::string words = "ended after ";
  ASSERT_NE(ended.output.find(words), std::string::npos) << ended.output;
  const int seconds = std::stoi(ended.output.substr(ended.output.find(words) + words.size()));
  EXPECT_GE(seconds, 8) << ended.output;
  EXPECT_LE(seconds, 40) << ended.output;
}

TEST_F(Runs, AnUnknownRendezvousHostIsAnErrorAtOnce) {
  for (const int rank : {0, 1}) {
    const Ended ended =
        run_command(fmt::format("RANK={} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=no-such-host.invalid "
                                "MASTER_PORT=29411 {} train {}",
                                rank, penstock(), flags("run", 4)),
                    60s);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_LT(ended.seconds, 40) << ended.output;
    EXPECT_TRUE(has_text(ended.output, "no-such-host.invalid")) << ended.output;
    EXPECT_TRUE(has_text(ended.output, "MASTER_ADDR")) << ended.output;
  }
  const Ended file = run_command(
      fmt::format(
          "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 PENSTOCK_RENDEZVOUS=file:///nowhere/meet {} train {}",
          penstock(), flags("run", 4)),
      60s);
  EXPECT_EQ(file.exit_code, 2) << file.output;
  EXPECT_LT(file.seconds, 40) << file.output;
  EXPECT_TRUE(has_text(file.output, "/nowhere: No such file or directory"));
  EXPECT_FALSE(fs::exists(folder / "run"));
}

}  // namespace runs_test
}  // namespace penstock::test
