// Tests of the command `penstock inspect`.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/files.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/markup_check.h"

namespace penstock::test {
namespace inspect_cli_test {

namespace fs = std::filesystem;

Ended penstock(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' " + arguments,
                     std::chrono::seconds(110));
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class InspectCli : public ::testing::Test {
 protected:
  InspectCli() {
    fs::create_directories(folder_ / "text");
    for (int file = 0; file < 12; ++file)
      std::ofstream(folder_ / "text" / (std::to_string(file) + ".h"))
          << "int value_" << file << " = " << 17 * file << ";\n"
          << std::string(300, static_cast<char>('a' + file));
    std::ofstream(folder_ / "train.toml")
        << "[model]\npreset = \"tiny\"\nlayers = 4\nwidth = 32\nheads = 2\nkey_value_heads = 2\nfeed_width = "
           "64\ncontext = 32\n"
        << "[layout]\nmicrobatches = 4\nmicrobatch_size = 2\ndevice = \"cpu\"\n"
        << "[training]\nwarmup_steps = 2\nvalidate_every = 0\n"
        << "[data]\nvalidation_fraction = 0\nsources = [\"" << (folder_ / "text").string() << "\"]\n";
  }
  ~InspectCli() override {
    std::error_code ignored;  // a leftover folder is not a test failure
    remove_tree(folder_, ignored);
  }
  std::string config() const { return "'" + (folder_ / "train.toml").string() + "'"; }

  nlohmann::json memory(const std::string& arguments) const {
    const Ended ended = penstock("inspect memory " + config() + " --json " + arguments + " 2>/dev/null");
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    const nlohmann::json parsed = nlohmann::json::parse(ended.output, nullptr, false);
    EXPECT_TRUE(parsed.is_object()) << ended.output;
    return parsed;
  }

  const fs::path folder_ = fs::temp_directory_path() / ("penstock_inspect_cli_" + std::to_string(::getpid()));
};

// What is measured divides the model, without LibTorch.
TEST_F(InspectCli, CostsAreReadByPartition) {
  const std::string file = "'" + (folder_ / "costs.json").string() + "'";
  const Ended measured = penstock("inspect costs " + config() + " -o " + file);
  EXPECT_EQ(measured.exit_code, 0) << measured.output;
  const Ended divided = penstock("partition " + config() + " --json --costs " + file);
  EXPECT_EQ(divided.exit_code, 0) << divided.output;
  const nlohmann::json plan = nlohmann::json::parse(divided.output, nullptr, false);
  ASSERT_TRUE(plan.is_object()) << divided.output;
  EXPECT_EQ(plan["costs"], "measured");
  EXPECT_TRUE(plan["activations"].get<bool>());
  for (const auto& rank : plan["ranks"]) EXPECT_GT(rank["cost"].get<double>(), 0);
  const Ended huge = penstock("inspect costs " + config() + " --width 1000000");
  EXPECT_NE(huge.exit_code, 0);
  EXPECT_TRUE(has_text(huge.output, "memory")) << huge.output;
}

TEST_F(InspectCli, HelpHasExamples) {
  EXPECT_TRUE(has_text(penstock("inspect --help").output, "penstock inspect memory my.toml"));
  EXPECT_TRUE(has_text(penstock("inspect memory --help").output, "--predict-only"));
  EXPECT_EQ(penstock("inspect").exit_code, 2);
  const Ended typo = penstock("inspect memroy");
  EXPECT_EQ(typo.exit_code, 2);
  EXPECT_TRUE(has_text(typo.output, "did you mean memory?"));
  EXPECT_EQ(penstock("inspect memory " + config() + " --steps 0").exit_code, 2);
  EXPECT_EQ(penstock("inspect memory " + config() + " --pp 5").exit_code, 2);
}

TEST_F(InspectCli, PrintsATable) {
  const Ended ended = penstock("inspect memory " + config() + " --pp 2 --steps 1");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (const char* part : {"1 (pp 1, dp 0, tp 0)", "predicted", "measured", "parameters", "gathered",
                           "gradients", "optimizer", "activations", "together", "KiB"})
    EXPECT_TRUE(has_text(ended.output, part));
}

TEST_F(InspectCli, PredictionAlone) {
  const nlohmann::json all = memory("--pp 2 --dp 4 --shard 2 --predict-only");
  ASSERT_EQ(all.at("ranks").size(), 8u);
  for (const auto& rank : all.at("ranks")) {
    EXPECT_FALSE(rank.contains("measured"));
    EXPECT_GT(rank.at("predicted").at("gathered"), rank.at("predicted").at("parameters"));
  }
  EXPECT_EQ(all.at("ranks")[5].at("pp"), 1);
  EXPECT_EQ(all.at("ranks")[5].at("dp"), 1);
}

TEST_F(InspectCli, ShowsTheTensorsOfGraphs) {
  const std::string html = (folder_ / "memory.html").string(),
                    graph = " --predict-only --pp 1 --schedule 1F1B --compile graph --activation_budget ";
  const Ended half = penstock("inspect memory " + config() + graph + "0.5 --html '" + html + "'");
  ASSERT_EQ(half.exit_code, 0) << half.output;
  for (const char* text :
       {"predicted peak of a call", "if everything were saved", "live at the peak", "saved for backward",
        "recomputed in backward", "blocks.*.feed", "% of the work of forward"})
    EXPECT_TRUE(has_text(half.output, text)) << text << "\n" << half.output;
  const std::string page = text_of(html);
  const std::size_t begin = page.find("<svg"), end = page.find("</svg>");
  ASSERT_NE(begin, std::string::npos) << page;
  ASSERT_NE(end, std::string::npos) << page;
  EXPECT_EQ(markup_problem(page.substr(begin, end + 6 - begin)), "");
  for (const char* text : {"<title>aten::", "blocks.0.", "&#10;saved", "&#10;recomputed", "peak"})
    EXPECT_TRUE(has_text(page, text)) << text;
  const Ended all = penstock("inspect memory " + config() + graph + "1");
  ASSERT_EQ(all.exit_code, 0) << all.output;
  EXPECT_TRUE(has_text(all.output, "recomputed in backward: nothing"));
  const Ended stages = penstock("inspect memory " + config() +
                                " --predict-only --pp 2 --schedule 1F1B --compile graph --activation_budget "
                                "'1 GiB'");
  ASSERT_EQ(stages.exit_code, 0) << stages.output;
  EXPECT_TRUE(has_text(stages.output, "1.0 GiB for each of 2 stages, 2.0 GiB for the whole model"));
  const Ended eager = penstock("inspect memory " + config() + " --predict-only --pp 1 --html '" + html + "'");
  EXPECT_EQ(eager.exit_code, 2);
  EXPECT_TRUE(has_text(eager.output, "add --training.compile graph")) << eager.output;
}

// By default the tests of predictions measure one layout of each kind, in the long form all.
bool all_layouts() { return environment("PENSTOCK_ALL_LAYOUTS") == "1"; }

// Predicted and measured memory agree: exactly for tensors that are listed, approximately for temporary ones.
TEST_F(InspectCli, PredictedAgreesWithMeasured) {
  std::vector<std::string> layouts{"--pp 2", "--pp 1 --dp 2 --shard 2",
                                   "--pp 2 --schedule ZBVZeroBubble --dp 2 --shard 2"};
  if (all_layouts())
    for (const char* further : {"--pp 1 --dp 2", "--pp 2 --dp 2 --shard 2",
                                "--pp 2 --virtual_stages 2 --schedule Interleaved1F1B --dp 2 --shard 2"})
      layouts.emplace_back(further);
  for (const std::string& layout : layouts) {
    const nlohmann::json all = memory("--steps 2 " + layout);
    for (const auto& rank : all.at("ranks")) {
      const nlohmann::json &predicted = rank.at("predicted"), &measured = rank.at("measured");
      SCOPED_TRACE(fmt::format("{}: rank {}\n{}\n{}", layout, rank.at("rank").get<int>(), predicted.dump(),
                               measured.dump()));
      const auto near = [&](const char* column, double part) {
        const double wanted = predicted.at(column), found = measured.at(column);
        EXPECT_LE(std::abs(found - wanted), part * wanted) << column;
      };
      near("parameters", 0.01);
      near("optimizer", 0.01);
      near("gradients", 0.02);
      near("gathered", 0.02);
      near("activations", 0.05);
      EXPECT_GT(measured.at("together"), measured.at("parameters"));
    }
  }
}

// Whatever is recomputed, the prediction knows it, and memory really falls.
TEST_F(InspectCli, PredictsRecomputedActivations) {
  const std::string model =
      "--steps 1 --pattern AEME --attention_feed false --model.width 64 --context 128 --expert_width 64 "
      "--experts 4 --state_size 16 --state_head_width 16 --state_chunk 32 ";
  const std::string one = "--pp 1 --schedule 1F1B ", pipeline = "--pp 2 --schedule 1F1B ",
                    split = "--pp 2 --virtual_stages 2 --schedule ZBVZeroBubble ";
  const std::string microbatches = "block --recompute_microbatches 0,1";
  // The first of a layout is what the others save from.
  std::vector<std::pair<std::string, std::vector<std::string>>> cases{{one, {"none", "pattern:R..R"}},
                                                                      {pipeline, {"none", microbatches}},
                                                                      {split, {"none", "experts", "block"}}};
  if (all_layouts())
    for (auto& [layout, recomputed] : cases)
      recomputed = {"none", "experts", "block", "pattern:R..R", microbatches};
  cases.push_back({one + "--multi_token_depth 2 --multi_token_block E ", {"none", "experts", "block"}});
  for (const auto& [layout, recomputed] : cases) {
    double all = 0;
    for (const std::string& recompute : recomputed) {
      const nlohmann::json memory_of = memory(model + layout + "--recompute " + recompute);
      double sum = 0;
      for (const auto& rank : memory_of.at("ranks")) {
        const double predicted = rank.at("predicted").at("activations"),
                     measured = rank.at("measured").at("activations");
        EXPECT_NEAR(predicted / measured, 1, 0.05) << layout << recompute << " rank " << rank.at("rank");
        sum += measured;
      }
      if (all == 0) all = sum;
      // Microbatches that are kept may be the ones in flight at the peak.
      const bool some = recompute == microbatches;
      EXPECT_TRUE(recompute == "none" || some || sum < 0.9 * all) << layout << recompute;
    }
  }
}

}  // namespace inspect_cli_test
}  // namespace penstock::test
