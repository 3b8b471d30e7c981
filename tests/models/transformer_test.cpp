#include "penstock/transformer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/random.h"
#include "penstock/step_context.h"
#include "penstock/torch/kernels/fused_attention.h"
#include "penstock/torch/kernels/rms_norm.h"
#include "tests/has_text.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace transformer_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

TEST(Transformer, ShapesAndNames) {
  for (const bool tied : {false, true}) {
    TransformerStage model = made(small(tied));
    EXPECT_EQ(model->forward(tokens_for(small(), 2, 7)).sizes(), at::IntArrayRef({2, 7, 19}));
    std::map<std::string, std::vector<std::int64_t>> expected, actual;
    for (const ParameterShape& shape : parameter_shapes(small(tied))) expected[shape.name] = shape.shape;
    for (const auto& item : model->named_parameters()) actual[item.key()] = item.value().sizes().vec();
    EXPECT_EQ(actual, expected);
  }
}

TEST(Transformer, BadInputSaysWhatIsWanted) {
  TransformerStage model = made(small());
  const auto message = [&](at::Tensor x, at::Tensor documents = {}) {
    return message_of<ValueError>([&] { model->forward(x, documents); });
  };
  EXPECT_TRUE(has_text(message({}), "tokens [batch, length]"));
  EXPECT_TRUE(has_text(message(at::zeros({2, 7})), "Long or Int"));
  EXPECT_TRUE(has_text(message(at::zeros({7}, at::kLong)), "tokens [batch, length]"));
  EXPECT_TRUE(has_text(message(at::zeros({1, 13}, at::kLong)), "at most model.context, 12"));
  EXPECT_TRUE(has_text(message(at::zeros({1, 5}, at::kLong), at::zeros({1, 4}, at::kLong)), "documents"));
  EXPECT_TRUE(has_text(
      message_of<ValueError>([&] {
        model->forward_with(at::zeros({1, 5}, at::kLong), Tree::dict({{"mask", Tree(at::zeros({1}))}}));
      }),
      "'mask'"));
  TransformerStage second = made(small(), partition_model(small(), 2)[1]);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         second->forward(at::zeros({1, 5, 8}));
                       }),
                       "[batch, length, 16]"));
  EXPECT_THROW(TransformerStage(small(), StagePart{0, 1, 2, 9}), ValueError);
}

TEST(Transformer, TheFutureDoesNotChangeThePast) {
  TransformerStage model = made(small());
  const at::Tensor tokens = tokens_for(small(), 2, 9);
  const at::Tensor before = model->forward(tokens);
  for (std::int64_t position = 0; position < 9; ++position) {
    at::Tensor changed = tokens.clone();
    changed.select(1, position).add_(1).remainder_(19);
    const at::Tensor after = model->forward(changed);
    if (position > 0) {
      EXPECT_LT(difference(after.narrow(1, 0, position), before.narrow(1, 0, position)), 1e-13);
    }
    EXPECT_GT(difference(after.narrow(1, position, 9 - position), before.narrow(1, position, 9 - position)),
              1e-3);
  }
}

// Each document of a row is computed as if it were alone in its row.
TEST(Transformer, DocumentsAreSeparate) {
  TransformerStage model = made(small());
  const at::Tensor tokens = tokens_for(small(), 2, 10);
  const at::Tensor documents = numbers({{0, 0, 0, 1, 1, 1, 1, 2, 2, 2}, {4, 7, 7, 7, 7, 7, 7, 7, 7, 9}});
  const at::Tensor packed = model->forward(tokens, documents);
  EXPECT_GT(difference(packed, model->forward(tokens)), 1e-2);
  const std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> spans{{{0, 3}, {3, 4}, {7, 3}},
                                                                              {{0, 1}, {1, 8}, {9, 1}}};
  for (std::int64_t row = 0; row < 2; ++row)
    for (const auto& [begin, length] : spans[static_cast<std::size_t>(row)]) {
      const at::Tensor alone = model->forward(tokens.narrow(0, row, 1).narrow(1, begin, length));
      // Positions differ, which matters only by rounding.
      EXPECT_LT(difference(alone, packed.narrow(0, row, 1).narrow(1, begin, length)), 1e-12)
          << "row " << row << " from " << begin;
    }
}

