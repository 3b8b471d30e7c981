// What a hybrid model knows about its tokens besides their text: n-grams, structure, platforms, relations,
// parents and padding, against the modules that compute them, over stages, pipelines, graphs and caches.
#include "penstock/hybrid_metadata.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/hybrid.h"
#include "penstock/microbatch.h"
#include "penstock/models/blocks/any_norm.h"
#include "penstock/models/blocks/attention.h"
#include "penstock/models/blocks/attention_metadata.h"
#include "penstock/models/blocks/ngram_embedding.h"
#include "penstock/models/blocks/platform_embedding.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/models/blocks/structure_embedding.h"
#include "penstock/models/blocks/tree_feed_forward.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/models/plan/hybrid_parts.h"
#include "penstock/pipeline.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/models/small_hybrid.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace hybrid_metadata_test {

using namespace std::chrono_literals;
using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

constexpr std::int64_t kVocabulary = 19, kRelations = 3;

// With everything.
HybridOptions full_options(const std::string& pattern) {
  HybridOptions options = small_hybrid(pattern);
  options.embed_scale = true;
  options.ngram_orders = {2, 3};
  options.ngram_buckets = 31;
  options.structure_embedding = true;
  options.structure_kinds = 3;
  options.dependency_levels = 4;
  options.syntax_depths = 5;
  options.sibling_indices = 4;
  options.node_types = 6;
  options.platforms = 3;
  options.embed_norm = "dynamic_tanh";
  if (pattern.find('A') != std::string::npos) options.relations = kRelations;
  options.tree_feed = pattern.find('F') != std::string::npos;
  return options;
}

// Values that are larger than in training, and not zero where a model begins with zeros, so that every part
// has an effect. The same for every stage.
HybridStage made(const HybridOptions& options, const StagePart& part, at::ScalarType dtype = at::kDouble) {
  HybridStage stage = enlarged_stage(options, part, dtype);
  const torch::NoGradGuard no_grad;
  for (auto& item : stage->named_parameters())
    if (item.key() == "relations.weight" || item.key().ends_with(".mix"))
      item.value().copy_(random_tensor(item.value().sizes(), 91));
  return stage;
}
HybridStage made(const HybridOptions& options, at::ScalarType dtype = at::kDouble) {
  return made(options, whole_model(options), dtype);
}

at::Tensor tokens_of(std::int64_t batch, std::int64_t length, std::uint64_t seed = 3) {
  return random_ids(kVocabulary, {batch, length}, seed);
}

// A place before each token, or -1.
at::Tensor parents_of(std::int64_t batch, std::int64_t length) {
  const at::Tensor places = at::arange(length, at::kLong).expand({batch, length});
  return (places - 1 - random_ids(3, {batch, length}, 31)).clamp_min(-1);
}

HybridMetadata metadata_of(std::int64_t batch, std::int64_t length) {
  HybridMetadata metadata;
  metadata.documents = random_ids(5, {batch, length}, 20).eq(0).to(at::kLong).cumsum(1);
  metadata.structure_kinds = random_ids(3, {batch, length}, 21);
  metadata.dependency_levels = random_ids(9, {batch, length}, 22);
  metadata.syntax_depths = random_ids(9, {batch, length}, 23).to(at::kInt);
  metadata.sibling_indices = random_ids(4, {batch, length}, 24);
  metadata.node_types = random_ids(6, {batch, length}, 25);
  metadata.parents = parents_of(batch, length);
  metadata.platforms = random_ids(3, {batch}, 26);
  metadata.relations = random_ids(2, {batch, kRelations, length, length}, 27).to(at::kBool);
  metadata.row_valid_tokens = at::full({batch}, length, at::kLong);
  metadata.row_valid_tokens[0] = length - 2;
  return metadata;
}

// ---- against the modules ----

// Modules and tensors with copies of a model's values; their gradients have the names of the model.
class Copies {
 public:
  explicit Copies(const HybridStage& model) : model_(model) {}

