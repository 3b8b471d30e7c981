// Blocks of a hybrid model that a mixture of depths wraps: against the same blocks without it, in training,
// evaluation and generation.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/hybrid.h"
#include "penstock/models/blocks/depth_cache.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/models/hybrid/hybrid_block.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/models/small_hybrid.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace hybrid_depths_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

constexpr std::int64_t kWidth = 16;

HybridOptions routed(const std::string& pattern, std::vector<std::int64_t> layers,
                     const char* kind = "plain") {
  HybridOptions options = small_hybrid(pattern);
  options.state_chunk = 3;
  options.depth_layers = std::move(layers);
  options.depth_capacity = 0.6;
  options.depth_kind = kind;
  options.depth_gamma = 0.7;
  options.depth_weight = 0.2;
  return options;
}

HybridStage built(const HybridOptions& options, const StagePart& part, at::ScalarType dtype = at::kDouble) {
  return enlarged_stage(options, part, dtype);
}
HybridStage built(const HybridOptions& options, at::ScalarType dtype = at::kDouble) {
  return built(options, whole_model(options), dtype);
}

at::Tensor ids(std::int64_t batch, std::int64_t length) { return random_ids(19, {batch, length}, 3); }

TEST(HybridDepths, ParametersAreThoseOfThePlan) {
  for (const char* kind : {"plain", "gamma"}) {
    const HybridOptions options = routed("AEMF", {0, 2, 3}, kind);
    HybridStage model(options);
    expect_shapes(*model, parameter_shapes(options));
    const ModelPlan plan = options.plan(), plain = routed("AEMF", {}).plan();
    EXPECT_EQ(plan.blocks[1].flops_per_token, plain.blocks[1].flops_per_token);
    // Costs are measured once for each kind.
    EXPECT_EQ(plan.blocks[1].kind, "experts");
    EXPECT_EQ(plan.blocks[2].kind, "routed state space");
    for (const std::size_t block : {0u, 2u, 3u}) {
      EXPECT_LT(plan.blocks[block].flops_per_token, 0.62 * plain.blocks[block].flops_per_token);
      EXPECT_GT(plan.blocks[block].flops_per_token, 0.3 * plain.blocks[block].flops_per_token);
    }
  }
}

// ---- one block against the same block without a router ----

const StagePart kMiddle{.index = 1, .count = 3, .first_block = 0, .end_block = 1};  // hidden states only

// The stage without a router, sharing the parameters of `wrapped`.
HybridStage unwrapped(const HybridOptions& options, HybridStage& wrapped) {
  HybridOptions plain = options;
  plain.depth_layers.clear();
  HybridStage stage(plain, kMiddle);
  stage->to(at::kDouble);
  const auto shared = wrapped->named_parameters();
  for (auto& item : stage->named_parameters()) {
    at::Tensor parameter = item.value();
    parameter.set_data(shared[item.key()].detach());
  }
  stage->eval();  // its auxiliary losses have no gradients
  return stage;
}

std::vector<std::int64_t> chosen_of(const at::Tensor& logits, bool training, double capacity) {
  std::vector<std::int64_t> places(static_cast<std::size_t>(logits.size(0)));
  std::iota(places.begin(), places.end(), 0);
  const auto value = [&](std::int64_t place) { return logits[place].item<double>(); };
  if (training) {
    std::sort(places.begin(), places.end(), [&](auto a, auto b) { return value(a) > value(b); });
    places.resize(static_cast<std::size_t>(std::llround(capacity * double(logits.size(0)))));
    std::sort(places.begin(), places.end());
  } else {
    places.erase(std::remove_if(places.begin(), places.end(), [&](auto place) { return value(place) <= 0; }),
                 places.end());
  }
  return places;
}