TEST(Rotary, ProductsDependOnTheDistance) {
  Rotary rotary(8, 64, 10000);
  const at::Tensor q = at::randn({1, 1, 1, 8}, at::kDouble), k = at::randn({1, 1, 1, 8}, at::kDouble);
  const auto product = [&](std::int64_t i, std::int64_t j) {
    return (rotate(q, rotary.turns(i, 1, q)) * rotate(k, rotary.turns(j, 1, k))).sum().item<double>();
  };
  for (const std::int64_t distance : {0, 1, 5, 17})
    for (const std::int64_t shift : {1, 9, 40})
      EXPECT_NEAR(product(distance, 0), product(distance + shift, shift), 1e-12);
  EXPECT_NEAR(product(3, 3), (q * k).sum().item<double>(), 1e-12);
  EXPECT_GT(std::abs(product(5, 0) - product(0, 0)), 1e-6);
  // Rotation preserves lengths.
  EXPECT_NEAR(rotate(q, rotary.turns(37, 1, q)).norm().item<double>(), q.norm().item<double>(), 1e-12);
}

TEST(Rotary, TurnsByTheFormula) {
  Rotary rotary(4, 10, 100);
  const at::Tensor x = torch::tensor({1.0, 0.0, 0.0, 1.0}, at::kDouble).view({1, 1, 1, 4});
  const at::Tensor y = rotate(x, rotary.turns(3, 1, x)).flatten();
  const std::vector<double> expected{std::cos(3.0), std::sin(3.0), -std::sin(0.3), std::cos(0.3)};
  EXPECT_LT(difference(y, torch::tensor(expected, at::kDouble)), 1e-15);
  // 16-bit types are rotated in float32 and rounded once.
  const at::Tensor many = at::randn({2, 10, 3, 4});
  EXPECT_TRUE(
      at::equal(rotate(many.to(at::kBFloat16), rotary.turns(0, 10, many)),
                rotate(many.to(at::kBFloat16).to(at::kFloat), rotary.turns(0, 10, many)).to(at::kBFloat16)));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { rotary.turns(5, 6, x); }), "0 to 9"));
}

TEST(RmsNorm, ByTheFormula) {
  const at::Tensor x = at::randn({3, 5, 16}, at::kDouble), weight = at::randn({16}, at::kDouble);
  const at::Tensor expected = x / (x.pow(2).mean(-1, true) + 1e-3).sqrt() * weight;
  EXPECT_LT(difference(rms_norm(x, weight, 1e-3), expected), 1e-14);
  EXPECT_EQ(rms_norm(x.to(at::kBFloat16), weight.to(at::kBFloat16), 1e-3).scalar_type(), at::kBFloat16);
}

// Every query head with a key head of its own that is a copy.
TEST(Attention, GroupedQueriesAreRepeatedHeads) {
  TransformerOptions full = small();
  full.key_value_heads = full.heads;
  TransformerStage grouped = made(small()), repeated = made(full);
  {
    const torch::NoGradGuard no_grad;
    auto from = grouped->named_parameters(), to = repeated->named_parameters();
    for (const auto& item : from) {
      at::Tensor value = item.value();
      if (item.key().find("attention.key") != std::string::npos ||
          item.key().find("attention.value") != std::string::npos)
        value = value.view({2, 1, 4, 16}).expand({2, 2, 4, 16}).reshape({16, 16});
      to[item.key()].copy_(value);
    }
  }
  const at::Tensor tokens = tokens_for(small(), 2, 9);
  EXPECT_LT(difference(grouped->forward(tokens), repeated->forward(tokens)), 1e-12);
  const at::Tensor documents = numbers({{0, 0, 0, 1, 1, 1, 1, 2, 2}, {1, 1, 1, 1, 1, 1, 1, 1, 0}});
  EXPECT_LT(difference(grouped->forward(tokens, documents), repeated->forward(tokens, documents)), 1e-12);
}

