// Tests of the commands `penstock parity`, `penstock train` and `penstock generate`.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "penstock/base/files.h"
#include "tests/command.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace train_cli_test {

namespace fs = std::filesystem;

Ended penstock(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' " + arguments,
                     std::chrono::seconds(110));
}

class TrainCli : public ::testing::Test {
 protected:
  TrainCli() {
    fs::create_directories(folder_ / "text");
    for (int file = 0; file < 12; ++file)
      std::ofstream(folder_ / "text" / (std::to_string(file) + ".h"))
          << "int value_" << file << " = " << 17 * file << ";\n"
          << std::string(300, static_cast<char>('a' + file));
    std::ofstream(folder_ / "train.toml")
        << "[model]\npreset = \"tiny\"\nlayers = 4\nwidth = 16\nheads = 2\nkey_value_heads = 2\nfeed_width = "
           "32\ncontext = 16\n"
        << "[layout]\nmicrobatches = 4\nmicrobatch_size = 2\ndevice = \"cpu\"\n"
        << "[training]\nwarmup_steps = 2\nvalidate_every = 0\n"
        << "[data]\nvalidation_fraction = 0\nsources = [\"" << (folder_ / "text").string() << "\"]\n";
  }
  ~TrainCli() override {
    std::error_code ignored;  // a leftover folder is not a test failure
    remove_tree(folder_, ignored);
  }
  std::string config() const { return "'" + (folder_ / "train.toml").string() + "'"; }

  const fs::path folder_ = fs::temp_directory_path() / ("penstock_train_cli_" + std::to_string(::getpid()));
};

TEST_F(TrainCli, HelpHasExamples) {
  EXPECT_TRUE(has_text(penstock("parity --help").output, "penstock parity --pp 2"));
  EXPECT_TRUE(has_text(penstock("train --help").output, "--dry-run"));
}

TEST_F(TrainCli, ParityOfAPipeline) {
  const Ended ended = penstock("parity " + config() + " --pp 2 --steps 2");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "expected: equal values"));
  EXPECT_TRUE(has_text(ended.output, "2 losses over 2 steps, largest relative difference 0\n"));
  EXPECT_TRUE(has_text(ended.output, "parity: ok"));
}

// Pipelines produce the bits of one process; sums over replicas and tensor-parallel ranks may round
// differently.
// One layout for each kind of transfer and sum; job_test and sharded_job_test train the others in threads,
// and the long form of this test runs them through the command too.
TEST_F(TrainCli, ParityOfManyLayouts) {
  std::vector<std::string> layouts{
      "--pp 2 --virtual_stages 2 --schedule InterleavedZeroBubble",
      "--pp 2 --dp 2 --shard 2 --schedule ZBVZeroBubble --tie_head true",
      "--pp 2 --tp 2 --schedule GPipe",
      "--pp 1 --dp 2 --shard 2 --ep 2 --tp 2 --pattern AEME --state_size 4 --state_head_width 8 "
      "--balance_weight 0.5",
  };
  if (environment("PENSTOCK_ALL_LAYOUTS") == "1")
    for (const char* further : {
             "--pp 4 --schedule 1F1B",
             "--pp 2 --schedule DualPipeV",
             "--pp 1 --dp 2",
             "--pp 1 --dp 2 --tp 2",
             "--pp 1 --dp 2 --ep 2 --pattern AEFE --experts 4 --balance_weight 0.5",
             "--pp 2 --schedule GPipe",
             "--pp 2 --virtual_stages 2 --schedule Interleaved1F1B",
             "--pp 2 --virtual_stages 2 --schedule LoopedBFS",
             "--pp 2 --schedule ZBVZeroBubble",
             "--pp 2 --schedule 1F1B --tie_head true",
             "--pp 2 --dp 2 --shard 2",
             "--pp 1 --tp 2",
             "--pp 2 --dp 2 --schedule 1F1B",
             "--pp 2 --dp 2 --schedule ZBVZeroBubble",
             "--pp 2 --virtual_stages 2 --schedule Interleaved1F1B --tp 2",
         })
      layouts.emplace_back(further);
  for (const std::string& layout : layouts) {
    const Ended ended = penstock("parity " + config() + " --steps 2 " + layout);
    EXPECT_EQ(ended.exit_code, 0) << layout << "\n" << ended.output;
    EXPECT_TRUE(has_text(ended.output, "parity: ok")) << layout;
  }
}