// What the block adds to the chosen tokens [places, width] of one row. Attention is given the whole row, with
// documents that separate the chosen tokens from the others: positions and windows are those of the row. The
// other blocks are given a row that consists of the chosen tokens.
at::Tensor added_by(HybridStage& plain, const std::string& letter, const at::Tensor& row,
                    const at::Tensor& documents, const std::vector<std::int64_t>& places) {
  const at::Tensor index = torch::tensor(places, at::kLong);
  const at::Tensor tokens = row.index_select(0, index);
  if (letter == "A") {
    const at::Tensor others = at::ones({row.size(0)}, at::kLong).index_fill(0, index, 0);
    const at::Tensor own = (documents.defined() ? documents * 2 : at::zeros_like(others)) + others;
    const at::Tensor whole = plain->forward(row.unsqueeze(0), own.unsqueeze(0))[0];
    return whole.index_select(0, index) - tokens;
  }
  const at::Tensor own = documents.defined() ? documents.index_select(0, index).unsqueeze(0) : at::Tensor();
  return plain->forward(tokens.unsqueeze(0), own)[0] - tokens;
}

at::Tensor by_rows(HybridStage& wrapped, HybridStage& plain, const at::Tensor& x,
                   const at::Tensor& documents) {
  const auto parameters = wrapped->named_parameters();
  const at::Tensor* gamma = parameters.find("blocks.0.depth.gamma");
  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    const at::Tensor logits = at::mv(x[row], parameters["blocks.0.depth.router.weight"][0]) +
                              parameters["blocks.0.depth.router.bias"];
    const auto places = chosen_of(logits, wrapped->is_training(), wrapped->options().depth_capacity);
    if (places.empty()) {
      rows.push_back(x[row]);
      continue;
    }
    const at::Tensor index = torch::tensor(places, at::kLong);
    at::Tensor added = added_by(plain, wrapped->options().pattern, x[row],
                                documents.defined() ? documents[row] : documents, places) *
                       at::sigmoid(logits.index_select(0, index)).unsqueeze(1);
    if (gamma != nullptr) added = added * *gamma;
    rows.push_back(x[row].index_add(0, index, added));
  }
  return at::stack(rows);
}

struct RoutedCase {
  std::string letter;
  const char* kind;
  std::int64_t window;
  bool documents, training;
};

TEST(HybridDepths, ABlockSeesTheChosenTokensAsARow) {
  std::vector<RoutedCase> cases;
  for (const char* letter : {"A", "M", "E", "F"})
    for (const char* kind : {"plain", "gamma"})
      for (const bool training : {true, false})
        cases.push_back({letter, kind, std::string(letter) == "A" ? 5 : 0, kind[0] == 'g', training});
  for (const std::int64_t window : {0, 2, 13}) cases.push_back({"A", "plain", window, true, true});
  for (const RoutedCase& each : cases) {
    SCOPED_TRACE(testing::Message() << each.letter << " " << each.kind << " window " << each.window
                                    << (each.training ? " training" : " evaluation"));
    HybridOptions options = routed(each.letter, {0}, each.kind);
    options.windows = {each.window};
    options.attention_feed = each.window != 2;
    HybridStage wrapped = built(options, kMiddle);
    HybridStage plain = unwrapped(options, wrapped);
    wrapped->train(each.training);
    const at::Tensor x = leaf(random_tensor({3, 20, kWidth}, 11));
    const at::Tensor documents =
        each.documents ? random_ids(2, {3, 20}, 12).cumsum(1).div(3, "floor") : at::Tensor();
    const at::Tensor actual = wrapped->forward(x, documents),
                     expected = by_rows(wrapped, plain, x, documents);
    EXPECT_GT(apart(expected, x), 1e-3);
    EXPECT_LT(apart(actual, expected), 1e-12);
    // Auxiliary losses enter the gradient of x in training; without them it is that of the reference.
    HybridOptions silent = options;
    silent.depth_weight = silent.balance_weight = silent.router_z_weight = 0;
    HybridStage quiet = built(silent, kMiddle);
    quiet->train(each.training);
    Tensors of{x}, own{x};
    for (const auto& item : plain->named_parameters()) {
      of.push_back(item.value());
      own.push_back(quiet->named_parameters()[item.key()]);
    }
    const Tensors mine = gradients({quiet->forward(x, documents)}, own), theirs = gradients({expected}, of);
    for (std::size_t i = 0; i < of.size(); ++i) EXPECT_LT(apart(mine[i], theirs[i]), 1e-11) << i;
  }
}

