// `penstock parity` of a hybrid model with everything that could go wrong in a pipeline: mixtures of depths,
// multi-token prediction, relations and structure of the text, a tied embedding, and an auxiliary loss at
// every stage. Losses, auxiliary losses, every gradient and every parameter of three steps.
//
//   PENSTOCK_ALL_LAYOUTS=1 build/release/tests/cli_plain_tests --of=hybrid_parity_test   # prints a table
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace hybrid_parity_test {

constexpr int kSteps = 3;

Ended penstock(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' " + arguments + " </dev/null",
                     std::chrono::seconds(300));
}

// One line of `penstock parity --all`.
struct ComparedTensor {
  int step = 0;
  std::string kind, name;  // "gradient", "embed.weight (pipeline rank 1)"
  double relative = 0;

  std::string original() const { return name.substr(0, name.find(" (")); }
};

std::vector<ComparedTensor> compared_tensors(const std::string& output) {
  static const std::regex line(R"( *(\d+)  (loss|gradient|parameter) +(\S.*?)  +(\S+)  +(\S+)  (ok|FAIL).*)");
  std::vector<ComparedTensor> all;
  std::istringstream lines(output);
  std::smatch found;
  for (std::string text; std::getline(lines, text);)
    if (std::regex_match(text, found, line))
      all.push_back({std::stoi(found[1]), found[2], found[3], std::stod(found[5])});
  return all;
}