TEST_F(TrainCli, ParityOfReplicasFailsWhereNoRoundingIsAllowed) {
  const std::string kept = (folder_ / "kept").string();
  const Ended ended =
      penstock("parity " + config() + " --pp 1 --dp 2 --steps 2 --tolerance 0 --all --keep '" + kept + "'");
  EXPECT_EQ(ended.exit_code, 1) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "FAIL"));
  EXPECT_TRUE(has_text(ended.output, "(replica 1)"));
  EXPECT_TRUE(fs::exists(fs::path(kept) / "layout" / "step-00000002" / "index.json"));
}

TEST_F(TrainCli, WrongUsageIsExitCode2) {
  const Ended unknown = penstock("parity " + config() + " --schedul 1F1B");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_TRUE(has_text(unknown.output, "schedule"));
  EXPECT_EQ(penstock("parity " + config() + " --steps 0").exit_code, 2);
  EXPECT_EQ(penstock("train " + config() + " --pp 5 --dry-run").exit_code, 2);
}

std::size_t times(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

TEST_F(TrainCli, MalformedNumbersAreExitCode2) {
  for (const char* arguments : {"--tolerance=-inf", "--parameter-tolerance nan", "--steps 1e3", "--lr nan"}) {
    const Ended ended = penstock("parity " + config() + " --pp 1 " + arguments);
    EXPECT_EQ(ended.exit_code, 2) << arguments << "\n" << ended.output;
    EXPECT_TRUE(
        has_text(ended.output, std::string(arguments).substr(0, std::string(arguments).find_first_of(" ="))));
    EXPECT_FALSE(has_text(ended.output, "parity: ok"));
  }
}

TEST_F(TrainCli, KeysAndFlagsWithoutEffectAreRefused) {
  const auto refuses = [&](const std::string& arguments, const std::string& words) {
    const Ended ended = penstock(arguments);
    EXPECT_EQ(ended.exit_code, 2) << arguments << "\n" << ended.output;
    EXPECT_TRUE(has_text(ended.output, words)) << arguments;
  };
  refuses("parity " + config() + " --resume never", "checkpoint.resume has no effect in penstock parity");
  refuses("inspect memory " + config() + " --predict-only --steps 2", "--steps has no effect");
  refuses("inspect graph " + config() + " --precision bf16",
          "training.precision has no effect in penstock inspect graph");
  refuses("train " + config() + " --dryrun", "did you mean --dry-run?");
  refuses("train " + config() + " --learning_rate 3", "did you mean training.lr?");
}

TEST_F(TrainCli, AMalformedVariableIsRefusedAtOnce) {
  const Ended ended = run_command("PENSTOCK_P2P=pigeon '" + environment("PENSTOCK_BIN") +
                                  "/penstock' train " + config() + " --dry-run");
  EXPECT_EQ(ended.exit_code, 2) << ended.output;
  EXPECT_TRUE(
      has_text(ended.output, "environment variable PENSTOCK_P2P: got \"pigeon\", expected one of gloo, ucx"));
}

TEST_F(TrainCli, ConfigurationErrorsArePrintedOnce) {
  const std::string start = "cd '" + folder_.string() + "' && CUDA_VISIBLE_DEVICES= '" +
                            environment("PENSTOCK_BIN") + "/penstock' ";
  // Detected by the ranks: the data do not exist, or there is too little.
  for (const std::string arguments : {"train train.toml --pp 2 --data /nonexistent/text",
                                      "parity train.toml --pp 2 --data /nonexistent/text",
                                      "inspect memory train.toml --pp 2 --data /nonexistent/text"}) {
    const Ended ended = run_command(start + arguments, std::chrono::seconds(110));
    EXPECT_EQ(ended.exit_code, 2) << arguments << "\n" << ended.output;
    EXPECT_EQ(times(ended.output, "penstock: "), 1u) << ended.output;
    EXPECT_EQ(times(ended.output, "[launch]"), 0u) << ended.output;
    EXPECT_EQ(times(ended.output, "failed first"), 0u) << ended.output;
    EXPECT_EQ(times(ended.output, "rank 0:"), 0u) << ended.output;
  }
}

// With CUDA_VISIBLE_DEVICES, so that machines with GPUs behave the same.
TEST_F(TrainCli, NcclIsRefusedOnTheCpu) {
  for (const char* what : {" --run_folder nccl", " --dry-run"}) {
    const Ended ended =
        run_command("cd '" + folder_.string() + "' && CUDA_VISIBLE_DEVICES= '" + environment("PENSTOCK_BIN") +
                    "/penstock' train train.toml --pp 2 --device auto --transport nccl" + what);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(has_text(ended.output, "layout.transport: got nccl, which supports CUDA tensors only"));
    EXPECT_EQ(times(ended.output, "penstock: "), 1u) << ended.output;
  }
  EXPECT_FALSE(fs::exists(folder_ / "nccl"));
}

TEST_F(TrainCli, GenerateDoesWhatItIsAskedOrSaysWhyNot) {
  const std::string run = (folder_ / "run").string();
  const Ended trained =
      penstock("train " + config() + " --pp 1 --steps 2 --warmup_steps 0 --sample_tokens 0 --run_folder '" +
               run + "'");
  ASSERT_EQ(trained.exit_code, 0) << trained.output;
  const Ended empty = penstock("generate '" + run + "' --prompt ''");
  EXPECT_EQ(empty.exit_code, 2) << empty.output;
  EXPECT_TRUE(has_text(empty.output, "--prompt: got an empty prompt"));
  // The context is 16: the text continues beyond it.
  const Ended longer =
      penstock("generate '" + run + "' --prompt 'int ' --tokens 60 --temperature 0 --device cpu");
  EXPECT_EQ(longer.exit_code, 0) << longer.output;
  EXPECT_GE(longer.output.size(), 4u + 60u) << longer.output;
  const Ended prompt =
      penstock("generate '" + run +
               "' --prompt '0123456789012345678901234567890' --tokens 2 --temperature 0 --device cpu");
  EXPECT_EQ(prompt.exit_code, 0) << prompt.output;
  EXPECT_TRUE(has_text(prompt.output, "the model uses only the last 16, its context"));

  // A checkpoint of a newer format version.
  const fs::path index = fs::path(run) / "checkpoints" / "step-00000002" / "index.json";
  std::ifstream in(index);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  text.replace(text.find("\"version\": 1"), 12, "\"version\": 2");
  std::ofstream(index) << text;
  for (const std::string& arguments :
       {"generate '" + run + "'", "train " + config() +
                                      " --pp 2 --steps 4 --warmup_steps 0 --sample_tokens 0 --run_folder '" +
                                      run + "'"}) {
    const Ended newer = penstock(arguments);
    EXPECT_NE(newer.exit_code, 0) << newer.output;
    EXPECT_EQ(times(newer.output, "it was written by a newer version of Penstock"), 1u) << newer.output;
    EXPECT_EQ(times(newer.output, "damaged"), 0u) << newer.output;
  }
}

TEST_F(TrainCli, DryRunTrainsNothing) {
  const Ended ended = run_command("cd '" + folder_.string() + "' && '" + environment("PENSTOCK_BIN") +
                                  "/penstock' train train.toml --pp 2 --dry-run");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "mesh: 2 ranks = pp 2"));
  EXPECT_TRUE(has_text(ended.output, "predicted: "));
  EXPECT_FALSE(fs::exists(folder_ / "runs"));
}