  template <class Holder>
  Holder module(Holder module, const std::string& name) {
    const at::NoGradGuard no_grad;
    module->to(at::kDouble);
    for (auto& item : module->named_parameters()) {
      const std::string full = name + "." + item.key();
      item.value().copy_(model_->named_parameters()[full]);
      all_[full] = item.value();
    }
    return module;
  }
  AnyNorm norm(const NormOptions& options, const std::string& name) {
    AnyNorm made(options);
    module(torch::nn::ModuleHolder<torch::nn::Module>(made.module()), name);
    return made;
  }
  at::Tensor tensor(const std::string& name) { return all_[name] = leaf(model_->named_parameters()[name]); }
  const std::map<std::string, at::Tensor>& all() const { return all_; }

 private:
  HybridStage model_;
  std::map<std::string, at::Tensor> all_;
};

// The model AF with everything, written out.
at::Tensor composed(Copies& copies, const HybridOptions& options, const at::Tensor& tokens,
                    const HybridMetadata& metadata) {
  const HybridParts parts = hybrid_parts(options);
  const std::int64_t batch = tokens.size(0), length = tokens.size(1);
  at::Tensor x = at::embedding(copies.tensor("embed.weight"), tokens) * std::sqrt(16.0);
  x = copies.module(NgramEmbedding(*parts.inputs.ngrams), "ngrams")->forward(x, tokens, metadata.documents);
  x = copies.module(StructureEmbedding(*parts.inputs.structure), "structure")
          ->forward(x, {.structure_kinds = metadata.structure_kinds,
                        .dependency_levels = metadata.dependency_levels,
                        .syntax_depths = metadata.syntax_depths,
                        .sibling_indices = metadata.sibling_indices,
                        .node_types = metadata.node_types});
  x = copies.module(PlatformEmbedding(*parts.inputs.platform), "platform")->forward(x, metadata.platforms);
  x = copies.norm(*parts.inputs.norm, "embed_norm").forward(x);
  Rotary rotary(parts.attention.head_width, options.context, options.rope_theta);
  const AttentionMask mask =
      AttentionMask::causal(length, length)
          .with_documents(metadata.documents)
          .with_valid(metadata.row_valid_tokens)
          .with_bias(relation_bias(metadata.relations, copies.tensor("relations.weight")));
  EXPECT_EQ(mask.added().sizes(), (std::vector<std::int64_t>{batch, 4, length, length}));
  x = x + copies.module(Attention(parts.attention, 0), "blocks.0.attention")
              ->forward(copies.norm(parts.norm, "blocks.0.attention_norm").forward(x),
                        {.turns = rotary.turns(0, length, x), .mask = mask});
  x = x + copies.module(TreeFeedForward(TreeFeedOptions{.width = 16, .feed_width = 24}), "blocks.1.feed")
              ->forward(copies.norm(parts.norm, "blocks.1.feed_norm").forward(x),
                        {.parents = metadata.parents, .documents = metadata.documents});
  return at::linear(copies.norm(parts.norm, "norm").forward(x), copies.tensor("head.weight"));
}

TEST(HybridMetadata, EveryPartIsThatOfItsModule) {
  const HybridOptions options = full_options("AF").resolved();
  HybridStage model = made(options);
  const at::Tensor tokens = tokens_of(2, 11);
  const HybridMetadata metadata = metadata_of(2, 11);
  Copies copies(model);
  const at::Tensor expected = composed(copies, options, tokens, metadata);
  const at::Tensor actual = model->forward_with(tokens, metadata);
  EXPECT_LT(apart(actual, expected), 1e-13);
  for (const at::Tensor& logits : {actual, expected}) mixed_loss({logits}).backward();
  EXPECT_EQ(copies.all().size(), model->named_parameters().size());
  for (const auto& item : model->named_parameters()) {
    EXPECT_GT(item.value().grad().abs().max().item<double>(), 1e-6) << item.key();
    EXPECT_LT(apart(item.value().grad(), copies.all().at(item.key()).grad()), 1e-12) << item.key();
  }
}

