// The hybrid model: every pattern as one stage and as several, against the transformer, explicit losses and
// its own caches.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/hybrid.h"
#include "penstock/step_context.h"
#include "penstock/transformer.h"
#include "tests/has_text.h"
#include "tests/models/small_hybrid.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace hybrid_test {

using penstock::test::has_text;
using penstock::test::message_of;
using test::collect;
using test::difference;
using test::enlarge;
using test::enlarged_stage;
using test::Gradients;
using test::small_hybrid;

HybridStage made(const HybridOptions& options, const StagePart& part, at::ScalarType dtype = at::kDouble) {
  return enlarged_stage(options, part, dtype);
}
HybridStage made(const HybridOptions& options, at::ScalarType dtype = at::kDouble) {
  return made(options, whole_model(options), dtype);
}

at::Tensor tokens_of(std::int64_t batch, std::int64_t length, std::uint64_t seed = 3) {
  return at::randint(0, 19, {batch, length}, at::detail::createCPUGenerator(seed),
                     at::TensorOptions(at::kLong));
}

const std::vector<std::string> kPatterns = {"A", "M", "E", "F", "AEME", "MAFE", "EEMM"};

TEST(Hybrid, ParametersAreThoseOfThePlan) {
  for (const std::string& pattern : kPatterns)
    for (const bool tie : {false, true})
      for (const bool attention_feed : {false, true}) {
        SCOPED_TRACE(pattern);
        HybridOptions options = small_hybrid(pattern);
        options.tie_head = tie;
        options.attention_feed = attention_feed;
        HybridStage model(options);
        std::map<std::string, std::vector<std::int64_t>> expected, actual;
        for (const ParameterShape& shape : parameter_shapes(options)) expected[shape.name] = shape.shape;
        for (const auto& item : model->named_parameters()) actual[item.key()] = item.value().sizes().vec();
        EXPECT_EQ(actual, expected);
      }
}

TEST(Hybrid, AttentionWithFeedForwardIsTheTransformer) {
  HybridOptions options = small_hybrid("AAA");
  options.attention_feed = true;
  const TransformerOptions same{.vocabulary = 19,
                                .width = 16,
                                .layers = 3,
                                .heads = 4,
                                .key_value_heads = 2,
                                .feed_width = 24,
                                .context = 24};
  HybridStage model = made(options);
  TransformerStage transformer(same);
  transformer->to(at::kDouble);
  transformer->set_initial_values(7);
  enlarge(*transformer);
  const at::Tensor tokens = tokens_of(2, 11), documents = torch::arange(22).reshape({2, 11}).div(4, "floor");
  EXPECT_TRUE(at::equal(model->forward(tokens), transformer->forward(tokens)));
  EXPECT_TRUE(at::equal(model->forward(tokens, documents), transformer->forward(tokens, documents)));
}

// The gradients of the whole model by its own forward and backward.
Gradients gradients_of_whole(const HybridOptions& options, const at::Tensor& tokens, at::Tensor* logits) {
  HybridStage model = made(options);
  *logits = model->forward(tokens);
  token_loss(*logits, tokens, double(tokens.numel())).backward();
  Gradients all;
  collect(*model, all);
  return all;
}

TEST(Hybrid, StagesOneAfterTheOtherHaveTheGradientsOfTheWhole) {
  for (const std::string& pattern : kPatterns) {
    SCOPED_TRACE(pattern);
    const HybridOptions options = small_hybrid(pattern);
    const at::Tensor tokens = tokens_of(2, 13);
    at::Tensor expected;
    const Gradients whole = gradients_of_whole(options, tokens, &expected);
    for (int stages = 1; stages <= int(pattern.size()); ++stages) {
      std::vector<HybridStage> parts;
      std::vector<at::Tensor> inputs, outputs;
      at::Tensor x = tokens;
      for (const StagePart& part : partition_model(options, stages)) {
        parts.push_back(made(options, part));
        inputs.push_back(x);
        outputs.push_back(parts.back()->forward(x));
        x = outputs.back().detach();
        if (!part.has_head()) x.requires_grad_(true);
      }
      EXPECT_TRUE(at::equal(outputs.back(), expected));
      at::Tensor gradient;
      for (std::size_t i = parts.size(); i-- > 0;) {
        if (i + 1 == parts.size())
          token_loss(outputs[i], tokens, double(tokens.numel())).backward();
        else
          outputs[i].backward(gradient);
        if (i > 0) gradient = inputs[i].grad();
      }
      Gradients split;
      for (const HybridStage& part : parts) collect(*part, split);
      ASSERT_EQ(split.size(), whole.size());
      for (const auto& [name, each] : whole)
        EXPECT_LT(difference(split[name], each), 1e-12 * (1 + each.abs().max().item<double>())) << name;
    }
  }
}