TEST_F(TrainCli, OneTextFileJustTrains) {
  std::string text;
  for (int i = 0; text.size() < 1'100'000; ++i) text += "line " + std::to_string(i * 7919 % 1000) + "\n";
  std::ofstream(folder_ / "input.txt") << text;
  const std::string sizes =
      " --preset tiny --layers 2 --model.width 16 --heads 2 --key_value_heads 2 --feed_width 32 --context 16 "
      "--microbatches 4 --microbatch_size 2 --device cpu --steps 2";
  const std::string there = "cd '" + folder_.string() + "' && '" + environment("PENSTOCK_BIN") +
                            "/penstock' train --data input.txt" + sizes;
  const Ended dry = run_command(there + " --dry-run");
  EXPECT_EQ(dry.exit_code, 0) << dry.output;
  EXPECT_TRUE(has_text(dry.output, "for validation, cut inside documents"));
  EXPECT_FALSE(fs::exists(folder_ / "runs"));
  const Ended ended = run_command(there + " --run_folder run", std::chrono::seconds(110));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "finished after step 2 of 2"));
}

TEST_F(TrainCli, ALayoutThatThisHostDoesNotStartLeavesNoFolder) {
  for (const char* dry : {"", " --dry-run"}) {
    const Ended ended = run_command("cd '" + folder_.string() + "' && '" + environment("PENSTOCK_BIN") +
                                    "/penstock' train train.toml --pp 1 --dp 65536" + dry);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(has_text(ended.output, "layout.ranks: got 65536, expected at most 1024"));
    EXPECT_FALSE(fs::exists(folder_ / "runs"));
  }
}