// The losses of experts are means over the tokens that reach them.
TEST(HybridDepths, LossesOfExpertsCountChosenTokens) {
  const HybridOptions options = routed("E", {0});
  HybridStage wrapped = built(options, kMiddle), plain = unwrapped(options, wrapped);
  const at::Tensor x = random_tensor({2, 10, kWidth}, 5);
  wrapped->forward(x);
  const auto parameters = wrapped->named_parameters();
  const at::Tensor logits = at::matmul(x, parameters["blocks.0.depth.router.weight"][0]);
  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < 2; ++row)
    rows.push_back(x[row].index_select(
        0, torch::tensor(chosen_of(logits[row], true, options.depth_capacity), at::kLong)));
  plain->forward(at::stack(rows));
  ASSERT_EQ(wrapped->auxiliary_losses().size(), 3u);
  ASSERT_EQ(plain->auxiliary_losses().size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(wrapped->auxiliary_losses()[i].name, plain->auxiliary_losses()[i].name);
    EXPECT_LT(apart(wrapped->auxiliary_losses()[i].value, plain->auxiliary_losses()[i].value), 1e-13);
  }
  EXPECT_EQ(wrapped->auxiliary_losses()[2].name, "depth_router");
  wrapped->eval();
  wrapped->forward(x);
  EXPECT_TRUE(wrapped->auxiliary_losses().empty());
}

// A router that knows nothing: each of the two losses is log 2, and so is their mean.
TEST(HybridDepths, TheLossIsTheMeanOverTheBlocks) {
  HybridStage model = built(routed("FFF", {0, 2}));
  const torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters())
    if (has_text(item.key(), "router")) item.value().zero_();
  model->forward(ids(2, 8));
  ASSERT_EQ(model->auxiliary_losses().size(), 1u);
  EXPECT_NEAR(model->auxiliary_losses()[0].value.item<double>(), std::log(2.0), 1e-14);
  EXPECT_EQ(model->auxiliary_losses()[0].weight, 0.2);
}

// Padding and relations between tokens, which a block gets with its mask, are those of the chosen tokens.
TEST(HybridDepths, PaddingAndBiasGoWithTheTokens) {
  HybridOptions options = routed("A", {0});
  options.windows = {6};
  HybridOptions without = options;
  without.depth_layers.clear();
  HybridBlock wrapped(options, hybrid_parts(options.resolved()), 0),
      plain(without, hybrid_parts(without.resolved()), 0);
  for (HybridBlock& block : {std::ref(wrapped), std::ref(plain)}) {
    block->to(at::kDouble);
    block->initialize({.seed = 4, .deviation = 0.3, .residual = 0.3});
  }
  const at::Tensor x = random_tensor({2, 15, kWidth}, 21), bias = leaf(random_tensor({1, 4, 15, 15}, 22)),
                   valid = torch::tensor({15, 9}, at::kLong);
  Rotary rotary(4, 24, 10000);
  const AttentionMask mask = AttentionMask::causal(15, 15).with_valid(valid).with_bias(bias);
  const at::Tensor turns = rotary.turns(0, 15, x);
  for (const bool training : {true, false}) {
    wrapped->train(training);
    const at::Tensor actual = wrapped->forward(x, {.attention = {.turns = turns, .mask = mask}}).hidden;
    const auto parameters = wrapped->named_parameters();
    const at::Tensor logits = at::matmul(x, parameters["depth.router.weight"][0]);
    at::Tensor chosen = at::zeros({2, 15}, at::kLong);
    for (std::int64_t row = 0; row < 2; ++row)
      for (const std::int64_t place : chosen_of(logits[row], training, options.depth_capacity))
        chosen[row][place] = 1;
    const at::Tensor whole =
        plain->forward(x, {.attention = {.turns = turns, .mask = mask.with_documents(chosen)}}).hidden;
    const at::Tensor weight = (chosen * at::sigmoid(logits)).unsqueeze(-1);
    const at::Tensor expected = x + weight * (whole - x);
    EXPECT_LT(apart(actual, expected), 1e-12);
    EXPECT_LT(apart(gradients({actual}, {bias})[0], gradients({expected}, {bias})[0]), 1e-12);
  }
}

