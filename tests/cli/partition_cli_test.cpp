// Tests of the command `penstock partition`.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "penstock/base/files.h"
#include "tests/command.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace partition_cli_test {

namespace fs = std::filesystem;

Ended partition(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' partition " + arguments);
}

nlohmann::json json_of(const std::string& arguments) {
  const Ended ended = partition(arguments + " --json");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  nlohmann::json parsed = nlohmann::json::parse(ended.output, nullptr, false);
  EXPECT_TRUE(parsed.is_object()) << ended.output;
  return parsed;
}

void expect_refused(const std::string& arguments, const std::string& words) {
  const Ended ended = partition(arguments);
  EXPECT_EQ(ended.exit_code, 2) << arguments << ": " << ended.output;
  EXPECT_TRUE(has_text(ended.output, words)) << arguments << ": " << ended.output;
}

class PartitionCli : public ::testing::Test {
 protected:
  PartitionCli() { fs::create_directories(folder_); }
  ~PartitionCli() override {
    std::error_code ignored;  // a leftover folder is not a test failure
    remove_tree(folder_, ignored);
  }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }
  const fs::path folder_ =
      fs::temp_directory_path() / ("penstock_partition_cli_" + std::to_string(::getpid()));
};

constexpr const char* kFourRanks = "--preset hybrid-52 --pp 4 --schedule 1F1B ";