// The number of ranks of another launcher is not limited; the output still fits on a screen.
TEST_F(TrainCli, ADryRunOfAHugeWorld) {
  const auto dry_run = [&](const std::string& world, const std::string& layout) {
    return run_command(world + " MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 '" + environment("PENSTOCK_BIN") +
                       "/penstock' train " + config() + " --dry-run --pp 4 --schedule GPipe " + layout);
  };
  const Ended ended = dry_run("RANK=0 WORLD_SIZE=65536 LOCAL_RANK=0 LOCAL_WORLD_SIZE=8", "--dp 8192 --tp 2");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "ranks 16384-32767: pp 1, dp 0-8191, tp 0-1; stages 1\n"));
  EXPECT_LE(std::count(ended.output.begin(), ended.output.end(), '\n'), 45);  // including progress lines
  const Ended wrong = dry_run("RANK=0 WORLD_SIZE=8 LOCAL_RANK=0 LOCAL_WORLD_SIZE=8", "--dp 8192 --tp 2");
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_TRUE(has_text(wrong.output, "ranks: got 8, expected pp * dp * tp = 4 * 8192 * 2 = 65536"));
  const Ended other = dry_run("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", "--dp 1");
  EXPECT_EQ(other.exit_code, 0);
  EXPECT_EQ(other.output, "");
}

TEST_F(TrainCli, ModelsOfTokenFilesGenerateNoText) {
  std::string tokens;
  for (int i = 0; i < 4000; ++i) tokens += std::string{static_cast<char>(i % 61), '\0'};
  std::ofstream(folder_ / "train.bin", std::ios::binary) << tokens;
  const std::string run = (folder_ / "run").string();
  const std::string there = config() + " --data '" + (folder_ / "train.bin").string() + "'";
  EXPECT_TRUE(has_text(penstock("train " + there + " --dry-run").output, "data.format = \"uint16\""));
  const Ended ended =
      penstock("train " + there + " --data.format uint16 --pp 1 --steps 3 --run_folder '" + run + "'");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_FALSE(has_text(ended.output, "Sample from the model"));
  const Ended text = penstock("generate '" + run + "'");
  EXPECT_EQ(text.exit_code, 2);
  EXPECT_TRUE(has_text(text.output, "does not know the tokenizer"));
}

}  // namespace train_cli_test
}  // namespace penstock::test