// ---- whole models ----

const std::vector<std::pair<std::string, std::vector<std::int64_t>>> kModels = {
    {"AEMF", {0, 1, 2, 3}}, {"AEME", {1, 3}}, {"MAMA", {0, 1}}, {"AAEF", {1}}};

// Tokens that are not active leave the caches of a block as they were.
TEST(HybridDepths, GenerationEqualsTheEvaluationOfTheRow) {
  for (const auto& [pattern, layers] : kModels)
    for (const std::vector<std::int64_t>& windows : {std::vector<std::int64_t>{}, {3, 0}}) {
      SCOPED_TRACE(pattern);
      HybridOptions options = routed(pattern, layers, windows.empty() ? "gamma" : "plain");
      options.windows = windows;
      options.attention_feed = windows.empty();
      HybridStage model = built(options);
      model->eval();
      const at::Tensor tokens = ids(3, 20);
      const at::Tensor expected = model->forward(tokens).detach();
      for (const std::vector<std::int64_t>& steps : std::vector<std::vector<std::int64_t>>{
               {20}, {7, 1, 1, 1, 6, 4}, std::vector<std::int64_t>(20, 1)}) {
        const std::unique_ptr<StageCache> cache = model->make_cache(20);
        std::int64_t at = 0;
        for (const std::int64_t count : steps) {
          const at::Tensor logits = model->forward_cached(tokens.narrow(1, at, count), *cache);
          EXPECT_LT(apart(logits, expected.narrow(1, at, count)), 1e-11) << "at " << at;
          at += count;
        }
      }
      // The number of tokens that a router accepts differs between the rows, or the test says little.
      model->train();
      EXPECT_GT(apart(model->forward(tokens), expected), 1e-3);
    }
}

TEST(DepthCache, AForwardThatDidNotCompleteIsForgotten) {
  DepthCache cache;
  const at::Tensor yes = at::ones({2, 3}, at::kBool), no = at::zeros({2, 3}, at::kBool);
  EXPECT_TRUE(at::equal(cache.put(1, 0, yes), yes));
  EXPECT_TRUE(at::equal(cache.put(1, 3, yes), at::cat({yes, yes}, 1)));
  EXPECT_TRUE(at::equal(cache.put(1, 3, no), at::cat({yes, no}, 1)));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { cache.put(1, 7, no); }), "at least 7"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { cache.put(1, 3, no.narrow(0, 0, 1)); }), "block 1"));
  EXPECT_THROW(cache.put(2, 3, no), ValueError);
}

TEST(HybridDepths, TheChoiceOfEvaluationDoesNotDependOnLaterTokens) {
  HybridStage model = built(routed("AEMF", {0, 1, 2, 3}));
  model->eval();
  const at::Tensor tokens = ids(2, 18);
  const at::Tensor whole = model->forward(tokens);
  EXPECT_LT(apart(model->forward(tokens.narrow(1, 0, 11)), whole.narrow(1, 0, 11)), 1e-11);
}

double total_of(HybridStage& model, const at::Tensor& tokens) {
  const torch::NoGradGuard no_grad;
  double total = token_loss(model->forward(tokens), tokens, double(tokens.numel())).item<double>();
  for (const AuxiliaryLoss& loss : model->auxiliary_losses())
    total += loss.weight * loss.value.item<double>();
  return total;
}

TEST(HybridDepths, GradientsContainTheLossOfTheRouters) {
  HybridOptions options = routed("AEMF", {0, 1, 3}, "gamma");
  options.windows = {4, 0};
  HybridStage model = built(options);
  const at::Tensor tokens = ids(2, 9);
  token_loss(model->forward(tokens), tokens, double(tokens.numel())).backward();
  ASSERT_EQ(model->auxiliary_losses().size(), 3u);
  constexpr double kStep = 1e-6;
  int checked = 0;
  for (const auto& item : model->named_parameters()) {
    const at::Tensor values = item.value().detach().view({-1}), gradient = item.value().grad().view({-1});
    for (std::int64_t i = 0; i < values.numel(); i += 1 + values.numel() / 3) {
      const double before = values[i].item<double>();
      values[i] = before + kStep;
      const double above = total_of(model, tokens);
      values[i] = before - kStep;
      const double below = total_of(model, tokens);
      values[i] = before;
      EXPECT_NEAR(gradient[i].item<double>(), (above - below) / (2 * kStep), 5e-6) << item.key() << " " << i;
      ++checked;
    }
  }
  EXPECT_GT(checked, 60);
}