TEST(HybridMetadata, WithoutMetadataOnlyNgramsAndTheNormAdd) {
  HybridOptions options = full_options("AFM"), plain = small_hybrid("AFM");
  options.ngram_orders.clear();
  options.embed_norm = "none";
  options.embed_scale = false;
  const at::Tensor tokens = tokens_of(2, 9);
  HybridStage model = made(options);
  const at::Tensor without = model->forward(tokens);
  EXPECT_TRUE(at::equal(without, made(plain)->forward(tokens)));
  // Each kind of metadata alone has an effect.
  const HybridMetadata all = metadata_of(2, 9);
  for (at::Tensor HybridMetadata::*member :
       {&HybridMetadata::documents, &HybridMetadata::structure_kinds, &HybridMetadata::dependency_levels,
        &HybridMetadata::syntax_depths, &HybridMetadata::sibling_indices, &HybridMetadata::node_types,
        &HybridMetadata::parents, &HybridMetadata::platforms, &HybridMetadata::relations,
        &HybridMetadata::row_valid_tokens}) {
    HybridMetadata one;
    one.*member = all.*member;
    EXPECT_GT(difference(model->forward_with(tokens, one), without), 1e-4) << one.keywords().to_string();
  }
  // A model without the parts for it ignores all but documents and padding.
  HybridMetadata rows;
  rows.documents = all.documents;
  rows.row_valid_tokens = all.row_valid_tokens;
  EXPECT_TRUE(at::equal(made(plain)->forward_with(tokens, all), made(plain)->forward_with(tokens, rows)));
}

TEST(HybridMetadata, PlatformsOfRowsAreThoseOfTheirTokens) {
  HybridStage model = made(full_options("F"));
  const at::Tensor tokens = tokens_of(3, 7), rows = torch::tensor({2, 0, 1}, at::kLong);
  HybridMetadata of_rows, of_tokens;
  of_rows.platforms = rows;
  of_tokens.platforms = rows.unsqueeze(1).expand({3, 7}).contiguous();
  EXPECT_TRUE(at::equal(model->forward_with(tokens, of_rows), model->forward_with(tokens, of_tokens)));
}

// ---- the plan ----

TEST(HybridMetadata, ParametersAreThoseOfThePlan) {
  for (const std::string pattern : {"A", "F", "AF", "AEMFA"})
    for (const char* norm : {"none", "rms_norm", "dynamic_tanh"})
      for (const bool attention_feed : {false, true}) {
        SCOPED_TRACE(pattern);
        HybridOptions options = full_options(pattern);
        options.embed_norm = norm;
        options.attention_feed = attention_feed;
        options.tree_feed = options.tree_feed || (attention_feed && pattern == "A");
        HybridStage model(options);
        expect_shapes(*model, parameter_shapes(options));
        std::int64_t count = 0;
        for (const at::Tensor& parameter : model->parameters()) count += parameter.numel();
        EXPECT_EQ(parameter_count(options), count);
      }
}

TEST(HybridMetadata, ATokenUsesOneRowOfEachTable) {
  const HybridOptions options = full_options("AF"), plain = small_hybrid("AF");
  // Two tables of n-grams, five of structure, platforms, the norm (alpha, weight, bias), relations, mix.
  EXPECT_EQ(active_parameter_count(options) - active_parameter_count(plain),
            16 * (2 + 5 + 1) + (1 + 2 * 16) + kRelations * 4 + 16);
  EXPECT_EQ(parameter_count(options) - parameter_count(plain),
            16 * (2 * 31 + (3 + 4 + 5 + 4 + 6) + 3) + (1 + 2 * 16) + kRelations * 4 + 16);
  // Relations of every pair, contracted with the table; mixing with the parent.
  EXPECT_DOUBLE_EQ(training_flops_per_token(options) - training_flops_per_token(plain),
                   3 * (2.0 * kRelations * 4 * 24 + 2 * 16));
}

