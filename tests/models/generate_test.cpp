#include "penstock/transformer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "penstock/errors.h"
#include "penstock/models/blocks/kv_cache.h"
#include "penstock/models/transformer/transformer_access.h"
#include "tests/has_text.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace generate_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

// Relative to the largest logit: products are summed in another order.
double tolerance(at::ScalarType dtype, const at::Tensor& logits) {
  return (dtype == at::kDouble ? 1e-12 : 1e-5) * logits.abs().max().item<double>();
}

TEST(KvCache, CachedLogitsAreTheUncachedOnes) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat})
    for (const std::int64_t key_heads : {1, 2, 4}) {
      TransformerOptions options = small();
      options.key_value_heads = key_heads;
      TransformerStage model = made(options, dtype);
      const at::Tensor tokens = tokens_for(options, 3, 12);
      const at::Tensor expected = model->forward(tokens).detach();
      // A prompt, single tokens, several at once.
      KvCache cache(options, 12);
      for (const std::vector<std::int64_t>& steps :
           std::vector<std::vector<std::int64_t>>{{5, 1, 1, 3, 2}, {1, 1, 1, 1, 8}, {12}}) {
        cache.clear();
        std::int64_t at = 0;
        for (const std::int64_t count : steps) {
          const at::Tensor logits =
              TransformerAccess::forward_cached(*model, tokens.narrow(1, at, count), cache);
          EXPECT_FALSE(logits.requires_grad());
          EXPECT_LT(difference(logits, expected.narrow(1, at, count)), tolerance(dtype, expected))
              << "at " << at << ", key heads " << key_heads;
          at += count;
          EXPECT_EQ(cache.length(), at);
        }
      }
    }
}

TEST(KvCache, StagesEachWithItsOwn) {
  const TransformerOptions options = small();
  TransformerStage whole = made(options), first = made(options, partition_model(options, 2)[0]),
                   second = made(options, partition_model(options, 2)[1]);
  KvCache all(options, 12), a(options, 12), b(options, 12);
  const at::Tensor tokens = tokens_for(options, 2, 6);
  for (std::int64_t i = 0; i < 6; i += 3)
    EXPECT_TRUE(
        at::equal(TransformerAccess::forward_cached(
                      *second, TransformerAccess::forward_cached(*first, tokens.narrow(1, i, 3), a), b),
                  TransformerAccess::forward_cached(*whole, tokens.narrow(1, i, 3), all)));
}

TEST(KvCache, Limits) {
  const TransformerOptions options = small();
  TransformerStage model = made(options);
  EXPECT_THROW(KvCache(options, 0), ValueError);
  EXPECT_THROW(KvCache(options, 13), ValueError);
  KvCache cache(options, 4);
  TransformerAccess::forward_cached(*model, tokens_for(options, 2, 3), cache);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         TransformerAccess::forward_cached(*model, tokens_for(options, 2, 2), cache);
                       }),
                       "larger capacity"));
  EXPECT_EQ(cache.length(), 3);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         TransformerAccess::forward_cached(*model, tokens_for(options, 3, 1), cache);
                       }),
                       "clear()"));
  cache.clear();
  EXPECT_EQ(TransformerAccess::forward_cached(*model, tokens_for(options, 3, 1), cache).size(0), 3);
}

TEST(Generate, GreedyIsTheArgmaxOfEachStep) {
  const TransformerOptions options = small();
  TransformerStage model = made(options);
  const at::Tensor prompt = tokens_for(options, 2, 3);
  const at::Tensor result = generate(*model, prompt, {.max_tokens = 9, .temperature = 0});
  ASSERT_EQ(result.sizes(), at::IntArrayRef({2, 12}));
  EXPECT_TRUE(at::equal(result.narrow(1, 0, 3), prompt));
  EXPECT_TRUE(at::equal(model->forward(result).argmax(-1).narrow(1, 2, 9), result.narrow(1, 3, 9)));
  EXPECT_TRUE(model->is_training());
  EXPECT_TRUE(at::equal(generate(*model, prompt, {.max_tokens = 0}), prompt));
}

TEST(Generate, TheSameWithAndWithoutTheCache) {
  const TransformerOptions options = small();
  TransformerStage model = made(options);
  const at::Tensor prompt = tokens_for(options, 4, 2);
  for (const GenerateOptions& how :
       {GenerateOptions{.max_tokens = 10, .temperature = 0},
        GenerateOptions{.max_tokens = 10, .temperature = 1.3, .seed = 5},
        GenerateOptions{.max_tokens = 11, .temperature = 0.7, .top_k = 4, .seed = 6}}) {
    GenerateOptions slow = how;
    slow.use_cache = false;
    const at::Tensor tokens = generate(*model, prompt, how);
    EXPECT_TRUE(at::equal(tokens, generate(*model, prompt, slow)));
    EXPECT_TRUE(at::equal(tokens, generate(*model, prompt, how)));
  }
  const at::Tensor one = generate(*model, prompt, {.max_tokens = 10, .seed = 1});
  EXPECT_FALSE(at::equal(one, generate(*model, prompt, {.max_tokens = 10, .seed = 2})));
}