// What is minimized: the loss of the tokens plus the weighted auxiliary losses.
double total_loss(HybridStage& model, const at::Tensor& tokens) {
  const torch::NoGradGuard no_grad;
  double total = token_loss(model->forward(tokens), tokens, double(tokens.numel())).item<double>();
  for (const AuxiliaryLoss& loss : model->auxiliary_losses())
    total += loss.weight * loss.value.item<double>();
  return total;
}

TEST(Hybrid, GradientsContainTheAuxiliaryLosses) {
  const HybridOptions options = small_hybrid("AEME");
  HybridStage model = made(options);
  const at::Tensor tokens = tokens_of(2, 9);
  token_loss(model->forward(tokens), tokens, double(tokens.numel())).backward();
  ASSERT_EQ(model->auxiliary_losses().size(), 2u);
  constexpr double kStep = 1e-6;
  int checked = 0;
  for (const auto& item : model->named_parameters()) {
    const at::Tensor values = item.value().detach().view({-1}), gradients = item.value().grad().view({-1});
    for (std::int64_t i = 0; i < values.numel(); i += 1 + values.numel() / 3) {
      const double before = values[i].item<double>();
      values[i] = before + kStep;
      const double above = total_loss(model, tokens);
      values[i] = before - kStep;
      const double below = total_loss(model, tokens);
      values[i] = before;
      // The shares of the experts are constants of the balance loss: no term of theirs is missing.
      EXPECT_NEAR(gradients[i].item<double>(), (above - below) / (2 * kStep), 2e-6) << item.key() << " " << i;
      ++checked;
    }
  }
  EXPECT_GT(checked, 40);
}

TEST(Hybrid, AuxiliaryLossesAreScaledLikeTheLoss) {
  const HybridOptions options = small_hybrid("EA");
  const at::Tensor tokens = tokens_of(2, 6);
  const auto router_gradient = [&](double loss_scale, double auxiliary_scale) {
    HybridStage model = made(options);
    model->set_auxiliary_scale(auxiliary_scale);
    StepContext step;
    step.loss_scale = loss_scale;
    const StepGuard guard(step);
    // Only the auxiliary losses reach the router of the first block.
    model->forward(tokens).mul(0).sum().backward();
    return model->named_parameters()["blocks.0.experts.router.weight"].grad().clone();
  };
  const at::Tensor once = router_gradient(1, 1);
  EXPECT_GT(once.abs().max().item<double>(), 1e-4);
  EXPECT_LT(difference(router_gradient(8, 1), 8 * once), 1e-12);
  EXPECT_LT(difference(router_gradient(1, 0.25), once / 4), 1e-14);
}

TEST(Hybrid, CachedLogitsAreThoseOfTheWholeRow) {
  for (const std::string pattern : {"A", "M", "E", "AEME", "MAFE"})
    for (const std::vector<std::int64_t>& windows : {std::vector<std::int64_t>{}, {3, 0}}) {
      SCOPED_TRACE(pattern);
      HybridOptions options = small_hybrid(pattern);
      if (pattern.size() > 1) options.windows = windows;
      if (pattern == "AEME") options.nope_layers = {0};
      HybridStage model = made(options);
      model->eval();
      const at::Tensor tokens = tokens_of(2, 20);
      const at::Tensor expected = model->forward(tokens).detach();
      for (const std::vector<std::int64_t>& steps : std::vector<std::vector<std::int64_t>>{
               {20}, {7, 1, 1, 1, 6, 4}, std::vector<std::int64_t>(20, 1)}) {
        const std::unique_ptr<StageCache> cache = model->make_cache(20);
        std::int64_t at = 0;
        for (const std::int64_t count : steps) {
          const at::Tensor logits = model->forward_cached(tokens.narrow(1, at, count), *cache);
          EXPECT_LT(difference(logits, expected.narrow(1, at, count)),
                    1e-11 * expected.abs().max().item<double>())
              << "at " << at;
          at += count;
          EXPECT_EQ(cache->length(), at);
        }
      }
    }
}