TEST(Attention, AgainstTheDefinition) {
  const std::int64_t length = 6;
  const at::Tensor q = at::randn({2, 4, length, 8}, at::kDouble),
                   k = at::randn({2, 2, length, 8}, at::kDouble),
                   v = at::randn({2, 2, length, 8}, at::kDouble);
  const at::Tensor documents = numbers({{0, 0, 1, 1, 1, 1}, {0, 0, 0, 0, 0, 1}});
  const auto by_definition = [&](const at::Tensor& allowed, std::int64_t queries) {
    at::Tensor result = at::zeros({2, 4, queries, 8}, at::kDouble);
    for (std::int64_t b = 0; b < 2; ++b)
      for (std::int64_t h = 0; h < 4; ++h) {
        const at::Tensor scores =
            at::matmul(q[b][h].narrow(0, length - queries, queries), k[b][h / 2].t()) / std::sqrt(8.0);
        result[b][h].copy_(
            at::matmul(at::softmax(scores.masked_fill(allowed[b].logical_not(), -1e300), -1), v[b][h / 2]));
      }
    return result;
  };
  const at::Tensor causal = at::ones({length, length}, at::kBool).tril().expand({2, length, length});
  const at::Tensor within = causal.logical_and(documents.unsqueeze(2).eq(documents.unsqueeze(1)));
  for (const auto& form : {attend, attend_by_products}) {
    EXPECT_LT(
        difference(form(q, k, v, AttentionMask::causal(length, length), 0), by_definition(causal, length)),
        1e-13);
    EXPECT_LT(difference(form(q, k, v, AttentionMask::within_documents(documents), 0),
                         by_definition(within, length)),
              1e-13);
    for (const std::int64_t queries : {1, 3})
      EXPECT_LT(difference(form(q.narrow(2, length - queries, queries), k, v,
                                AttentionMask::causal(queries, length), 0),
                           by_definition(causal.narrow(1, length - queries, queries), queries)),
                1e-13);
    EXPECT_THROW(form(q.narrow(1, 0, 3), k, v, AttentionMask::causal(length, length), 0), ValueError);
  }
}

TEST(Transformer, ATiedHeadGetsBothGradients) {
  const at::Tensor tokens = tokens_for(small(), 2, 8), targets = tokens_for(small(), 2, 8, 2);
  TransformerStage tied = made(small(true)), untied = made(small());
  {
    const torch::NoGradGuard no_grad;
    untied->head->weight.copy_(tied->embed->weight);
  }
  token_loss(tied->forward(tokens), targets, 16).backward();
  token_loss(untied->forward(tokens), targets, 16).backward();
  EXPECT_LT(
      difference(tied->embed->weight.grad(), untied->embed->weight.grad() + untied->head->weight.grad()),
      1e-14);
  EXPECT_GT(untied->embed->weight.grad().abs().max().item<double>(), 1e-4);
}

// ---- stages ----

TEST(Stages, ChainedAreTheWholeModelBitForBit) {
  for (const bool tied : {false, true})
    for (const int stages : {1, 2, 3}) {
      const TransformerOptions options = small(tied);
      const at::Tensor tokens = tokens_for(options, 2, 8), targets = tokens_for(options, 2, 8, 2),
                       documents = numbers({{0, 0, 0, 1, 1, 1, 2, 2}, {0, 0, 0, 0, 0, 0, 0, 0}});
      TransformerStage whole = made(options, at::kFloat);
      const at::Tensor expected = whole->forward(tokens, documents);
      token_loss(expected, targets, 16).backward();
      Gradients expected_gradients, gradients;
      collect(*whole, expected_gradients);

      std::vector<TransformerStage> parts;
      std::vector<at::Tensor> inputs{tokens}, outputs;
      for (const StagePart& part : partition_model(options, stages)) {
        parts.push_back(made(options, part, at::kFloat));
        outputs.push_back(
            parts.back()->forward_with(inputs.back(), Tree::dict({{"documents", Tree(documents)}})));
        inputs.push_back(outputs.back().detach().requires_grad_());
      }
      EXPECT_TRUE(at::equal(outputs.back(), expected));
      token_loss(outputs.back(), targets, 16).backward();
      for (std::size_t i = parts.size() - 1; i-- > 0;) outputs[i].backward(inputs[i + 1].grad());
      for (std::size_t i = parts.size(); i-- > 0;) collect(*parts[i], gradients);
      ASSERT_EQ(gradients.size(), expected_gradients.size());
      for (const auto& [name, gradient] : expected_gradients)
        EXPECT_TRUE(at::equal(gradients.at(name), gradient))
            << name << ", " << stages << " stages, tied " << tied;
    }
}