TEST(HybridMetadata, EveryStageWithAttentionHasTheRelations) {
  const HybridOptions options = full_options("AFAFA");
  const std::vector<StagePart> parts = partition_model(options, 5);
  EXPECT_EQ(stages_of_parameter(parts, options, "relations.weight"), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(stages_of_parameter(parts, options, "ngrams.weight"), std::vector<int>{0});
  const std::vector<PartReport> reports = report_parts(parts, options);
  for (const StagePart& part : parts) {
    HybridStage stage(options, part);
    std::int64_t count = 0;
    for (const auto& item : stage->named_parameters()) count += item.value().numel();
    EXPECT_EQ(reports[std::size_t(part.index)].parameters, count) << "stage " << part.index;
    EXPECT_EQ(stage->named_parameters().contains("relations.weight"), part.index % 2 == 0);
  }
}

// ---- stages and pipelines ----

constexpr int kRows = 4;
constexpr std::int64_t kLength = 10;

// Microbatches of one row, one after the other, in one process.
struct OneProcess {
  std::vector<at::Tensor> losses;
  Gradients gradients;
};
at::Tensor loss_of_row(const at::Tensor& logits, const at::Tensor& targets) {
  return token_loss(logits, targets, double(kLength));
}
OneProcess in_one_process(const HybridOptions& options, const TokenBatch& batch) {
  HybridStage whole = made(options, at::kFloat);
  OneProcess result;
  const StageInputs inputs = trainable_hybrid(options)->inputs(batch);
  const auto keywords = split_tree(inputs.keywords, kRows);
  for (int row = 0; row < kRows; ++row) {
    result.losses.push_back(
        loss_of_row(whole->forward_with(batch.tokens.narrow(0, row, 1), keywords[std::size_t(row)]),
                    batch.targets.narrow(0, row, 1)));
    result.losses.back().backward();
  }
  collect(*whole, result.gradients);
  return result;
}

TEST(HybridMetadata, FourStagesOfAPipelineHaveTheBitsOfOneProcess) {
  for (const std::string pattern : {"AFMF", "AEAF"}) {
    SCOPED_TRACE(pattern);
    HybridOptions options = full_options(pattern);
    options.bos_token = 5;
    HybridMetadata metadata = metadata_of(kRows, kLength);
    metadata.documents = at::Tensor();  // they begin at a token
    metadata.row_valid_slots = torch::tensor({3, 5, 5, 4}, at::kLong);
    metadata.row_block_tokens = 2;
    const TokenBatch batch{.tokens = tokens_of(kRows, kLength),
                           .targets = tokens_of(kRows, kLength, 4),
                           .metadata = metadata.keywords()};
    const OneProcess expected = in_one_process(options, batch);
    std::mutex mutex;
    std::map<std::string, at::Tensor> shared;  // sums over the stages
    comm::run_ranks(4, 60s, [&](comm::World& world) {
      HybridStage stage = made(options, partition_model(options, 4)[std::size_t(world.rank())], at::kFloat);
      const StageInputs inputs = trainable_hybrid(options)->inputs(batch);
      Schedule1F1B schedule(
          PipelineStage(
              StageModule([stage](at::Tensor x, Tree more) mutable { return stage->forward_with(x, more); },
                          {stage.ptr()}),
              world.rank(), 4, at::kCPU),
          kRows, loss_of_row, {world});
      const StepResult result = schedule.step(inputs.args, inputs.keywords, inputs.target);
      const std::lock_guard lock(mutex);
      for (std::size_t row = 0; row < result.losses.size(); ++row)
        EXPECT_TRUE(at::equal(result.losses[row], expected.losses[row].detach())) << "row " << row;
      for (const auto& item : stage->named_parameters()) {
        const at::Tensor gradient = item.value().grad() * kRows, whole = expected.gradients.at(item.key());
        if (item.key() != "relations.weight") {
          EXPECT_TRUE(at::equal(gradient, whole)) << item.key();
          continue;
        }
        at::Tensor& sum = shared[item.key()];
        sum = sum.defined() ? sum + gradient : gradient;
      }
    });
    // Each stage sums over its own blocks first: another order than in one process.
    EXPECT_LT(apart(shared["relations.weight"], expected.gradients.at("relations.weight")), 1e-6);
  }
}

TEST(HybridMetadata, StagesStartWithTheValuesOfTheWhole) {
  HybridOptions options = full_options("AFAF");
  HybridStage whole(options);
  whole->set_initial_values(11);
  const auto all = whole->named_parameters();
  EXPECT_GT(all["ngrams.weight"].std().item<double>(), 0.015);
  EXPECT_EQ(all["relations.weight"].abs().max().item<double>(), 0);
  for (const StagePart& part : partition_model(options, 3)) {
    HybridStage stage(options, part);
    stage->set_initial_values(11);
    for (const auto& item : stage->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), all[item.key()])) << item.key();
  }
}

