// Structure metadata on its way from text to the stages: what each rank needs, training in several layouts
// compared with one process, and generation.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/hybrid_metadata.h"
#include "penstock/language_model.h"
#include "penstock/train/data/cpp_structure.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/prompt_structure.h"
#include "penstock/train/job/structure_metadata.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace structure_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::has_text;
using penstock::test::Layout;
using penstock::test::message_of;
using penstock::test::small_data;

using Options = std::vector<std::string>;

const Options kModel = {"--pattern",      "AFME", "--attention_feed",   "false", "--structure",      "cpp",
                        "--expert_width", "16",   "--experts",          "4",     "--state_size",     "4",
                        "--state_chunk",  "8",    "--state_head_width", "8",     "--balance_weight", "0",
                        "--lr",           "0.01"};
Options with(const Options& more) {
  Options all = kModel;
  all.insert(all.end(), more.begin(), more.end());
  return all;
}
const Options kIds = with({"--structure_embedding", "true"});
const Options kAll = with({"--structure_embedding", "true", "--tree_feed", "true", "--relations", "5"});

// Feed-forward part and attention at the last stages, which get nothing but their own metadata.
Options with_pattern(Options options, const std::string& pattern) {
  *std::find(options.begin(), options.end(), "AFME") = pattern;
  return options;
}
const Options kLate = with_pattern(kAll, "MEFA");

std::vector<TokenStructure> structure_of(const std::string& text) {
  CppStructure structure;
  std::vector<std::int64_t> tokens;
  for (const char each : text) tokens.push_back(static_cast<unsigned char>(each));
  std::vector<TokenStructure> found(tokens.size());
  structure.read(tokens, found);
  return found;
}

std::string needs_text(const TrainConfig& config, const std::vector<models::StagePart>& parts) {
  const StructureNeeds needs = structure_needs(config, parts);
  return std::string(needs.ids ? "i" : "-") + (needs.parents ? "p" : "-") + std::to_string(needs.relations);
}

TEST(StructureNeeds, OfTheStagesOfARank) {
  const TrainConfig all = config_of({.name = "one"}, kAll);
  const models::StagePart a{0, 4, 0, 1}, f{1, 4, 1, 2}, m{2, 4, 2, 3}, e{3, 4, 3, 4}, whole{0, 1, 0, 4};
  EXPECT_EQ(needs_text(all, {a}), "i-5");
  EXPECT_EQ(needs_text(all, {f}), "-p0");
  EXPECT_EQ(needs_text(all, {m}), "--0");
  EXPECT_EQ(needs_text(all, {a, e}), "i-5") << "the two stages of a rank";
  EXPECT_EQ(needs_text(all, {whole}), "ip5");
  const TrainConfig late = config_of({.name = "one"}, kLate);
  EXPECT_EQ(needs_text(late, {a}), "i-0");
  EXPECT_EQ(needs_text(late, {e}), "--5");
  EXPECT_EQ(needs_text(config_of({.name = "one"}, with({"--tree_feed", "true", "--multi_token_depth", "1",
                                                        "--multi_token_block", "F"})),
                       {e}),
            "-p0")
      << "multi-token prediction has blocks of its own";
  TrainConfig none = all;
  none.data.structure = "none";
  EXPECT_EQ(needs_text(none, {whole}), "--0");
  EXPECT_FALSE(trains_on_structure(none));
  TrainConfig own = all;
  own.model.type = "mine";
  EXPECT_EQ(needs_text(own, {m}), "ip5") << "nothing is known of the blocks of a registered model";
}

