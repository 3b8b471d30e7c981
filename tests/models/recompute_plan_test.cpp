// Text of training.recompute, and what it chooses.
#include "penstock/recompute_plan.h"

#include <gtest/gtest.h>

#include <string>

#include "penstock/errors.h"
#include "penstock/hybrid_options.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::models {
namespace recompute_plan_test {

using penstock::test::has_text;
using penstock::test::message_of;

ModelPlan model_of(const std::string& letters) {
  ModelPlan plan;
  for (const char letter : letters) plan.blocks.push_back({.letter = letter});
  return plan;
}

// The blocks that are recomputed, as marks.
std::string chosen(const std::string& text, const std::string& letters) {
  const RecomputePlan plan = parse_recompute(text, model_of(letters));
  std::string marks;
  for (std::size_t i = 0; i < letters.size(); ++i)
    marks +=
        plan.recomputes({.number = static_cast<std::int64_t>(i), .letter = letters[i]}, 0, 0) ? 'R' : '.';
  EXPECT_EQ(plan.any(), marks.find('R') != std::string::npos) << text;
  return marks;
}

TEST(RecomputePlan, Forms) {
  EXPECT_EQ(chosen("none", "AEME"), "....");
  EXPECT_EQ(chosen("block", "AEME"), "RRRR");
  EXPECT_EQ(chosen("attention", "AEMA"), "R..R");
  EXPECT_EQ(chosen("experts", "AEME"), ".R.R");
  EXPECT_EQ(chosen("letters:ME", "AEME"), ".RRR");
  EXPECT_EQ(chosen("pattern:.R.R", "AEME"), ".R.R");
  EXPECT_EQ(chosen("pattern:A.|.E", "AEME"), "R..R");
  EXPECT_EQ(chosen("pattern:....", "AEME"), "....");
}

TEST(RecomputePlan, BlocksOfMultiTokenPredictionFollowTheirLetter) {
  const ModelPlan model = model_of("AE");
  const BlockId further{.number = 2, .letter = 'E'};
  EXPECT_TRUE(parse_recompute("experts", model).chooses(further));
  EXPECT_TRUE(parse_recompute("block", model).chooses(further));
  EXPECT_FALSE(parse_recompute("attention", model).chooses(further));
  EXPECT_FALSE(parse_recompute("pattern:RR", model).chooses(further));
}

TEST(RecomputePlan, MultiTokenPredictionMayHaveALetterOfItsOwn) {
  HybridOptions options{.pattern = "AM"};
  options.multi_token_depth = 1;
  options.multi_token_block = "E";
  const RecomputePlan plan = parse_recompute("experts", options.plan());
  EXPECT_TRUE(plan.chooses({.number = 2, .letter = 'E'}));
  EXPECT_FALSE(plan.chooses({.number = 1, .letter = 'M'}));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { parse_recompute("letters:F", options.plan()); }),
                       "letters of blocks that the model has: AME"));
}

TEST(RecomputePlan, StagesAndMicrobatches) {
  RecomputePlan plan = RecomputePlan::all();
  plan.stages = {1, 3};
  plan.microbatches = {0, 2};
  EXPECT_TRUE(plan.recomputes({}, 1, 2));
  EXPECT_TRUE(plan.recomputes({}, 3, std::nullopt));
  EXPECT_FALSE(plan.recomputes({}, 2, 2));
  EXPECT_FALSE(plan.recomputes({}, 1, 1));
  check_recompute(plan, 4, 3);
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { check_recompute(plan, 3, 3); }),
                       "training.recompute_stages: got 3, expected numbers from 0 to 2"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { check_recompute(plan, 4, 2); }),
                       "training.recompute_microbatches: got 2, expected numbers from 0 to 1"));
}

TEST(RecomputePlan, RefusesWhatTheModelDoesNotHave) {
  const auto refusal = [](const std::string& text) {
    return message_of<ConfigError>([&] { parse_recompute(text, model_of("AEME")); });
  };
  EXPECT_TRUE(has_text(refusal("blocks"), "training.recompute: got \"blocks\", expected none, block"));
  EXPECT_TRUE(has_text(refusal("pattern:.R."), "with 3 marks, expected 4 marks, one for each block"));
  EXPECT_TRUE(has_text(refusal("pattern:.R.RR"), "with 5 marks, expected 4 marks"));
  EXPECT_TRUE(
      has_text(refusal("pattern:.A.R"), "for block 1, expected '.' to keep it, or 'R' or its letter 'E'"));
  EXPECT_TRUE(has_text(refusal("letters:F"), "letters of blocks that the model has: AEM"));
  EXPECT_TRUE(has_text(refusal("letters:"), "at least one letter"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_recompute("experts", model_of("AA")); }),
                       "letters of blocks that the model has: A"));
}

}  // namespace recompute_plan_test
}  // namespace penstock::models
