// Tests of `penstock compile`, and of `penstock train` with stored graphs, in real processes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "penstock/base/files.h"
#include "tests/command.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace compile_cli_test {

namespace fs = std::filesystem;
using nlohmann::json;

class CompileCli : public ::testing::Test {
 protected:
  CompileCli() {
    fs::create_directories(folder_ / "text");
    for (int file = 0; file < 12; ++file)
      std::ofstream(folder_ / "text" / (std::to_string(file) + ".h"))
          << "int value_" << file << " = " << 17 * file << ";\n"
          << std::string(300, static_cast<char>('a' + file));
    std::ofstream(folder_ / "train.toml")
        << "[model]\npreset = \"tiny\"\nlayers = 4\nwidth = 16\nheads = 2\nkey_value_heads = 2\nfeed_width = "
           "32\ncontext = 16\n"
        << "[layout]\nmicrobatches = 4\nmicrobatch_size = 2\ndevice = \"cpu\"\n"
        << "[training]\nsteps = 3\nwarmup_steps = 2\nvalidate_every = 2\nvalidate_batches = 1\n"
        << "[data]\nvalidation_fraction = 0.3\nsources = [\"" << (folder_ / "text").string() << "\"]\n"
        << "[output]\nsample_tokens = 0\nprogress = \"lines\"\n";
  }
  ~CompileCli() override {
    std::error_code ignored;  // a leftover folder is not a test failure
    remove_tree(folder_, ignored);
  }

  std::string path(const std::string& name) const { return "'" + (folder_ / name).string() + "'"; }
  static Ended penstock(const std::string& arguments, const std::string& variables = {}) {
    return run_command(variables + " '" + environment("PENSTOCK_BIN") + "/penstock' " + arguments,
                       std::chrono::seconds(150));
  }
  Ended compile(const std::string& layout, const std::string& to) const {
    return penstock("compile " + path("train.toml") + " " + layout + " -o " + path(to));
  }
  // A run with graphs into the folder `name`.
  Ended train(const std::string& name, const std::string& layout, const std::string& variables = {}) const {
    return penstock(
        "train " + path("train.toml") + " --compile graph " + layout + " --run_folder " + path(name),
        variables);
  }
  std::string artifact(const std::string& name) const { return " --artifact " + path(name); }

  // The numbers of each step and validation, without times.
  std::vector<std::string> numbers(const std::string& name) const {
    std::vector<std::string> all;
    std::ifstream file(folder_ / name / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const json entry = json::parse(line);
      if (entry.at("type") == "step")
        all.push_back(entry.at("loss").dump() + " " + entry.at("grad_norm").dump());
      if (entry.at("type") == "validation") all.push_back("validation " + entry.at("loss").dump());
    }
    return all;
  }
  // A number of "compiled" in the first step: graphs of all ranks.
  int graphs(const std::string& name, const char* which) const {
    std::ifstream file(folder_ / name / "metrics.jsonl");
    for (std::string line; std::getline(file, line);)
      if (const json entry = json::parse(line); entry.at("type") == "step")
        return entry.contains("compiled") ? entry.at("compiled").at(which).get<int>() : -1;
    return -1;
  }
  // Parameters and optimizer state of the last checkpoint.
  std::map<std::string, std::string> state(const std::string& name) const {
    std::map<std::string, std::string> files;
    std::error_code error;
    for (fs::recursive_directory_iterator it(folder_ / name / "checkpoints", error), end; !error && it != end;
         it.increment(error)) {
      if (it->path().extension() != ".safetensors") continue;
      std::ifstream file(it->path(), std::ios::binary);
      files[fs::relative(it->path(), folder_ / name).string()] = {std::istreambuf_iterator<char>(file), {}};
    }
    return files;
  }
  void expect_same(const std::string& ours, const std::string& captured) const {
    EXPECT_EQ(numbers(ours), numbers(captured));
    EXPECT_GE(numbers(captured).size(), 5u);
    EXPECT_FALSE(state(captured).empty());
    EXPECT_TRUE(state(ours) == state(captured)) << "checkpoints of " << ours << " and " << captured;
  }