TEST(HybridDepths, StagesOneAfterTheOtherHaveTheGradientsOfTheWhole) {
  const HybridOptions options = routed("AEMF", {0, 2, 3}, "gamma");
  const at::Tensor tokens = ids(2, 13);
  HybridStage model = built(options);
  const at::Tensor expected = model->forward(tokens);
  token_loss(expected, tokens, double(tokens.numel())).backward();
  Gradients whole;
  collect(*model, whole);
  for (const int stages : {2, 4}) {
    std::vector<HybridStage> parts;
    std::vector<at::Tensor> inputs, outputs;
    at::Tensor x = tokens;
    for (const StagePart& part : partition_model(options, stages)) {
      parts.push_back(built(options, part));
      inputs.push_back(x);
      outputs.push_back(parts.back()->forward(x));
      x = outputs.back().detach();
      if (!part.has_head()) x.requires_grad_(true);
    }
    EXPECT_TRUE(at::equal(outputs.back(), expected));
    token_loss(outputs.back(), tokens, double(tokens.numel())).backward();
    for (std::size_t i = parts.size() - 1; i-- > 0;) outputs[i].backward(inputs[i + 1].grad());
    Gradients split;
    for (const HybridStage& part : parts) collect(*part, split);
    ASSERT_EQ(split.size(), whole.size());
    for (const auto& [name, each] : whole) EXPECT_LT(apart(split[name], each), 1e-12) << name;
  }
}

TEST(HybridDepths, CompiledEqualsEager) {
  HybridOptions options = routed("AEMF", {0, 1, 2}, "gamma");
  options.windows = {3, 0};
  HybridStage eager = built(options, at::kFloat), original = built(options, at::kFloat);
  const auto compiled = graph::compile(original);
  auto fast = compiled;
  const at::Tensor tokens = ids(2, 10);
  for (int step = 0; step < 2; ++step) {
    const at::Tensor expected = eager->forward(tokens), actual = fast->forward(tokens, at::Tensor());
    EXPECT_TRUE(at::equal(actual, expected));
    for (const at::Tensor& logits : {expected, actual}) logits.pow(2).mean().backward();
    for (const auto& item : eager->named_parameters())
      EXPECT_TRUE(at::equal(original->named_parameters()[item.key()].grad(), item.value().grad()))
          << item.key();
  }
}

TEST(HybridDepths, BadOptionsNameTheirKey) {
  const auto message = [](auto change) {
    HybridOptions options = routed("AEME", {1});
    change(options);
    return message_of<ConfigError>([&] { options.check(); });
  };
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.depth_layers = {4}; }), "model.depth_layers: got 4"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.depth_layers = {-1}; }), "from 0 to 3"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.depth_layers = {1, 2, 1}; }), "1 twice"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.depth_capacity = 0; }), "model.depth_capacity"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.depth_kind = "deep"; }), "model.depth_kind"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.depth_gamma = 0; }), "model.depth_gamma"));
}

// ---- with metadata ----