TEST(Stages, AHeadAlone) {
  const TransformerOptions options = small();
  const std::vector<StagePart> parts{{0, 2, 0, 3}, {1, 2, 3, 3}};
  TransformerStage body = made(options, parts[0]), head = made(options, parts[1]), whole = made(options);
  const at::Tensor tokens = tokens_for(options, 1, 5);
  EXPECT_TRUE(at::equal(head->forward(body->forward(tokens)), whole->forward(tokens)));
  EXPECT_EQ(head->parameters().size(), 2u);
  EXPECT_TRUE(has_text(message_of<StateError>([&] { body->head_weight(); }), "no head"));
}

TEST(Initialize, DoesNotDependOnThePartition) {
  const TransformerOptions options = small(true);
  std::map<std::string, at::Tensor> whole;
  for (const auto& item : made(options, at::kFloat)->named_parameters()) whole[item.key()] = item.value();
  for (const int stages : {2, 3}) {
    std::set<std::string> seen;
    for (const StagePart& part : partition_model(options, stages)) {
      torch::manual_seed(static_cast<std::uint64_t>(part.index) + 77);
      for (const auto& item : made(options, part, at::kFloat)->named_parameters()) {
        EXPECT_TRUE(at::equal(item.value(), whole.at(item.key()))) << item.key();
        seen.insert(item.key());
      }
    }
    EXPECT_EQ(seen.size(), whole.size());
  }
}

TEST(Initialize, DeviationsAreAsRequested) {
  TransformerStage model(TransformerOptions{.vocabulary = 256, .width = 64, .layers = 8, .heads = 4});
  initialize(*model, {.seed = 3});
  const auto parameters = model->named_parameters();
  EXPECT_NEAR(parameters["blocks.5.attention.query.weight"].std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(parameters["blocks.5.feed.down.weight"].std().item<double>(), 0.005, 0.0003);
  EXPECT_TRUE(at::equal(parameters["norm.weight"], at::ones({64})));
  EXPECT_FALSE(at::equal(parameters["blocks.5.feed.up.weight"], parameters["blocks.5.feed.gate.weight"]));
  const at::Tensor before = parameters["embed.weight"].clone();
  initialize(*model, {.seed = 4});
  EXPECT_FALSE(at::equal(parameters["embed.weight"], before));
  EXPECT_THROW(initialize(*model, {.deviation = 0}), ValueError);
}

// ---- dropout, loss, fake ----

TEST(Dropout, MasksAreOfTheStepAndThePlace) {
  TransformerOptions options = small();
  options.dropout = 0.4;
  TransformerStage whole = made(options);
  const at::Tensor tokens = tokens_for(options, 2, 6);
  EXPECT_THROW(whole->forward(tokens), StateError);  // no step, no key
  StepContext step;
  step.seed = 9, step.step = 2, step.microbatch = 0;
  const auto run = [&](StepContext context) {
    const StepGuard guard(context);
    return whole->forward(tokens);
  };
  const at::Tensor first = run(step);
  EXPECT_TRUE(at::equal(run(step), first));
  StepContext next = step;
  next.step = 3;
  EXPECT_GT(difference(run(next), first), 1e-2);
  {
    const StepGuard guard(step);
    at::Tensor x = tokens;
    for (const StagePart& part : partition_model(options, 3)) x = made(options, part)->forward(x);
    EXPECT_TRUE(at::equal(x, first));
    // A rank that has only the second row.
    StepContext rows = step;
    rows.rows = BatchRows{2, 1, 1};
    const StepGuard inner(rows);
    EXPECT_LT(difference(whole->forward(tokens.narrow(0, 1, 1)), first.narrow(0, 1, 1)), 1e-13);
  }
  whole->eval();
  EXPECT_TRUE(at::equal(whole->forward(tokens), made(small())->forward(tokens)));
}

TEST(TokenLoss, MicrobatchesAddUp) {
  const at::Tensor logits = at::randn({6, 5, 19}, at::kDouble).requires_grad_();
  at::Tensor targets = tokens_for(small(), 6, 5);
  targets[0].fill_(kIgnoredTarget);  // a microbatch with fewer counted targets
  targets[1].narrow(0, 0, 3).fill_(kIgnoredTarget);
  const double counted = static_cast<double>(counted_targets(targets).item<std::int64_t>());
  EXPECT_EQ(counted, 22);
  const at::Tensor whole = token_loss(logits, targets, counted);
  EXPECT_NEAR(whole.item<double>(),
              torch::nn::functional::cross_entropy(logits.view({30, 19}), targets.view({30})).item<double>(),
              1e-12);
  const at::Tensor expected = torch::autograd::grad({whole}, {logits})[0];
  at::Tensor mean = at::zeros({}, at::kDouble);
  for (std::int64_t m = 0; m < 3; ++m)
    mean = mean + token_loss(logits.narrow(0, 2 * m, 2), targets.narrow(0, 2 * m, 2), counted / 3) / 3;
  EXPECT_NEAR(mean.item<double>(), whole.item<double>(), 1e-12);
  EXPECT_LT(difference(torch::autograd::grad({mean}, {logits})[0], expected), 1e-14);
  // All targets are ignored: zero, not NaN.
  EXPECT_EQ(token_loss(logits.narrow(0, 0, 1), targets.narrow(0, 0, 1), 4).item<double>(), 0);
  EXPECT_THROW(token_loss(logits, targets, 0), ValueError);
  EXPECT_THROW(token_loss(logits, targets.narrow(1, 0, 4), 4), ValueError);
  EXPECT_THROW(token_loss(logits, targets.to(at::kInt), 4), ValueError);
}

TEST(TokenLoss, SixteenBitsAreSummedInFloat) {
  const at::Tensor logits = at::randn({64, 19}).to(at::kBFloat16),
                   targets = tokens_for(small(), 1, 64).view({64});
  const at::Tensor loss = token_loss_sum(logits, targets);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), token_loss_sum(logits.to(at::kDouble), targets).item<double>(), 1e-3);
}