  const fs::path folder_ = fs::temp_directory_path() / ("penstock_compile_cli_" + std::to_string(::getpid()));
};

// Captured, captured into a cold cache, loaded from it, and compiled beforehand. By default a pipeline and
// replicas, which share graphs between processes; kept_graphs_job_test trains all layouts in threads, and the
// long form of this test runs them through the command.
TEST_F(CompileCli, StoredGraphsTrainWithTheSameBits) {
  struct Case {
    std::string name, layout;
    int ranks, captures;  // all ranks together, of training and validation
  };
  std::vector<Case> cases = {
      {"pp", "--pp 2 --schedule ZB2P", 2, 4}, {"dp", "--pp 1 --dp 2", 2, 2},  // replicas share their graphs
  };
  const bool all = environment("PENSTOCK_ALL_LAYOUTS") == "1";
  if (all) {
    cases.push_back({"shard", "--pp 1 --dp 2 --shard 2 --dropout 0.1", 2, 4});
    cases.push_back({"balance", "--pp 1 --dp 2 --pattern AEAE --experts 4 --expert_width 16", 2, 2});
    cases.push_back({"tp", "--pp 1 --tp 2", 2, 4});
  }
  for (const Case& each : cases) {
    SCOPED_TRACE(each.layout);
    const std::string name = each.name, cold = name + "-cold",
                      cache = "PENSTOCK_CACHE=" + path(name + "-cache");
    Ended ended = train(cold, each.layout, cache);
    ASSERT_EQ(ended.exit_code, 0) << ended.output;
    if (all || each.name == "pp") {
      ended = train(name, each.layout);
      ASSERT_EQ(ended.exit_code, 0) << ended.output;
      EXPECT_EQ(graphs(name, "first"), 2 * each.ranks);
      EXPECT_EQ(graphs(name, "loaded"), 0);
      expect_same(cold, name);
    }
    const Ended written = compile(each.layout, name + "-artifact");
    ASSERT_EQ(written.exit_code, 0) << written.output;
    EXPECT_EQ(graphs(cold, "first"), each.captures);
    EXPECT_EQ(graphs(cold, "loaded"), 2 * each.ranks - each.captures);
    ended = train(name + "-warm", each.layout, cache);
    ASSERT_EQ(ended.exit_code, 0) << ended.output;
    expect_same(name + "-warm", cold);
    EXPECT_EQ(graphs(name + "-warm", "first"), 0);
    EXPECT_EQ(graphs(name + "-warm", "loaded"), 2 * each.ranks);
    EXPECT_TRUE(has_text(ended.output, "from the cache: "));
    EXPECT_TRUE(has_text(written.output, std::to_string(each.captures) + " graphs of "));
    ended = train(name + "-prepared", each.layout + artifact(name + "-artifact"));
    ASSERT_EQ(ended.exit_code, 0) << ended.output;
    expect_same(name + "-prepared", cold);
    EXPECT_EQ(graphs(name + "-prepared", "first"), 0);
    EXPECT_EQ(graphs(name + "-prepared", "again"), 0);
    EXPECT_EQ(graphs(name + "-prepared", "loaded"), 2 * each.ranks);
    EXPECT_TRUE(has_text(ended.output, "from the artifact: "));
  }
}