// Padding is chosen last, and parents and padding go with the chosen tokens: whatever the padding is, the
// other tokens and all losses are the same.
TEST(HybridDepths, PaddingChangesNothing) {
  HybridOptions options = routed("AEMFA", {0, 1, 2, 3, 4});
  options.attention_feed = options.tree_feed = true;
  options.windows = {0, 0, 0, 0, 5};
  HybridStage model = built(options);
  const at::Tensor tokens = ids(3, 20), counts = torch::tensor({20, 13, 16});
  const at::Tensor padding = at::arange(20).unsqueeze(0).ge(counts.unsqueeze(1));
  HybridMetadata metadata;
  metadata.row_valid_tokens = counts;
  metadata.parents = at::arange(20).sub(2).clamp_min(-1).expand({3, 20});
  const auto run = [&](const at::Tensor& of) {
    std::vector<at::Tensor> results{model->forward_with(of, metadata).masked_fill(padding.unsqueeze(-1), 0)};
    for (const AuxiliaryLoss& loss : model->auxiliary_losses()) results.push_back(loss.value);
    return results;
  };
  for (const bool training : {true, false}) {
    model->train(training);
    const std::vector<at::Tensor> one = run(tokens), other = run(at::where(padding, 18 - tokens, tokens));
    ASSERT_EQ(one.size(), other.size());
    ASSERT_EQ(one.size(), training ? 4U : 1U);
    for (std::size_t i = 0; i < one.size(); ++i)
      EXPECT_LT((one[i] - other[i]).abs().max().item<double>(), 1e-12) << i;
  }
}

// A token does not see a parent that does not go through the block, nor in training nor in evaluation.
TEST(HybridDepths, ParentsThatAreNotChosenAreNone) {
  HybridOptions options = routed("F", {0});
  options.tree_feed = true;
  HybridStage model = built(options);
  {
    const torch::NoGradGuard no_grad;
    model->named_parameters()["blocks.0.feed.mix"].fill_(1);
  }
  const at::Tensor tokens = ids(2, 12);
  for (const bool training : {true, false}) {
    model->train(training);
    const auto logits = [&](const at::Tensor& parents) {
      HybridMetadata metadata;
      metadata.parents = parents;
      return model->forward_with(tokens, metadata);
    };
    // Which tokens go through the block: those that differ from the embedding's own logits.
    const auto parameters = model->named_parameters();
    const at::Tensor embedding = at::embedding(parameters["embed.weight"], tokens),
                     router = at::linear(embedding, parameters["blocks.0.depth.router.weight"],
                                         parameters["blocks.0.depth.router.bias"])
                                  .squeeze(-1);
    const at::Tensor active =
        training
            ? at::zeros_like(router, at::kBool)
                  .scatter(
                      1,
                      std::get<1>(router.topk(DepthOptions{.width = kWidth, .capacity = 0.6}.chosen(12), 1)),
                      true)
            : router.gt(0);
    const at::Tensor parents = at::arange(12).sub(1).expand({2, 12}).clone();
    const at::Tensor seen = active.gather(1, parents.clamp_min(0)).logical_and(parents.ge(0));
    EXPECT_LT(
        (logits(parents) - logits(parents.masked_fill(seen.logical_not(), -1))).abs().max().item<double>(),
        1e-12);
    // Parents matter: without any, results differ.
    EXPECT_GT((logits(parents) - logits(at::full_like(parents, -1))).abs().max().item<double>(), 1e-3);
  }
}

// In evaluation the block sees all tokens, but those that are not active take no place of a limited expert.
TEST(HybridDepths, InactiveTokensTakeNoPlaceOfAnExpert) {
  HybridOptions options = routed("E", {0});
  options.capacity_factor = 0.5;
  HybridStage model = built(options);
  model->eval();
  const auto parameters = model->named_parameters();
  const at::Tensor logits = at::linear(parameters["embed.weight"], parameters["blocks.0.depth.router.weight"],
                                       parameters["blocks.0.depth.router.bias"])
                                .squeeze(-1);
  const at::Tensor active = logits.gt(0).nonzero().squeeze(-1), others = logits.le(0).nonzero().squeeze(-1);
  ASSERT_GE(active.numel(), 3);
  ASSERT_GE(others.numel(), 3);
  const auto row = [](const at::Tensor& of, std::int64_t seed) {
    return of.index_select(0, random_ids(of.numel(), {12}, static_cast<std::uint64_t>(seed)));
  };
  const at::Tensor second = row(active, 5);
  const at::Tensor one = model->forward(at::stack({row(others, 1), second})),
                   other = model->forward(at::stack({row(others, 2), second}));
  EXPECT_LT((one[1] - other[1]).abs().max().item<double>(), 1e-12);
}

}  // namespace hybrid_depths_test
}  // namespace penstock::models