TEST(Hybrid, ADocumentIsComputedAsIfAlone) {
  for (const std::string pattern : {"A", "M", "AEME"}) {
    SCOPED_TRACE(pattern);
    HybridStage model = made(small_hybrid(pattern));
    model->eval();
    const at::Tensor tokens = tokens_of(1, 14);
    const at::Tensor documents = torch::tensor({{4, 4, 4, 4, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1}}, at::kLong);
    const at::Tensor packed = model->forward(tokens, documents);
    // Rotary positions are relative, so that a document does not notice where it begins.
    EXPECT_LT(difference(packed.narrow(1, 5, 9), model->forward(tokens.narrow(1, 5, 9))), 1e-10);
    EXPECT_LT(difference(packed.narrow(1, 0, 5), model->forward(tokens.narrow(1, 0, 5))), 1e-10);
  }
}

TEST(Hybrid, StagesStartWithTheValuesOfTheWhole) {
  const HybridOptions options = small_hybrid("AEMF");
  HybridStage whole(options);
  whole->set_initial_values(11);
  const auto all = whole->named_parameters();
  for (const StagePart& part : partition_model(options, 3)) {
    HybridStage stage(options, part);
    stage->set_initial_values(11);
    for (const auto& item : stage->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), all[item.key()])) << item.key();
  }
}

TEST(Hybrid, CompiledEqualsEager) {
  for (const std::string pattern : {"AEME", "MF"}) {
    SCOPED_TRACE(pattern);
    const HybridOptions options = small_hybrid(pattern);
    HybridStage eager = made(options, at::kFloat), original = made(options, at::kFloat);
    const auto compiled = graph::compile(original);
    auto fast = compiled;
    const at::Tensor tokens = tokens_of(2, 10);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor expected = eager->forward(tokens), actual = fast->forward(tokens, at::Tensor());
      EXPECT_TRUE(at::equal(actual, expected));
      for (const at::Tensor& logits : {expected, actual}) logits.pow(2).mean().backward();
      for (const auto& item : eager->named_parameters())
        EXPECT_TRUE(at::equal(original->named_parameters()[item.key()].grad(), item.value().grad()))
            << item.key();
    }
  }
}

TEST(Hybrid, BadOptionsNameTheirKey) {
  const auto message = [](auto change) {
    HybridOptions options = small_hybrid("AEME");
    change(options);
    return message_of<ConfigError>([&] { options.check(); });
  };
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.pattern = "AXE"; }), "character 2"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.top_k = 5; }), "model.top_k"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.heads = 3; }), "model.heads"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.state_head_width = 5; }), "model.state_head_width"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.nope_layers = {4}; }), "model.nope_layers"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.windows = {-1}; }), "model.windows"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.norm = "batch"; }), "model.norm"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.router_scores = "max"; }), "model.router_scores"));
  EXPECT_TRUE(has_text(message([](HybridOptions& o) { o.balance_weight = -1; }), "balance"));
  // What the pattern does not use may have any value.
  HybridOptions plain = small_hybrid("MM");
  plain.heads = 3;
  plain.top_k = 99;
  EXPECT_NO_THROW(plain.check());
}

TEST(Hybrid, BadInputsSayWhatIsExpected) {
  HybridStage model = made(small_hybrid("AM"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { model->forward(torch::ones({2, 5})); }), "Long or Int"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { model->forward(tokens_of(1, 25)); }),
                       "at most model.context, 24"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         model->forward(tokens_of(2, 5), torch::zeros({2, 5}));
                       }),
                       "integers [2, 5]"));
  EXPECT_THROW(HybridStage(small_hybrid("AM"), StagePart{0, 1, 0, 3}), ValueError);
}

}  // namespace hybrid_test
}  // namespace penstock::models
