// Tests of the command `penstock inspect graph`.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace inspect_graph_cli_test {

Ended penstock(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' " + arguments);
}

TEST(InspectGraph, HelpHasAnExample) {
  const Ended ended = penstock("inspect graph --help");
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(has_text(ended.output, "penstock inspect graph --preset tiny --html model.html"));
}

TEST(InspectGraph, TheTrainersModelAndItsFile) {
  const ScratchFolder folder;
  const std::string save = (folder / "model.psgraph").string(), svg = (folder / "model.svg").string(),
                    html = (folder / "model.html").string(), dot = (folder / "model.dot").string();
  const Ended model = penstock("inspect graph --preset tiny --layers 1 --pp 1 --nodes 3 --svg '" + svg +
                               "' --html '" + html + "' --dot '" + dot + "' --save '" + save + "'");
  ASSERT_EQ(model.exit_code, 0) << model.output;
  EXPECT_TRUE(has_text(model.output, "0 write memory"));
  EXPECT_TRUE(has_text(model.output, "saved for backward: "));
  EXPECT_TRUE(has_text(model.output, "blocks.0.attention.query.weight"));
  EXPECT_TRUE(has_text(model.output, "non_alias"));
  EXPECT_TRUE(std::filesystem::file_size(svg) > 1000);
  EXPECT_TRUE(std::filesystem::file_size(dot) > 1000);
  EXPECT_TRUE(std::filesystem::file_size(html) > std::filesystem::file_size(svg));

  const Ended file = penstock("inspect graph '" + save + "' --nodes 3");
  EXPECT_EQ(file.exit_code, 0);
  // Everything except the title and the names of written files.
  const auto body = [](const std::string& output) {
    return output.substr(output.find(" nodes ("), output.find("\nwrote ") - output.find(" nodes ("));
  };
  EXPECT_EQ(body(file.output + "\nwrote "), body(model.output) + "\n");
}

TEST(InspectGraph, KernelsAreRunAndListed) {
  const std::string model = "inspect graph --preset tiny --layers 2 --pp 1 --schedule 1F1B --kernels ";
  const Ended listed = penstock(model + "--sources");
  ASSERT_EQ(listed.exit_code, 0) << listed.output;
  for (const char* text : {"aten::rsqrt", "aten::silu_backward", "rows", "columns", "backward", "of copy",
                           "fused/operators", "extern \"C\" void k0("})
    EXPECT_TRUE(has_text(listed.output, text)) << listed.output;
  const Ended both = penstock(model + "--passes");
  EXPECT_EQ(both.exit_code, 2);
  EXPECT_TRUE(has_text(both.output, "--passes")) << both.output;
  EXPECT_EQ(penstock("inspect graph --preset tiny --sources").exit_code, 2);
}

TEST(InspectGraph, PassesSayWhatTheySave) {
  const std::string model = "inspect graph --preset tiny --layers 1 --pp 1 --schedule 1F1B --nodes 1 ";
  const Ended plain = penstock(model), passed = penstock(model + "--passes");
  ASSERT_EQ(passed.exit_code, 0) << passed.output;
  for (const char* text : {"constant-folding", "common-subexpressions", "view-sinking", "dead-code",
                           "saved for backward", "before: ", "after:  ", "moved (estimate)"})
    EXPECT_TRUE(has_text(passed.output, text)) << passed.output;
  EXPECT_FALSE(has_text(plain.output, "constant-folding"));
  const Ended fewer = penstock(model +
                               "--passes --training.compile graph "
                               "--training.disable_passes common-subexpressions");
  ASSERT_EQ(fewer.exit_code, 0) << fewer.output;
  EXPECT_FALSE(has_text(fewer.output, "common-subexpressions"));
  const Ended unknown =
      penstock(model + "--passes --training.compile graph --training.disable_passes dead_code");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_TRUE(has_text(unknown.output, "did you mean 'dead-code'?")) << unknown.output;
}

TEST(InspectGraph, SaysWhatIsSavedAndRecomputed) {
  const std::string model =
      "inspect graph --preset tiny --layers 2 --pp 1 --schedule 1F1B --nodes 1 --training.compile graph ";
  const Ended budget = penstock(model + "--training.activation_budget 0.4");
  ASSERT_EQ(budget.exit_code, 0) << budget.output;
  for (const char* text : {"activations\n", "recomputed in backward: ", "work again", "blocks.*.attention"})
    EXPECT_TRUE(has_text(budget.output, text)) << text << "\n" << budget.output;
  const Ended policy = penstock(model + "--training.activation_policy 'blocks.*.feed: recompute'");
  ASSERT_EQ(policy.exit_code, 0) << policy.output;
  const Ended unknown = penstock(model + "--training.activation_policy 'blocks.*.food: recompute'");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_TRUE(has_text(unknown.output, "did you mean \"blocks.*.feed\"?")) << unknown.output;
  EXPECT_EQ(penstock(model + "--min-cut --training.activation_budget 0.4").exit_code, 2);
}

// A budget in bytes is for the graph of each stage, and the command shows the graph of the whole model.
TEST(InspectGraph, BudgetsInBytesAreThoseOfAllStages) {
  const std::string model =
      "inspect graph --preset tiny --layers 2 --schedule 1F1B --nodes 1 --training.compile graph "
      "--training.activation_policy '*: save' ";
  const auto with_budget = [&](int pp, const std::string& budget) {
    return penstock(fmt::format("{} --pp {} --training.activation_budget '{}'", model, pp, budget));
  };
  const Ended too_small = with_budget(2, "1 KiB");
  EXPECT_NE(too_small.exit_code, 0);
  EXPECT_TRUE(has_text(too_small.output, "1.0 KiB for each of 2 stages, 2.0 KiB for the whole model"));
  const std::string remedy = "set the budget to \"";
  const std::size_t found = too_small.output.find(remedy);
  ASSERT_NE(found, std::string::npos) << too_small.output;
  const long long whole = std::stoll(too_small.output.substr(found + remedy.size()));
  const std::string half = std::to_string(whole / 2 + 1) + " B";
  const Ended stages = with_budget(2, half);
  EXPECT_EQ(stages.exit_code, 0) << stages.output;
  EXPECT_TRUE(has_text(stages.output, "for each of 2 stages"));
  EXPECT_NE(with_budget(1, half).exit_code, 0);
  const Ended one = with_budget(1, std::to_string(whole) + " B");
  EXPECT_EQ(one.exit_code, 0) << one.output;
  EXPECT_FALSE(has_text(one.output, "for each of"));
}

TEST(InspectGraph, WhatCannotBeReadIsAUsageError) {
  const ScratchFolder folder;
  EXPECT_EQ(penstock("inspect").exit_code, 2);
  const Ended missing = penstock("inspect graph '" + (folder / "none.psgraph").string() + "'");
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_TRUE(has_text(missing.output, "a file that can be read"));
  std::ofstream(folder / "bad.psgraph") << "no graph";
  const Ended bad = penstock("inspect graph '" + (folder / "bad.psgraph").string() + "'");
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_TRUE(has_text(bad.output, "this is not a graph file"));
  EXPECT_EQ(penstock("inspect graph --preset none").exit_code, 2);
}

}  // namespace inspect_graph_cli_test
}  // namespace penstock::test