TEST(Fake, ForwardAndBackwardInShapeOnly) {
  for (const bool tied : {false, true}) {
    // Created under the fake mode: a model that would not fit in memory.
    FakeMode fake;
    const ModeGuard guard(fake);
    TransformerStage model(TransformerOptions{.vocabulary = 50257,
                                              .width = 8192,
                                              .layers = 2,
                                              .heads = 64,
                                              .key_value_heads = 8,
                                              .context = 4096,
                                              .tie_head = tied});
    const at::Tensor tokens = at::empty({4, 4096}, at::kLong);
    const at::Tensor logits = model->forward(tokens, at::empty({4, 4096}, at::kLong));
    EXPECT_TRUE(is_fake(logits));
    EXPECT_EQ(logits.sizes(), at::IntArrayRef({4, 4096, 50257}));
    token_loss(logits, tokens, 1000).backward();
    for (const auto& item : model->named_parameters())
      EXPECT_EQ(item.value().grad().sizes(), item.value().sizes()) << item.key();
    initialize(*model, {});
  }
}

TEST(Fake, ATrialOfARealModelLeavesItAlone) {
  TransformerStage model = made(small());
  const at::Tensor tokens = tokens_for(small(), 2, 6);
  FakeMode fake;
  at::Tensor logits;
  {
    const ModeGuard guard(fake);
    logits = model->forward(to_fake(tokens));
  }
  EXPECT_TRUE(is_fake(logits));
  EXPECT_EQ(logits.sizes(), at::IntArrayRef({2, 6, 19}));
  // Fake inputs without the mode, before the tables of a device exist; then real ones.
  EXPECT_TRUE(is_fake(made(small())->forward(to_fake(tokens))));
  EXPECT_FALSE(is_fake(model->forward(tokens)));
}

// 16-bit logits: the loss is that of the same values in float32, the gradient is rounded once.
TEST(TokenLoss, SixteenBitLogits) {
  for (const auto& [rows, vocabulary] : {std::pair<std::int64_t, std::int64_t>{7, 11}, {600, 300}}) {
    const at::Tensor logits = (at::rand({rows, vocabulary}) * 30 - 15).to(at::kBFloat16).requires_grad_();
    at::Tensor targets = at::randint(vocabulary, {rows}, at::kLong);
    targets[3] = kIgnoredTarget;
    targets[rows - 1] = kIgnoredTarget;
    const at::Tensor exact = logits.detach().to(at::kDouble).requires_grad_();
    const at::Tensor loss = token_loss(logits, targets, 3.0), expected = token_loss(exact, targets, 3.0);
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>());
    (2 * loss).backward();
    (2 * expected).backward();
    EXPECT_TRUE(at::allclose(logits.grad().to(at::kDouble), exact.grad(), 0.01, 1e-6));
    EXPECT_EQ(logits.grad()[3].abs().max().item<double>(), 0);
  }
}

}  // namespace transformer_test
}  // namespace penstock::models