TEST(StructureMetadata, TensorsOfRows) {
  // Two rows of six tokens; the second begins inside of brackets, and another document begins in it.
  const std::string text = "a{b(b)c;b}";
  const std::vector<TokenStructure> found = structure_of(text), other = structure_of("(b");
  std::vector<TokenStructure> rows(found.begin(), found.begin() + 6);
  rows.insert(rows.end(), found.begin() + 6, found.end());
  rows.insert(rows.end(), other.begin(), other.end());
  const std::vector<std::int64_t> documents{7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 8};
  const StructureRows given{.tokens = rows, .documents = documents, .rows = 2, .length = 6};
  const auto metadata =
      models::HybridMetadata::from_keywords(structure_metadata({true, true, 5}, given, at::kCPU));
  metadata.check(2, 6);
  EXPECT_TRUE(at::equal(metadata.parents,
                        at::tensor({-1, -1, 1, 1, 3, 3, -1, -1, -1, -1, -1, 4}, at::kInt).view({2, 6})));
  EXPECT_TRUE(at::equal(metadata.syntax_depths,
                        at::tensor({0, 0, 1, 1, 2, 2, 1, 1, 1, 1, 0, 1}, at::kInt).view({2, 6})));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto at_token = [&](const at::Tensor& tensor) {
      return tensor.view(-1)[static_cast<std::int64_t>(i)].item<int>();
    };
    EXPECT_EQ(at_token(metadata.structure_kinds), rows[i].kind);
    EXPECT_EQ(at_token(metadata.node_types), rows[i].node);
    EXPECT_EQ(at_token(metadata.dependency_levels), rows[i].level);
    EXPECT_EQ(at_token(metadata.sibling_indices), static_cast<int>(rows[i].sibling));
  }
  // Relations of the first row, a{b(b), by hand: rows are queries, columns keys.
  const auto relation = [&](std::int64_t row, std::int64_t which) {
    std::string marks;
    const at::Tensor pairs = metadata.relations[row][which].to(at::kInt).contiguous();
    for (std::int64_t i = 0; i < 36; ++i) {
      if (i > 0 && i % 6 == 0) marks += ' ';
      marks += pairs.data_ptr<int>()[i] != 0 ? 'x' : '.';
    }
    return marks;
  };
  EXPECT_EQ(relation(0, 0), "x..... xx.... ..x... ..xx.. ....x. ....xx") << "same element";
  EXPECT_EQ(relation(0, 1), "x..... xx.... ..x... ..xx.. ....x. ....xx") << "same bracket";
  EXPECT_EQ(relation(0, 2), "...... ...... .x.... .x.... .x.x.. .x.x..") << "brackets around";
  EXPECT_EQ(relation(0, 3), "x..... ...... ..x... ...... ..x.x. ......") << "same name";
  EXPECT_EQ(relation(0, 4), "...... ...... ...... ...... ...... ......") << "there is no fifth relation";
  // The second row, c;b} and (b of another document.
  EXPECT_EQ(relation(1, 0), "x..... xx.... ..x... ..xx.. ....x. .....x");
  EXPECT_EQ(relation(1, 1), "x..... xx.... xxx... xxxx.. ....x. .....x") << "the bracket is before the row";
  EXPECT_EQ(relation(1, 2), "...... ...... ...... ...... ...... ....x.");
  EXPECT_EQ(relation(1, 3), "x..... ...... ..x... ...... ...... .....x") << "names of one document";
  EXPECT_EQ(structure_bytes({true, true, 5}, 2, 6), 2 * 6 * 6 * 4 + 2 * 5 * 36);
  EXPECT_TRUE(structure_metadata({}, given, at::kCPU).is_none());
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         (void)structure_metadata(
                             {true, false, 0},
                             {.tokens = rows, .documents = documents, .rows = 3, .length = 6}, at::kCPU);
                       }),
                       "3 rows of 6 tokens"));
}

TEST(StructureMetadata, OfAnotherBatchIsAnErrorThatNamesIt) {
  const TrainConfig config = config_of({.name = "one"}, kIds);
  const auto model = configured_model(config);
  const std::vector<TokenStructure> found = structure_of("int a; b");
  const std::vector<std::int64_t> documents(8);
  const Tree metadata = structure_metadata(
      {.ids = true}, {.tokens = found, .documents = documents, .rows = 2, .length = 4}, at::kCPU);
  const auto inputs = [&](std::int64_t batch, std::int64_t length) {
    const at::Tensor tokens = at::zeros({batch, length}, at::kLong);
    (void)model->inputs({.tokens = tokens, .targets = tokens, .metadata = metadata});
  };
  inputs(2, 4);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { inputs(3, 4); }), "metadata: structure_kinds"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { inputs(2, 8); }), "[2, 8], one for each token"));
}

struct Outcome {
  std::vector<double> losses, norms;
  double validation = 0;
};

Outcome train(const Layout& layout, const Options& options) {
  const TrainConfig config = config_of(layout, options);
  Outcome seen;
  comm::run_ranks(layout.pp * layout.dp * layout.tp, 120s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    Outcome own;
    for (int step = 0; step < 3; ++step) {
      const StepOutcome outcome = job.train_step();
      own.losses.push_back(outcome.loss);
      own.norms.push_back(outcome.grad_norm);
    }
    own.validation = job.validate();
    if (world.rank() == 0) seen = own;
  });
  return seen;
}