TEST_F(CompileCli, ArtifactsThatDoNotFitAreRefusedBeforeTheRunBegins) {
  const std::string layout = "--pp 2 --schedule 1F1B";
  ASSERT_EQ(compile(layout, "artifact").exit_code, 0);
  const auto refused = [&](const std::string& more, const std::string& words) {
    const Ended ended = train("run", layout + " " + more);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(has_text(ended.output, words));
    EXPECT_EQ(ended.output.find("stale"), ended.output.rfind("stale")) << ended.output;  // printed once
    EXPECT_LT(ended.seconds, 60);
    EXPECT_FALSE(fs::exists(folder_ / "run"));
  };
  for (const char* dry : {"", " --dry-run"})
    refused("--rope_theta 500" + artifact("artifact") + dry,
            "it is stale: model.rope_theta is \"500.0\", in the artifact \"10000.0\"");
  refused("--dp 2 --dry-run" + artifact("artifact"), "layout.dp is \"2\", in the artifact \"1\"");
  refused(artifact("nowhere"), "it has no manifest.json");
  EXPECT_EQ(penstock("train " + path("train.toml") + artifact("artifact")).exit_code, 2);
  const Ended dry = train("run", layout + artifact("artifact") + " --dry-run");
  EXPECT_EQ(dry.exit_code, 0) << dry.output;
  EXPECT_TRUE(has_text(dry.output, "graphs: 4 in the artifact"));
  EXPECT_TRUE(has_text(train("run", layout + " --dry-run").output, "graphs: captured in the first step"));
  EXPECT_TRUE(has_text(train("run", layout + " --dry-run", "PENSTOCK_CACHE=" + path("cache")).output,
                       "graphs: loaded from the cache"));
  // One rank finds damage: all end.
  for (const auto& entry : fs::directory_iterator(folder_ / "artifact"))
    if (entry.path().extension() == ".call") fs::resize_file(entry.path(), 100);
  const Ended damaged = train("run", layout + artifact("artifact"));
  EXPECT_EQ(damaged.exit_code, 2) << damaged.output;
  EXPECT_TRUE(has_text(damaged.output, "is not the file that the manifest lists"));
  EXPECT_LT(damaged.seconds, 60);
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(CompileCli, HelpHasExamples) {
  const Ended help = penstock("compile --help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_TRUE(has_text(help.output, "penstock compile my.toml -o compiled"));
  EXPECT_TRUE(has_text(help.output, "penstock train my.toml --compile graph --artifact compiled"));
  EXPECT_TRUE(has_text(penstock("--help").output, "compile"));
}

TEST_F(CompileCli, BadUse) {
  const auto refuses = [&](const std::string& arguments, const std::string& words) {
    const Ended ended = penstock("compile " + path("train.toml") + " " + arguments);
    EXPECT_EQ(ended.exit_code, 2) << arguments << "\n" << ended.output;
    EXPECT_TRUE(has_text(ended.output, words)) << arguments;
  };
  std::ofstream(folder_ / "file") << "text";
  refuses("", "--output");
  refuses("--pp 5 -o " + path("new"), "pp");
  refuses("--compile off -o " + path("new"), "training.compile");
  refuses("--run_folder x -o " + path("new"), "output.run_folder has no effect in penstock compile");
  refuses("--artifact x -o " + path("new"), "training.artifact has no effect in penstock compile");
  refuses("--pp 1 -o " + path("file"), "the folder cannot be made");
  refuses("--pp 1 -o " + path("file/inside"), "the folder cannot be made");
  refuses("--pp 1 -o " + path("text"), "has files that are no artifact");
  refuses("--pp 1 -o /proc/penstock", "the folder cannot be made");
  EXPECT_FALSE(fs::exists(folder_ / "new"));
}

// An artifact that was not finished is not one.
TEST_F(CompileCli, AnInterruptedArtifactIsNotUsed) {
  ASSERT_EQ(compile("--pp 1", "artifact").exit_code, 0);
  fs::remove(folder_ / "artifact" / "manifest.json");
  const Ended ended = train("run", "--pp 1" + artifact("artifact"));
  EXPECT_EQ(ended.exit_code, 2) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "let it finish"));
  EXPECT_EQ(compile("--pp 1", "artifact").exit_code, 0);  // written over what was left
  EXPECT_EQ(train("run", "--pp 1" + artifact("artifact")).exit_code, 0);
}

}  // namespace compile_cli_test
}  // namespace penstock::test