TEST(HybridMetadata, InputsOfATrainableModelHaveTheMetadataOfTheBatch) {
  HybridOptions options = small_hybrid("A");
  options.bos_token = 5;
  const auto model = trainable_hybrid(options);
  const at::Tensor tokens = tokens_of(2, 6), ones = at::ones({2, 6}, at::kLong), zeros = ones * 0;
  TokenBatch batch{.tokens = tokens, .targets = tokens};
  EXPECT_TRUE(at::equal(model->inputs(batch).keywords["documents"].tensor(), documents_from_bos(tokens, 5)));
  batch.metadata = HybridMetadata{.documents = ones, .parents = zeros - 1}.keywords();
  EXPECT_TRUE(at::equal(model->inputs(batch).keywords["documents"].tensor(), ones));
  EXPECT_TRUE(at::equal(model->inputs(batch).keywords["parents"].tensor(), zeros - 1));
  batch.documents = zeros;  // replaces that of the metadata
  EXPECT_TRUE(at::equal(model->inputs(batch).keywords["documents"].tensor(), zeros));
  batch.metadata = Tree::dict({{"parent", Tree(zeros)}});
  const std::string message = message_of<ValueError>([&] { model->inputs(batch); });
  EXPECT_TRUE(has_text(message, "\"parent\""));
  EXPECT_TRUE(has_text(message, "did you mean parents?"));
}

// ---- graphs and autocast ----

TEST(HybridMetadata, CapturedEqualsEager) {
  for (const std::string pattern : {"AF", "AEM"}) {
    SCOPED_TRACE(pattern);
    HybridOptions options = full_options(pattern);
    options.capacity_factor = pattern == "AEM" ? 1.0 : 0.0;
    const HybridMetadata metadata = metadata_of(2, 8);
    const auto make = [&] {
      HybridStage stage = made(options, at::kFloat);
      return std::make_shared<CalledModule>(std::vector<std::shared_ptr<torch::nn::Module>>{stage.ptr()},
                                            [stage](const Tensors& in) mutable {
                                              HybridMetadata given;
                                              given.documents = in[1];
                                              given.structure_kinds = in[2];
                                              given.node_types = in[3];
                                              given.parents = in[4];
                                              given.platforms = in[5];
                                              given.relations = in[6];
                                              given.row_valid_tokens = in[7];
                                              return Tensors{stage->forward_with(in[0], given)};
                                            });
    };
    expect_captured(make,
                    {tokens_of(2, 8), metadata.documents, metadata.structure_kinds, metadata.node_types,
                     metadata.parents, metadata.platforms, metadata.relations, metadata.row_valid_tokens});
  }
}

TEST(HybridMetadata, SixteenBitProductsKeepTablesAndBiasInTheirDtype) {
  const HybridOptions options = full_options("AFM");
  HybridStage model = made(options, at::kFloat);
  const at::Tensor tokens = tokens_of(2, 9);
  const HybridMetadata metadata = metadata_of(2, 9);
  const at::Tensor expected = model->forward_with(tokens, metadata).detach();
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  const at::Tensor actual = model->forward_with(tokens, metadata);
  EXPECT_LT(apart(actual, expected), 0.03);
  mixed_loss({actual}).backward();
  for (const auto& item : model->named_parameters()) {
    EXPECT_EQ(item.value().grad().scalar_type(), at::kFloat) << item.key();
    EXPECT_TRUE(at::isfinite(item.value().grad()).all().item<bool>()) << item.key();
  }
}