TEST(Generate, CallbackAndStopToken) {
  const TransformerOptions options = small();
  TransformerStage model = made(options);
  const at::Tensor prompt = tokens_for(options, 2, 3);
  const at::Tensor all = generate(*model, prompt, {.max_tokens = 8, .seed = 3});
  std::vector<std::vector<std::int64_t>> told;
  const at::Tensor some = generate(*model, prompt, {.max_tokens = 8, .seed = 3},
                                   [&](const std::vector<std::int64_t>& tokens, std::int64_t position) {
                                     EXPECT_EQ(position, 3 + static_cast<std::int64_t>(told.size()));
                                     told.push_back(tokens);
                                     return told.size() < 4;
                                   });
  EXPECT_TRUE(at::equal(some, all.narrow(1, 0, 7)));
  for (std::size_t i = 0; i < told.size(); ++i)
    for (std::size_t row = 0; row < 2; ++row)
      EXPECT_EQ(told[i][row],
                all[static_cast<std::int64_t>(row)][3 + static_cast<std::int64_t>(i)].item<std::int64_t>());
  // One row: it ends with its stop token, here the third new one.
  const at::Tensor row = all.narrow(0, 0, 1).narrow(1, 0, 3);
  const at::Tensor alone = generate(*model, row, {.max_tokens = 8, .temperature = 0});
  const std::int64_t stop = alone[0][5].item<std::int64_t>();
  const at::Tensor stopped = generate(*model, row, {.max_tokens = 8, .temperature = 0, .stop_token = stop});
  EXPECT_LE(stopped.size(1), 6);
  EXPECT_EQ(stopped[0][stopped.size(1) - 1].item<std::int64_t>(), stop);
  EXPECT_TRUE(at::equal(stopped, alone.narrow(1, 0, stopped.size(1))));
}

// Beyond the context the model sees only the last tokens, as many as its context: the next token is the one
// after a prompt of these tokens.
TEST(Generate, SlidesBeyondTheContext) {
  const TransformerOptions options = small();
  TransformerStage model = made(options);
  const std::int64_t context = options.context, more = 2 * context;
  const at::Tensor prompt = tokens_for(options, 2, 3);
  for (const double temperature : {0.0, 1.0}) {
    const GenerateOptions how{.max_tokens = more, .temperature = temperature, .seed = 5, .slide = true};
    const at::Tensor all = generate(*model, prompt, how);
    ASSERT_EQ(all.size(1), 3 + more);
    GenerateOptions slow = how;
    slow.use_cache = false;
    EXPECT_TRUE(at::equal(all, generate(*model, prompt, slow)));
    // Within the context the result equals generation without sliding.
    EXPECT_TRUE(at::equal(
        all.narrow(1, 0, context),
        generate(*model, prompt, {.max_tokens = context - 3, .temperature = temperature, .seed = 5})));
  }
  const at::Tensor greedy = generate(*model, prompt, {.max_tokens = more, .temperature = 0, .slide = true});
  for (std::int64_t position = context; position < greedy.size(1); ++position) {
    const at::Tensor window = greedy.narrow(1, position - context, context);
    EXPECT_TRUE(at::equal(generate(*model, window, {.max_tokens = 1, .temperature = 0}).select(1, context),
                          greedy.select(1, position)))
        << position;
  }
  // A prompt that is longer than the context.
  const at::Tensor longer = greedy.narrow(1, 0, context + 2);
  EXPECT_TRUE(at::equal(generate(*model, longer, {.max_tokens = 3, .temperature = 0, .slide = true}),
                        greedy.narrow(1, 0, context + 5)));
}

TEST(Generate, BadInput) {
  const TransformerOptions options = small();
  TransformerStage model = made(options), part = made(options, partition_model(options, 2)[0]);
  const at::Tensor prompt = tokens_for(options, 1, 3);
  EXPECT_TRUE(has_text(message_of<StateError>([&] { generate(*part, prompt); }), "a whole model"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { generate(*model, prompt, {.max_tokens = 11}); }),
                       "model.context"));
  EXPECT_THROW(generate(*model, prompt.to(at::kInt), {.max_tokens = 1}), ValueError);
  EXPECT_THROW(generate(*model, prompt.narrow(1, 0, 0), {.max_tokens = 1}), ValueError);
  EXPECT_THROW(generate(*model, prompt, {.max_tokens = 1, .temperature = -1}), ValueError);
  EXPECT_THROW(generate(*model, prompt, {.max_tokens = 1, .top_k = -1}), ValueError);
  EXPECT_THROW(generate(*model, prompt, {.max_tokens = 2},
                        [](const auto&, std::int64_t) -> bool { throw std::runtime_error("enough"); }),
               std::runtime_error);
  EXPECT_TRUE(model->is_training());
}

TEST(Sample, DrawsFromTheSoftmax) {
  const std::int64_t rows = 40000;
  const at::Tensor logits = torch::tensor({0.0, 1.0, 2.0, -1.0}).expand({rows, 4});
  const auto shares = [&](const SampleOptions& how) {
    return at::bincount(sample(logits, how, {.seed = 8}), {}, 4).to(at::kDouble) / static_cast<double>(rows);
  };
  // Five standard deviations of a share: 5 * sqrt(0.25 / 40000).
  EXPECT_LT(difference(shares({}), at::softmax(logits[0].to(at::kDouble), -1)), 0.0125);
  EXPECT_LT(difference(shares({.temperature = 2}), at::softmax(logits[0].to(at::kDouble) / 2, -1)), 0.0125);
  const at::Tensor best = shares({.top_k = 2});
  EXPECT_EQ(best[0].item<double>() + best[3].item<double>(), 0);
  EXPECT_NEAR(best[2].item<double>(), 1 / (1 + std::exp(-1)), 0.0125);
  EXPECT_TRUE(at::equal(sample(logits, {.temperature = 0}, {}), at::full({rows}, 2, at::kLong)));
  EXPECT_EQ(shares({.top_k = 1})[2].item<double>(), 1);
}

}  // namespace generate_test
}  // namespace penstock::models