TEST(StructureJob, PipelinesEqualOneProcess) {
  for (const Options& options : {kIds, kAll, kLate}) {
    const Outcome one = train({.name = "one"}, options);
    for (const Layout& layout :
         {Layout{.name = "1F1B", .pp = 2},
          Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
          Layout{.name = "GPipe", .pp = 4, .schedule = "GPipe"}}) {
      const Outcome ours = train(layout, options);
      EXPECT_EQ(ours.losses, one.losses) << layout.name;
      EXPECT_EQ(ours.validation, one.validation) << layout.name;
      for (std::size_t i = 0; i < one.norms.size(); ++i)
        EXPECT_NEAR(ours.norms[i], one.norms[i], 1e-9 * one.norms[i]) << layout.name;
    }
    // The rows of a microbatch are divided over replicas, whose sums are in another order.
    const Outcome replicas = train({.name = "dp", .dp = 2, .microbatch_size = 1}, options);
    for (std::size_t i = 0; i < one.losses.size(); ++i)
      EXPECT_NEAR(replicas.losses[i], one.losses[i], 2e-5 * one.losses[i]);
    Options without = options;
    *std::find(without.begin(), without.end(), "cpp") = "none";
    EXPECT_NE(train({.name = "one"}, without).losses, one.losses) << "structure is used";
  }
}

TEST(PromptStructure, IsThatOfTheWholeText) {
  const TrainConfig config = config_of({.name = "one"}, kAll);
  const std::string text = "int f() { g(a, b); }";
  const std::vector<TokenStructure> found = structure_of(text);
  std::vector<std::int64_t> bytes;
  for (const char each : text) bytes.push_back(static_cast<unsigned char>(each));
  const at::Tensor tokens = at::tensor(bytes, at::kLong).unsqueeze(0);
  const PromptStructure structure(config, at::kCPU);
  const auto metadata = structure.metadata();
  for (const auto& [length, first] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{5, 0}, {6, 5}, {12, 6}, {20, 4}}) {
    const auto part = models::HybridMetadata::from_keywords(metadata(tokens.narrow(1, 0, length), first));
    ASSERT_EQ(part.syntax_depths.size(1), length - first);
    for (std::int64_t i = first; i < length; ++i) {
      EXPECT_EQ(part.syntax_depths[0][i - first].item<int>(), found[static_cast<std::size_t>(i)].depth);
      EXPECT_EQ(part.node_types[0][i - first].item<int>(), found[static_cast<std::size_t>(i)].node);
    }
  }
  EXPECT_FALSE(structure.allows_cache());
  EXPECT_TRUE(PromptStructure(config_of({.name = "one"}, kIds), at::kCPU).allows_cache());
  EXPECT_FALSE(PromptStructure(config_of({.name = "one"}, {}), at::kCPU).metadata());
}

// With what earlier tokens left, token by token, as with all tokens at once; and other text without
// structure.
TEST(PromptStructure, GenerationWithAndWithoutTheCache) {
  const TrainConfig config = config_of({.name = "one"}, kIds);
  const auto trainable = configured_model(config);
  const auto model = trainable->make_stage(whole_model(trainable->plan()));
  model->set_initial_values(3);
  {
    const c10::AutoGradMode no_grad(false);
    for (const auto& entry : model->named_parameters())
      if (has_text(entry.key(), "structure")) entry.value().mul_(100);  // so that structure decides
  }
  const at::Tensor prompt = at::tensor({'f', '(', '{'}, at::kLong).unsqueeze(0);
  const auto text = [&](bool cached, bool with_structure) {
    models::GenerateOptions how{
        .max_tokens = 20, .temperature = 0, .seed = 5, .use_cache = cached, .slide = true};
    if (with_structure) how.metadata = PromptStructure(config, at::kCPU).metadata();
    return models::generate(*model, prompt, how);
  };
  EXPECT_TRUE(at::equal(text(true, true), text(false, true)));
  EXPECT_FALSE(at::equal(text(true, true), text(true, false)));
  const auto refused = models::HybridMetadata{.parents = at::zeros({1, 3}, at::kInt)}.keywords();
  const auto cache = model->make_cache(8);
  EXPECT_TRUE(
      has_text(message_of<NotImplemented>([&] { (void)model->forward_cached_with(prompt, *cache, refused); }),
               "parents"));
}

}  // namespace structure_job_test
}  // namespace penstock::train