// ---- generation ----

TEST(HybridMetadata, CachedNgramsAreThoseOfTheWholeRow) {
  for (const std::vector<std::int64_t>& orders : {std::vector<std::int64_t>{2}, {4, 2}, {7}})
    for (const std::string pattern : {"AFM", "E"}) {
      HybridOptions options = full_options(pattern);
      options.ngram_orders = orders;
      HybridStage model = made(options);
      model->eval();
      const at::Tensor tokens = tokens_of(2, 20), expected = model->forward(tokens).detach();
      for (const std::vector<std::int64_t>& steps : std::vector<std::vector<std::int64_t>>{
               {20}, {7, 1, 1, 1, 6, 4}, std::vector<std::int64_t>(20, 1), {1, 2, 3, 14}}) {
        const std::unique_ptr<StageCache> cache = model->make_cache(20);
        std::int64_t at = 0;
        for (const std::int64_t count : steps) {
          const at::Tensor logits = model->forward_cached(tokens.narrow(1, at, count), *cache);
          EXPECT_LT(apart(logits, expected.narrow(1, at, count)), 1e-12) << "at " << at;
          at += count;
        }
      }
    }
}

TEST(HybridMetadata, GenerationWithAndWithoutCacheAgrees) {
  HybridOptions options = full_options("AFM");
  options.ngram_orders = {3, 5};
  HybridStage model = made(options);
  for (const std::int64_t length : {1, 6}) {
    const at::Tensor prompt = tokens_of(3, length);
    const auto generated = [&](bool cache) {
      return generate(*model, prompt, {.max_tokens = 15, .temperature = 0.9, .seed = 5, .use_cache = cache});
    };
    EXPECT_TRUE(at::equal(generated(true), generated(false)));
  }
}

// ---- padding ----

// The losses of a model by name.
std::map<std::string, double> losses_of(const HybridStage& model) {
  std::map<std::string, double> all;
  for (const AuxiliaryLoss& loss : model->auxiliary_losses()) all[loss.name] = loss.value.item<double>();
  return all;
}

TEST(HybridMetadata, PaddedRowsAreAsIfCut) {
  for (const std::string pattern : {"A", "M", "E", "AEMF"}) {
    SCOPED_TRACE(pattern);
    HybridStage model = made(full_options(pattern));
    const at::Tensor tokens = tokens_of(1, 13);
    HybridMetadata whole = metadata_of(1, 13), cut = metadata_of(1, 13);
    whole.row_valid_tokens = torch::tensor({9}, at::kInt);
    for (at::Tensor HybridMetadata::*member :
         {&HybridMetadata::documents, &HybridMetadata::structure_kinds, &HybridMetadata::dependency_levels,
          &HybridMetadata::syntax_depths, &HybridMetadata::sibling_indices, &HybridMetadata::node_types,
          &HybridMetadata::parents})
      cut.*member = (cut.*member).narrow(1, 0, 9);
    cut.relations = cut.relations.narrow(2, 0, 9).narrow(3, 0, 9);
    cut.row_valid_tokens = at::Tensor();
    const at::Tensor targets = tokens.roll(-1, 1);
    const auto gradients = [&](const at::Tensor& logits) {
      model->zero_grad();
      loss_of_row(logits.narrow(1, 0, 9), targets.narrow(1, 0, 9)).backward();
      Gradients all;
      collect(*model, all);
      for (auto& [name, gradient] : all) gradient = gradient.clone();
      return all;
    };
    const at::Tensor expected = model->forward_with(tokens.narrow(1, 0, 9), cut);
    const std::map<std::string, double> losses = losses_of(model);
    const Gradients of_cut = gradients(expected);
    const at::Tensor actual = model->forward_with(tokens, whole);
    EXPECT_LT(apart(actual.narrow(1, 0, 9), expected), 1e-12);
    for (const auto& [name, value] : losses_of(model)) EXPECT_NEAR(value, losses.at(name), 1e-12) << name;
    for (const auto& [name, gradient] : gradients(actual))
      EXPECT_LT(apart(gradient, of_cut.at(name)), 1e-12) << name;
    // Counted in other units; the smallest count applies.
    HybridMetadata units = whole;
    units.row_valid_tokens = torch::tensor({12}, at::kLong);
    units.row_valid_blocks = torch::tensor({3}, at::kLong);
    units.base_block_tokens = 3;
    units.row_valid_slots = torch::tensor({5}, at::kLong);
    units.row_block_tokens = 2;
    EXPECT_TRUE(at::equal(model->forward_with(tokens, units), actual));
  }
}