TEST_F(PartitionCli, ReportsEveryStage) {
  const nlohmann::json all = json_of(kFourRanks);
  ASSERT_EQ(all["stages"].size(), 4u);
  std::string letters;
  std::int64_t next = 0, parameters = 0;
  for (const auto& stage : all["stages"]) {
    EXPECT_EQ(stage["first_block"], next);
    next = stage["last_block"].get<std::int64_t>() + 1;
    letters += stage["letters"].get<std::string>();
    parameters += stage["parameters"].get<std::int64_t>();
    EXPECT_NEAR(stage["gib"].get<double>(),
                2.0 * static_cast<double>(stage["parameters"].get<std::int64_t>()) / 1073741824.0, 1e-9);
    std::int64_t kinds = 0;
    for (const auto& [kind, count] : stage["kinds"].items()) kinds += count.get<std::int64_t>();
    EXPECT_EQ(kinds, stage["blocks"]);
  }
  std::string pattern;
  for (int i = 0; i < 13; ++i) pattern += "AEME";
  EXPECT_EQ(letters, pattern);
  EXPECT_GT(parameters, 2'000'000'000);
  EXPECT_TRUE(all["chosen"]["optimal"].get<bool>());
  EXPECT_LT(all["compared"]["cost"]["slowest"].get<double>(),
            0.85 * all["compared"]["weight"]["slowest"].get<double>());
  const Ended text = partition(kFourRanks);
  EXPECT_TRUE(has_text(text.output, "52 blocks, 4 stages on 4 ranks (loop), by cost (estimated)"));
  EXPECT_TRUE(has_text(text.output, "no split is better"));
  EXPECT_TRUE(has_text(text.output, "model.pattern = \"AEME"));
}

// What the command prints as a pattern is what it shows when it is given that pattern.
TEST_F(PartitionCli, ThePatternIsTheSamePartition) {
  const std::string model = "--preset hybrid-tiny --pp 3 --schedule 1F1B ";
  const nlohmann::json first = json_of(model + "--pattern AAEAAMEA --by weight");
  const std::string pattern = first["pattern"];
  EXPECT_EQ(pattern, "AAE|AAME|A");
  const nlohmann::json again = json_of(model + "--pattern '" + pattern + "'");
  EXPECT_EQ(again["by"], "pattern");
  EXPECT_EQ(again["stages"], first["stages"]);
  EXPECT_EQ(json_of(model + "--pattern AAEAAMEA --cuts 3,7")["stages"], first["stages"]);
  const nlohmann::json configured = json_of(model + "--pattern AAEAAMEA --partition weight");
  EXPECT_EQ(configured["by"], "weight");
  EXPECT_EQ(configured["stages"], first["stages"]);
}

TEST_F(PartitionCli, PlacesStagesInEveryWay) {
  const auto ranks = [](const std::string& arguments) {
    std::vector<int> all;
    const nlohmann::json json = json_of("--preset hybrid-52 --pp 4 --minimize rank " + arguments);
    for (const auto& stage : json["stages"]) all.push_back(stage["rank"]);
    return all;
  };
  EXPECT_EQ(ranks("--schedule ZBVZeroBubble"), (std::vector<int>{0, 1, 2, 3, 3, 2, 1, 0}));
  EXPECT_EQ(ranks("--schedule Interleaved1F1B"), (std::vector<int>{0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(ranks("--schedule 1F1B --placement bidirectional"), (std::vector<int>{0, 1, 2, 3, 3, 2, 1, 0}));
  EXPECT_EQ(ranks("--schedule 1F1B --placement v --stages 6"), (std::vector<int>{0, 1, 2, 3, 3, 2}));
  EXPECT_EQ(ranks("--schedule 1F1B --stages 5"), (std::vector<int>{0, 1, 2, 3, 0}));
}

TEST_F(PartitionCli, KeepsMemoryLimits) {
  const std::string line = std::string(kFourRanks) + "--memory-limit ";
  const nlohmann::json all = json_of(line + "12000000000");
  for (const auto& rank : all["ranks"]) EXPECT_LE(rank["bytes"], 12000000000.0);
  EXPECT_FALSE(all["compared"]["count"]["fits"].get<bool>());
  expect_refused(line + "8G", "the smallest that allows a split");
  expect_refused(line + "100M", "alone needs");
  expect_refused(line + "12000000000 --by count", "divide it with --by cost");
  // The smallest limit, as the message has it, is enough; one byte less is not.
  const std::string message = partition(line + "8G").output;
  const std::size_t begin = message.find('(', message.find("at least")) + 1;
  const std::int64_t smallest = std::stoll(message.substr(begin));
  EXPECT_EQ(partition(line + std::to_string(smallest)).exit_code, 0);
  expect_refused(line + std::to_string(smallest - 1), "the smallest that allows a split");
  // Activations count.
  expect_refused(line + std::to_string(smallest) + " --activations 1G", "the smallest that allows a split");
  EXPECT_EQ(partition(line + "20G:20G:20G:20G --activations 1G:2G:1G:0").exit_code, 0);
}

TEST_F(PartitionCli, UsesMeasuredCosts) {
  const auto file = [&](double experts) {
    const auto part = [](double time) {
      return nlohmann::json{{"forward", time / 2}, {"backward", time / 2}, {"kept", 1000}};
    };
    return write("costs.json",
                 nlohmann::json{{"embed", part(0)},
                                {"blocks", {{"attention", part(1)}, {"experts", part(experts)}}},
                                {"head", part(0)},
                                {"kept_by_stage", 0},
                                {"border", 10}}
                     .dump());
  };
  const std::string line =
      "--preset hybrid-tiny --pp 2 --schedule 1F1B --pattern AAAAEE --microbatches 4 --costs '";
  EXPECT_EQ(json_of(line + file(4) + "'")["pattern"], "AAAAE|E");
  EXPECT_EQ(json_of(line + file(2) + "'")["pattern"], "AAAA|EE");
  const nlohmann::json all = json_of(line + file(2) + "'");
  EXPECT_EQ(all["costs"], "measured");
  EXPECT_TRUE(all["activations"].get<bool>());
  // 1F1B keeps two microbatches on the first of two ranks and one on the second, with the input of its own.
  const nlohmann::json without = json_of(line + file(2) + "' --activations 0");
  EXPECT_EQ(all["stages"][0]["bytes"].get<double>() - without["stages"][0]["bytes"].get<double>(),
            2 * (4 * 1000 + 1000));
  EXPECT_EQ(all["stages"][1]["bytes"].get<double>() - without["stages"][1]["bytes"].get<double>(),
            2 * 1000 + 1000 + 10);
}

// Blocks with a window have costs of their own.
TEST_F(PartitionCli, UsesMeasuredCostsOfWindows) {
  const auto file = [&](double with_window) {
    const auto part = [](double time) {
      return nlohmann::json{{"forward", time / 2}, {"backward", time / 2}, {"kept", 1000}};
    };
    return write(
        "costs.json",
        nlohmann::json{
            {"embed", part(0)},
            {"blocks", {{"attention", part(4)}, {"attention with a window of 8", part(with_window)}}},
            {"head", part(0)},
            {"kept_by_stage", 0},
            {"border", 10}}
            .dump());
  };
  const std::string line =
      "--preset hybrid-tiny --pp 2 --schedule 1F1B --pattern AAAAAA --windows 8,8,8,8,0,0 --microbatches 4 "
      "--costs '";
  EXPECT_EQ(json_of(line + file(2) + "'")["pattern"], "AAAA|AA");
  EXPECT_EQ(json_of(line + file(4) + "'")["pattern"], "AAA|AAA");
  const std::string part = "{\"forward\":1,\"backward\":1,\"kept\":1}";
  expect_refused(line +
                     write("one_kind.json", "{\"embed\":" + part + ",\"blocks\":{\"attention\":" + part +
                                                "},\"head\":" + part + ",\"kept_by_stage\":0,\"border\":1}") +
                     "'",
                 "attention with a window of 8");
}

TEST_F(PartitionCli, BadInput) {
  expect_refused("--preset hybrid-52 --cuts 3,2", "increasing numbers from 1 to 51");
  expect_refused("--preset hybrid-52 --cuts 3,,4", "--cuts");
  expect_refused("--preset hybrid-52 --cuts 3,4 --by cost", "--by has no effect");
  expect_refused("--preset hybrid-52 --by pattern", "'|' where a stage ends");
  expect_refused("--preset hybrid-52 --by patern", "did you mean pattern?");
  expect_refused("--preset hybrid-52 --stages 60", "at most 54 stages");
  expect_refused("--preset hybrid-52 --type mine", "the program that registers them");
  expect_refused("--preset hybrid-52 --steps 5", "no effect in penstock partition");
  expect_refused("--preset hybrid-52 --stage 3", "did you mean --stages?");
  expect_refused("--preset hybrid-52 --memory-limit 1:2:3", "one for each of 2 pipeline ranks");
  expect_refused("--preset hybrid-52 --memory-limit x", "--memory-limit");
  expect_refused("--preset hybrid-52 --activations 1:2:3", "each of 4 stages");
  expect_refused("--preset hybrid-52 --minimize time", "stage, rank");
  expect_refused("--preset hybrid-52 --placement bidirectional --stages 3",
                 "one for each rank and direction");
  expect_refused("--preset hybrid-52 --costs /nonexistent", "penstock inspect costs");
  expect_refused("--preset hybrid-52 --costs '" + write("a.json", "[") + "'", "not a JSON object");
  expect_refused("--preset hybrid-52 --costs '" + write("b.json", "{\"embed\": 3}") + "'", "\"embed\"");
  const std::string part = "{\"forward\":1,\"backward\":1,\"kept\":-1}";
  expect_refused("--preset hybrid-52 --costs '" + write("c.json", "{\"embed\":" + part + "}") + "'",
                 "\"embed.kept\": got -1");
  const std::string good = "{\"forward\":1,\"backward\":1,\"kept\":1}";
  expect_refused(
      "--preset hybrid-52 --costs '" +
          write("d.json", "{\"embed\":" + good + ",\"head\":" + good + ",\"blocks\":{\"attention\":" + good +
                              "},\"kept_by_stage\":0,\"border\":0}") +
          "'",
      "also \"experts\", which the model has");
}

TEST_F(PartitionCli, DrawsAPicture) {
  const std::string picture = (folder_ / "parts.svg").string();
  EXPECT_EQ(partition(std::string(kFourRanks) + "--memory-limit 20G -o '" + picture + "'").exit_code, 0);
  std::ifstream file(picture);
  const std::string svg{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(has_text(svg, "<svg "));
  EXPECT_TRUE(has_text(svg, "rank 3"));
  EXPECT_TRUE(has_text(svg, "M state space"));
  EXPECT_TRUE(has_text(svg, "class=\"limit\""));
  std::size_t letters = 0;
  for (std::size_t at = svg.find("class=\"letter\""); at != std::string::npos;
       at = svg.find("class=\"letter\"", at + 1))
    ++letters;
  EXPECT_EQ(letters, 52u);
  EXPECT_TRUE(has_text(partition(std::string(kFourRanks) + "-o -").output, "</svg>"));
}

}  // namespace partition_cli_test
}  // namespace penstock::test