class HybridParity : public ::testing::Test {
 protected:
  HybridParity() {
    for (int file = 0; file < 12; ++file) {
      std::string text;
      for (int line = 0; line < 8; ++line)
        text += fmt::format("int f_{}(int a) {{ return g(a, {}); }}  // {}\n", file * line % 5, file, line);
      folder_.write(fmt::format("text/{}.h", file), text);
    }
    folder_.write("train.toml", R"(
[model]
preset = "tiny"
pattern = "AEMEAEME"
attention_feed = false
width = 16
heads = 2
key_value_heads = 2
feed_width = 32
context = 16
experts = 4
expert_width = 16
state_size = 4
state_head_width = 8
state_chunk = 8
balance_weight = 0.05
router_z_weight = 0.1
depth_layers = [1, 2, 5]
depth_weight = 0.2
multi_token_depth = 1
multi_token_block = "E"
structure_embedding = true
relations = 4
tie_head = true
[layout]
microbatches = 8
microbatch_size = 2
device = "cpu"
[training]
warmup_steps = 0
decay = "constant"
lr = 0.01
validate_every = 0
[output]
sample_tokens = 0
trace_steps = []
[data]
structure = "cpp"
validation_fraction = 0
sources = [")" + (folder_ / "text").string() +
                                    "\"]\n");
  }
  std::string config() const { return "'" + (folder_ / "train.toml").string() + "'"; }
  // Schedules of a file, with split backwards and two stages per rank.
  std::string csv(int ranks) const {
    const std::string path = (folder_ / fmt::format("{}.csv", ranks)).string();
    const Ended made = penstock(fmt::format(
        "schedule --kind InterleavedZeroBubble --ranks {} --microbatches 8 -o '{}'", ranks, path));
    EXPECT_EQ(made.exit_code, 0) << made.output;
    return "'" + path + "'";
  }
  // Compares and prints the largest relative difference of each kind.
  std::vector<ComparedTensor> compare(const std::string& layout) const {
    SCOPED_TRACE(layout);
    const Ended ended = penstock(fmt::format("parity {} --steps {} --all {}", config(), kSteps, layout));
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_TRUE(has_text(ended.output, "parity: ok"));
    const std::vector<ComparedTensor> tensors = compared_tensors(ended.output);
    std::map<std::string, double> largest{
        {"loss", 0}, {"auxiliary loss", 0}, {"gradient", 0}, {"parameter", 0}};
    std::map<std::string, std::set<std::string>> seen;  // in each step
    for (const ComparedTensor& each : tensors) {
      double& most = largest[each.kind == "loss" && each.name != "loss" ? "auxiliary loss" : each.kind];
      most = std::max(most, each.relative);
      seen[each.kind].insert(fmt::format("{} {}", each.step, each.original()));
    }
    EXPECT_EQ(seen["loss"].size(), kSteps * 5u) << "the loss and four auxiliary ones";
    EXPECT_EQ(seen["gradient"], seen["parameter"]) << "every parameter has a gradient in every step";
    EXPECT_GT(seen["parameter"].size(), kSteps * 50u);
    std::cout << fmt::format("{:<90}", layout);
    for (const char* kind : {"loss", "auxiliary loss", "gradient", "parameter"})
      std::cout << fmt::format("  {} {:.1e}", kind, largest[kind]);
    std::cout << std::endl;
    return tensors;
  }
  // A pipeline changes no bit, except of gradients that arise on several stages. In the first step, before an
  // update depends on those, everything else is equal.
  void compare_pipeline(const std::string& layout) const {
    for (const ComparedTensor& each : compare(layout)) {
      const bool adds_over_stages = each.original() == "relations.weight";
      const bool is_sum_of_stages = each.kind == "loss" && each.name != "loss";
      if (each.step > 1 || each.kind == "parameter" || adds_over_stages || is_sum_of_stages) continue;
      EXPECT_EQ(each.relative, 0) << layout << ": " << each.kind << " " << each.name;
    }
  }

  const ScratchFolder folder_;
};

TEST_F(HybridParity, OfPipelines) {
  if (environment("PENSTOCK_ALL_LAYOUTS") != "1") {
    compare_pipeline("--pp 2 --schedule " + csv(2) + " --recompute experts");
    return;
  }
  for (const int pp : {2, 4})
    for (const std::string& schedule :
         {std::string("1F1B"), std::string("Interleaved1F1B"), std::string("ZBVZeroBubble"),
          std::string("DualPipeV"), std::string("VHalf"), csv(pp)})
      for (const char* recompute : {"none", "block"})
        compare_pipeline(fmt::format("--pp {} --schedule {} --recompute {}", pp, schedule, recompute));
}

// Without gradients that arise on several stages all steps are equal.
TEST_F(HybridParity, OfPipelinesWithoutRelations) {
  const bool all = environment("PENSTOCK_ALL_LAYOUTS") == "1";
  for (const char* schedule : {"ZBVZeroBubble", "1F1B", "Interleaved1F1B", "DualPipeV", "VHalf"}) {
    const std::string layout =
        fmt::format("--pp 2 --relations 0 --recompute letters:AE --schedule {}", schedule);
    for (const ComparedTensor& each : compare(layout)) {
      const bool is_sum_of_stages = each.kind == "loss" && each.name != "loss";
      EXPECT_LE(each.relative, is_sum_of_stages ? 1e-5 : 0) << layout << ": " << each.name;
    }
    if (!all) return;
  }
}

// The two copies of DualPipe, and replicas, shards, experts and heads over ranks: equal up to rounding.
TEST_F(HybridParity, OfOtherLayouts) {
  const auto replicas = [](const std::string& more) { return "--dp 2 --microbatch_size 1 " + more; };
  std::vector<std::string> layouts{replicas("--pp 2 --shard 2 --schedule ZBVZeroBubble --recompute experts")};
  if (environment("PENSTOCK_ALL_LAYOUTS") == "1") {
    layouts.clear();
    for (const char* recompute : {"--recompute none", "--recompute block"})
      for (const std::string& layout :
           {std::string("--pp 2 --schedule DualPipe "), std::string("--pp 4 --schedule DualPipe "),
            replicas("--pp 2 --shard 2 --schedule 1F1B "),
            replicas("--pp 2 --shard 2 --schedule ZBVZeroBubble "),
            replicas("--pp 2 --shard 2 --schedule DualPipe "), replicas("--pp 1 --ep 2 "),
            replicas("--pp 2 --ep 2 --schedule DualPipeV "),
            replicas("--pp 2 --shard 2 --ep 2 --schedule 1F1B "), std::string("--pp 1 --tp 2 "),
            std::string("--pp 2 --tp 2 --schedule 1F1B "),
            std::string("--pp 2 --tp 2 --schedule ZBVZeroBubble ")})
        layouts.push_back(layout + recompute);
  }
  for (const std::string& layout : layouts) compare(layout);
}

// ---- checkpoints ----

std::vector<std::map<std::string, double>> losses_of_run(const std::string& folder) {
  std::vector<std::map<std::string, double>> steps;
  std::ifstream file(folder + "/metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json record = nlohmann::json::parse(line);
    if (record.at("type") != "step") continue;
    std::map<std::string, double>& losses = steps.emplace_back();
    losses["loss"] = record.at("loss");
    losses["grad_norm"] = record.at("grad_norm");
    for (const auto& term : record.at("auxiliary").items()) losses[term.key()] = term.value().at("value");
  }
  return steps;
}

// A run that continues in another layout after each step has the losses of one process.
TEST_F(HybridParity, CheckpointsMoveBetweenLayouts) {
  if (environment("PENSTOCK_ALL_LAYOUTS") != "1")
    GTEST_SKIP()
        << "runs with the label long (PENSTOCK_ALL_LAYOUTS=1); by default MovingJob.* moves a job between "
           "layouts, in threads";
  const std::vector<std::string> layouts{"--pp 4 --schedule Interleaved1F1B",
                                         "--pp 2 --schedule DualPipe",
                                         "--pp 2 --dp 2 --microbatch_size 1 --shard 2 --schedule 1F1B",
                                         "--pp 1 --dp 2 --microbatch_size 1 --shard 1 --ep 2 --schedule 1F1B",
                                         "--pp 1 --dp 1 --microbatch_size 2 --ep 1 --tp 2 --schedule 1F1B",
                                         "--pp 2 --tp 1 --schedule ZBVZeroBubble --recompute block",
                                         "--pp 4 --schedule VHalf",
                                         "--pp 2 --schedule DualPipeV --recompute experts",
                                         "--pp 2 --virtual_stages 2 --recompute none --schedule " + csv(2)};
  const std::string one = (folder_ / "one").string(), moved = (folder_ / "moved").string();
  const auto run = [](const std::string& arguments) {
    const Ended ended = penstock(arguments);
    EXPECT_EQ(ended.exit_code, 0) << arguments << "\n" << ended.output;
  };
  run(fmt::format("train {} --pp 1 --schedule 1F1B --steps {} --run_folder '{}'", config(), layouts.size(),
                  one));
  for (std::size_t i = 0; i < layouts.size(); ++i)
    run(i == 0 ? fmt::format("train {} --run_folder '{}' --steps 1 {}", config(), moved, layouts[i])
               : fmt::format("resume '{}' --steps {} {}", moved, i + 1, layouts[i]));
  const auto expected = losses_of_run(one), losses = losses_of_run(moved);
  ASSERT_EQ(losses.size(), layouts.size());
  ASSERT_EQ(expected.size(), layouts.size());
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    double largest = 0;
    ASSERT_EQ(losses[i].size(), 6u);
    for (const auto& [name, value] : expected[i]) {
      const double difference = std::abs(losses[i].at(name) - value) / value;
      EXPECT_LT(difference, 2e-4) << layouts[i] << ": " << name;
      largest = std::max(largest, difference);
    }
    std::cout << fmt::format("step {} in {:<75}  largest difference {:.1e}\n", i + 1, layouts[i], largest);
  }
}

}  // namespace hybrid_parity_test
}  // namespace penstock::test