TEST(HybridMetadata, PaddingTakesNoPlaceOfALimitedExpert) {
  HybridOptions options = small_hybrid("E");
  options.capacity_factor = 0.6;
  HybridStage model = made(options);
  const HybridMetadata metadata{.row_valid_tokens = torch::tensor({2, 8, 1}, at::kLong)};
  const at::Tensor tokens = tokens_of(3, 8),
                   valid = at::arange(8).unsqueeze(0).lt(metadata.row_valid_tokens.unsqueeze(1));
  const at::Tensor expected = model->forward_with(tokens, metadata);
  EXPECT_GT(difference(expected, model->forward(tokens)), 1e-3);  // places are scarce
  for (std::uint64_t seed = 40; seed < 46; ++seed) {
    const at::Tensor other = at::where(valid, tokens, tokens_of(3, 8, seed));
    const auto losses = losses_of(model);
    const at::Tensor logits = model->forward_with(other, metadata);
    EXPECT_TRUE(
        at::equal(logits.masked_select(valid.unsqueeze(2)), expected.masked_select(valid.unsqueeze(2))));
    if (seed > 40) {
      EXPECT_EQ(losses_of(model), losses);
    }
  }
  // Rows of padding only: losses are zero, nothing is NaN.
  const at::Tensor empty =
      model->forward_with(tokens, HybridMetadata{.row_valid_tokens = at::zeros({3}, at::kLong)});
  EXPECT_TRUE(at::isfinite(empty).all().item<bool>());
  for (const auto& [name, value] : losses_of(model)) EXPECT_EQ(value, 0) << name;
}

// ---- bad input ----

TEST(HybridMetadata, KeywordsAreReadBack) {
  EXPECT_TRUE(HybridMetadata{}.keywords().is_none());
  HybridMetadata metadata = metadata_of(2, 5);
  metadata.row_valid_blocks = torch::tensor({1, 1}, at::kLong);
  metadata.base_block_tokens = 4;
  const Tree keywords = metadata.keywords();
  EXPECT_EQ(keywords.size(), 12u);
  const Tree again = HybridMetadata::from_keywords(keywords).keywords();
  EXPECT_EQ(again.keys(), keywords.keys());
  for (const std::string& name : keywords.keys())
    if (keywords[name].is_tensor()) {
      EXPECT_TRUE(at::equal(again[name].tensor(), keywords[name].tensor()));
    }
  EXPECT_EQ(again["base_block_tokens"].integer(), 4);
  EXPECT_FALSE(HybridMetadata::from_keywords(Tree::dict({{"parents", Tree()}})).parents.defined());
}

TEST(HybridMetadata, BadMetadataNamesTheMember) {
  HybridStage model = made(full_options("AFM"));
  const auto message = [&](auto change) {
    HybridMetadata metadata = metadata_of(2, 5);
    change(metadata);
    return message_of<ValueError>([&] { model->forward_with(tokens_of(2, 5), metadata.keywords()); });
  };
  using M = HybridMetadata;
  for (at::Tensor M::*member :
       {&M::documents, &M::structure_kinds, &M::dependency_levels, &M::syntax_depths, &M::sibling_indices,
        &M::node_types, &M::parents, &M::platforms, &M::relations, &M::row_valid_tokens, &M::row_valid_blocks,
        &M::row_valid_slots}) {
    M one;
    one.*member = at::zeros({2, 6}, at::kLong);
    const std::string name = one.keywords().keys()[0];
    EXPECT_TRUE(has_text(message([&](M& m) {
                           m.*member = at::zeros({2, 6}, at::kLong);
                         }),
                         "metadata: " + name + ": got Long [2, 6]"))
        << message([&](M& m) {
             m.*member = at::zeros({2, 6}, at::kLong);
           });
    if (member == &M::relations) continue;
    EXPECT_TRUE(has_text(message([&](M& m) { m.*member = at::zeros({2, 5}, at::kFloat); }), name));
  }
  EXPECT_TRUE(has_text(message([](M& m) { m.relations = at::zeros({2, 4, 5, 5}); }), "model.relations"));
  EXPECT_TRUE(has_text(message([](M& m) { m.node_types.fill_(6); }), "model.node_types"));
  EXPECT_TRUE(has_text(message([](M& m) { m.platforms.fill_(3); }), "model.platforms"));
  EXPECT_TRUE(has_text(message([](M& m) { m.parents[1][2] = 2; }), "2 for token 2 of row 1"));
  EXPECT_TRUE(has_text(message([](M& m) { m.row_valid_blocks = m.row_valid_tokens; }), "base_block_tokens"));
  EXPECT_TRUE(has_text(message([](M& m) { m.row_block_tokens = -1; }), "row_valid_slots"));
  const auto of_tree = [&](const Tree& tree) {
    return message_of<ValueError>([&] { model->forward_with(tokens_of(2, 5), tree); });
  };
  const std::string unknown = of_tree(Tree::dict({{"document", Tree(1)}}));
  for (const char* known : {"documents", "relations", "row_valid_slots", "base_block_tokens"})
    EXPECT_TRUE(has_text(unknown, known));
  EXPECT_TRUE(has_text(of_tree(Tree::dict({{"parents", Tree(1)}})), "a tensor"));
  EXPECT_TRUE(has_text(of_tree(Tree::dict({{"base_block_tokens", Tree("4")}})), "a whole number"));
  EXPECT_TRUE(has_text(of_tree(Tree(3)), "a dict"));
}

TEST(HybridMetadata, BadOptionsNameTheirKey) {
  const auto message = [](const std::string& pattern, auto change) {
    HybridOptions options = full_options(pattern);
    change(options);
    return message_of<ConfigError>([&] { options.check(); });
  };
  using O = HybridOptions;
  EXPECT_TRUE(has_text(message("AF", [](O& o) { o.ngram_orders = {2, 1}; }), "model.ngram_orders"));
  EXPECT_TRUE(has_text(message("AF", [](O& o) { o.ngram_orders = {17}; }), "orders from 2 to 16"));
  EXPECT_TRUE(has_text(message("AF", [](O& o) { o.ngram_buckets = 0; }), "model.ngram_buckets"));
  EXPECT_TRUE(has_text(message("AF", [](O& o) { o.syntax_depths = 0; }), "model.syntax_depths"));
  EXPECT_TRUE(has_text(message("AF", [](O& o) { o.platforms = -1; }), "model.platforms"));
  EXPECT_TRUE(has_text(message("AF", [](O& o) { o.embed_norm = "layer_norm"; }), "model.embed_norm"));
  EXPECT_TRUE(has_text(message("AF", [](O& o) { o.relations = -2; }), "model.relations"));
  EXPECT_TRUE(has_text(message("MF", [](O& o) { o.relations = 2; }), "add an A to model.pattern"));
  EXPECT_TRUE(has_text(message("AM", [](O& o) { o.tree_feed = true; }), "model.attention_feed"));
}

}  // namespace hybrid_metadata_test
}  // namespace penstock::models
