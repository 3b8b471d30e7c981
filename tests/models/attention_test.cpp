// The attention block: windows, layers without positions, the cache, and what metadata says about rows.
#include "penstock/models/blocks/attention.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/models/blocks/attention_metadata.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"
#include "tests/torch/attention_reference.h"

namespace penstock::models {
namespace attention_test {

using namespace test;
using penstock::test::attend_by_definition;
using penstock::test::AttentionRules;
using penstock::test::has_text;
using penstock::test::message_of;

AttentionOptions some_options() {
  return AttentionOptions{.width = 12,
                          .heads = 4,
                          .key_value_heads = 2,
                          .head_width = 6,
                          .layers = 4,
                          .windows = {0, 5, 1, 90},
                          .nope_layers = {0, 3},
                          .context = 400}
      .resolved();
}

Attention made_attention(const AttentionOptions& options, std::int64_t block) {
  Attention attention(options, block);
  attention->to(at::kDouble);
  attention->initialize(fmt::format("blocks.{}.attention", block),
                        {.seed = 3, .deviation = 0.5, .residual = 0.5});
  return attention;
}

// Rotary positions by their definition, x [batch, length, heads, width].
at::Tensor rotated_by_definition(const at::Tensor& x, double theta) {
  std::vector<at::Tensor> columns;
  const at::Tensor position = at::arange(x.size(1), x.options()).view({1, -1, 1});
  for (std::int64_t i = 0; i < x.size(3); i += 2) {
    const at::Tensor angle =
        position * std::pow(theta, -static_cast<double>(i) / static_cast<double>(x.size(3)));
    const at::Tensor a = x.select(3, i), b = x.select(3, i + 1);
    columns.push_back(a * angle.cos() - b * angle.sin());
    columns.push_back(a * angle.sin() + b * angle.cos());
  }
  return at::stack(columns, 3);
}

at::Tensor block_by_definition(const Attention& attention, const AttentionOptions& options,
                               std::int64_t block, const at::Tensor& x, AttentionRules rules) {
  const auto heads = [&](const torch::nn::Linear& part, bool turned) {
    const at::Tensor all = at::matmul(x, part->weight.t()).unflatten(2, {-1, options.head_width});
    return (turned && options.has_positions(block) ? rotated_by_definition(all, options.rope_theta) : all)
        .transpose(1, 2);
  };
  rules.queries = rules.keys = x.size(1);
  rules.window = options.window_of(block);
  const at::Tensor mixed = attend_by_definition(heads(attention->query, true), heads(attention->key, true),
                                                heads(attention->value, false), rules);
  return at::matmul(mixed.transpose(1, 2).flatten(2), attention->output->weight.t());
}

AttentionContext context_for(const AttentionOptions& options, const AttentionMask& mask,
                             std::int64_t first = 0, KvCache* cache = nullptr) {
  static std::map<std::int64_t, Rotary> tables;
  Rotary& rotary =
      tables.try_emplace(options.head_width, options.head_width, 400, options.rope_theta).first->second;
  return {rotary.turns(first, mask.queries(), at::empty({0}, at::kDouble)), mask, cache};
}

at::Tensor random_documents(std::int64_t batch, std::int64_t length) {
  return at::rand({batch, length}).lt(0.1).to(at::kInt).cumsum(1, at::kInt);
}

// ---- the block ----

TEST(AttentionBlock, ParametersAreThoseOfThePlan) {
  const AttentionOptions options = some_options();
  Attention attention = made_attention(options, 1);
  std::map<std::string, std::vector<std::int64_t>> expected, actual;
  std::int64_t count = 0;
  for (const ParameterShape& shape : attention_shapes(options, "blocks.1.attention"))
    expected[shape.name] = shape.shape;
  for (const auto& item : attention->named_parameters()) {
    actual["blocks.1.attention." + item.key()] = item.value().sizes().vec();
    count += item.value().numel();
  }
  EXPECT_EQ(actual, expected);
  EXPECT_EQ(count, attention_parameter_count(options));
}

// Every layer of the options: windows of all kinds, with and without positions; lengths below and above the
// size of a block.
TEST(AttentionBlock, AgainstTheDefinition) {
  torch::manual_seed(1);
  const AttentionOptions options = some_options();
  for (std::int64_t block = 0; block < options.layers; ++block)
    for (const std::int64_t length : {1, 7, 150})
      for (int kind = 0; kind < 4; ++kind) {
        SCOPED_TRACE(fmt::format("block {} length {} kind {}", block, length, kind));
        Attention attention = made_attention(options, block);
        const at::Tensor x = at::randn({2, length, options.width}, at::kDouble).requires_grad_();
        AttentionRules rules;
        AttentionMask mask = AttentionMask::causal(length, length);
        if ((kind & 1) != 0) {
          rules.documents = random_documents(2, length);
          mask = mask.with_documents(rules.documents);
        }
        if ((kind & 2) != 0) {
          rules.bias = at::randn({2, 4, length, length}, at::kDouble);
          mask = mask.with_bias(rules.bias);
        }
        const at::Tensor expected = block_by_definition(attention, options, block, x, rules);
        const at::Tensor actual = attention->forward(x, context_for(options, mask));
        EXPECT_LT(difference(actual, expected), 1e-11);
        std::vector<at::Tensor> inputs = attention->parameters();
        inputs.push_back(x);
        const at::Tensor gradient = at::randn_like(expected);
        const auto wanted = torch::autograd::grad({expected}, inputs, {gradient});
        const auto found = torch::autograd::grad({actual}, inputs, {gradient});
        for (std::size_t i = 0; i < wanted.size(); ++i)
          EXPECT_LT(difference(found[i], wanted[i]), 1e-10) << "input " << i;
      }
}

// Without positions, the order of earlier tokens does not matter; with positions it does.
TEST(AttentionBlock, WithoutPositionsTheOrderDoesNotMatter) {
  AttentionOptions options = some_options();
  options.windows = {};
  const at::Tensor x = at::randn({1, 9, options.width}, at::kDouble);
  const at::Tensor swapped = at::cat({x.narrow(1, 0, 8).flip(1), x.narrow(1, 8, 1)}, 1);
  for (const std::int64_t block : {0, 1}) {
    Attention attention = made_attention(options, block);
    const AttentionContext context = context_for(options, AttentionMask::causal(9, 9));
    const double change = difference(attention->forward(x, context).select(1, 8),
                                     attention->forward(swapped, context).select(1, 8));
    if (options.has_positions(block)) {
      EXPECT_GT(change, 1e-3);
    } else {
      EXPECT_LT(change, 1e-13);
    }
  }
}

TEST(AttentionBlock, InitialValuesAreFunctionsOfSeedAndName) {
  const AttentionOptions options = some_options();
  const auto weights = [&](const std::string& name, std::uint64_t seed) {
    Attention attention(options, 1);
    attention->initialize(name, {.seed = seed, .deviation = 1, .residual = 0.001});
    return attention;
  };
  const Attention one = weights("blocks.1.attention", 4);
  EXPECT_TRUE(at::equal(one->key->weight, weights("blocks.1.attention", 4)->key->weight));
  EXPECT_FALSE(at::equal(one->key->weight, weights("blocks.1.attention", 5)->key->weight));
  EXPECT_FALSE(at::equal(one->key->weight, weights("blocks.2.attention", 4)->key->weight));
  EXPECT_FALSE(at::equal(one->key->weight, one->value->weight));
  EXPECT_LT(one->output->weight.abs().max().item<double>(), 0.01);
  EXPECT_GT(one->query->weight.abs().max().item<double>(), 0.5);
}

TEST(AttentionBlock, UnderAutocast) {
  torch::manual_seed(2);
  const AttentionOptions options = some_options();
  for (const std::int64_t block : {1, 3}) {
    Attention attention = made_attention(options, block);
    attention->to(at::kFloat);
    const at::Tensor x = at::randn({2, 150, options.width});
    AttentionContext context =
        context_for(options, AttentionMask::within_documents(random_documents(2, 150)));
    context.turns = context.turns.to(at::kComplexFloat);
    const at::Tensor exact = attention->forward(x, context);
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    const at::Tensor rounded = attention->forward(x, context);
    EXPECT_EQ(rounded.scalar_type(), at::kBFloat16);
    // Three products of rounded factors: 3 * 2^-8 of the largest value, and some more for unlucky rows.
    EXPECT_LT(difference(rounded.to(at::kFloat), exact), 0.03 * exact.abs().max().item<double>());
  }
}

// ---- cache ----

// One layer after another with different windows in one cache, as in a model.
at::Tensor run_layers(std::vector<Attention>& layers, const at::Tensor& x, const AttentionContext& context) {
  at::Tensor hidden = x;
  for (Attention& layer : layers) {
    const at::Tensor normed = hidden / hidden.pow(2).mean(-1, true).sqrt();
    hidden = hidden + layer->forward(normed, context);
  }
  return hidden;
}

TEST(KvCache, WithWindowsEqualsTheWholeRow) {
  torch::manual_seed(3);
  const torch::NoGradGuard no_grad;
  const std::int64_t length = 240;
  AttentionOptions options = some_options();
  for (const std::vector<std::int64_t>& windows :
       std::vector<std::vector<std::int64_t>>{{0, 5, 1, 90}, {2, 30, 239, 240}, {100}}) {
    options.windows = windows;
    std::vector<Attention> layers;
    for (std::int64_t block = 0; block < options.layers; ++block)
      layers.push_back(made_attention(options, block));
    const at::Tensor x = at::randn({2, length, options.width}, at::kDouble);
    const at::Tensor expected =
        run_layers(layers, x, context_for(options, AttentionMask::causal(length, length)));
    // Products are summed in another order, through four layers.
    const double tolerance = 1e-12 * expected.abs().max().item<double>();
    KvCache cache(options.context, length);
    // Token by token; several at once, shorter and longer than windows; long prompts.
    const std::vector<std::int64_t> ones(static_cast<std::size_t>(length), 1);
    for (const std::vector<std::int64_t>& steps : std::vector<std::vector<std::int64_t>>{
             ones, {3, 60, 1, 1, 100, 7, 2, 66}, {200, 1, 39}, {1, 239}, {240}, {100, 100, 1, 1, 1, 37}}) {
      cache.clear();
      std::int64_t at = 0;
      for (const std::int64_t count : steps) {
        const at::Tensor y =
            run_layers(layers, x.narrow(1, at, count),
                       context_for(options, AttentionMask::causal(count, at + count), at, &cache));
        cache.advance(count);
        ASSERT_LT(difference(y, expected.narrow(1, at, count)), tolerance)
            << "at " << at << " of " << steps.size();
        at += count;
      }
      ASSERT_EQ(at, length);
    }
  }
}

TEST(KvCache, AWindowNeedsLittleMemory) {
  KvCache cache(100000, 100000);
  std::int64_t largest = 0;
  for (int token = 0; token < 500; ++token) {
    const auto [k, v] =
        cache.put(0, at::full({1, 1, 1, 2}, 1.0 * token), at::full({1, 1, 1, 2}, -1.0 * token), 10);
    const std::int64_t seen = std::min<std::int64_t>(token + 1, 10);
    ASSERT_EQ(k.size(2), seen);
    for (const at::Tensor& each : {k, v})
      ASSERT_TRUE(
          at::equal(each.select(3, 0).flatten().abs(), at::arange(token + 1 - seen, token + 1, at::kFloat)))
          << token;
    largest = std::max(largest, static_cast<std::int64_t>(k.storage().nbytes()));
    cache.advance(1);
  }
  EXPECT_LE(largest, 2 * 4 * (9 + 64));
}

TEST(KvCache, AnIncompleteForwardIsReported) {
  KvCache cache(100, 100);
  const at::Tensor x = at::zeros({1, 1, 2, 2});
  cache.put(0, x, x, 10);
  cache.advance(2);
  cache.put(0, x, x, 10);  // not followed by advance()
  EXPECT_TRUE(has_text(message_of<StateError>([&] { cache.put(0, x, x, 10); }), "clear()"));
  cache.clear();
  EXPECT_EQ(cache.put(0, x, x, 10).first.size(2), 2);
  cache.advance(2);
  EXPECT_THROW(cache.put(0, at::zeros({3, 1, 2, 2}), at::zeros({3, 1, 2, 2}), 10), ValueError);
  EXPECT_THROW(cache.put(0, at::zeros({1, 1, 99, 2}), at::zeros({1, 1, 99, 2}), 10), ValueError);
  EXPECT_THROW(KvCache(100, 101), ValueError);
}

// ---- graphs, fake tensors ----

struct TwoLayersImpl : torch::nn::Cloneable<TwoLayersImpl> {
  explicit TwoLayersImpl(const AttentionOptions& the_options) : options(the_options) { reset(); }
  void reset() override {
    first = register_module("first", made_attention(options, 1));
    second = register_module("second", made_attention(options, 3));
    table = register_parameter("table", at::ones({3, 4}, at::kDouble) * 0.3);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& documents, const at::Tensor& relations) {
    AttentionMask mask = AttentionMask::causal(x.size(1), x.size(1));
    if (documents.defined()) mask = mask.with_documents(documents);
    if (relations.defined()) mask = mask.with_bias(relation_bias(relations, table));
    const AttentionContext context = context_for(options, mask);
    return second->forward(x + first->forward(x, context), context);
  }
  AttentionOptions options;
  Attention first{nullptr}, second{nullptr};
  at::Tensor table;
};
TORCH_MODULE(TwoLayers);

void expect_compiled_equals_eager(std::int64_t length, bool with_documents, bool with_relations) {
  SCOPED_TRACE(fmt::format("length {} documents {} relations {}", length, with_documents, with_relations));
  torch::manual_seed(4);
  TwoLayers plain(some_options()), original(some_options());
  auto fast = graph::compile(original);
  for (int step = 0; step < 2; ++step) {
    const at::Tensor x = at::randn({2, length, 12}, at::kDouble);
    const at::Tensor documents = with_documents ? random_documents(2, length) : at::Tensor();
    const at::Tensor relations =
        with_relations ? at::rand({2, 3, length, length}).lt(0.2).to(at::kInt) : at::Tensor();
    const at::Tensor expected = plain->forward(x, documents, relations);
    const at::Tensor actual = fast->forward(x, documents, relations);
    EXPECT_TRUE(at::equal(actual, expected));
    for (const at::Tensor& y : {expected, actual}) y.pow(2).sum().backward();
    for (const auto& item : plain->named_parameters()) {
      const at::Tensor other = original->named_parameters()[item.key()];
      if (!item.value().grad().defined()) {
        EXPECT_EQ(item.key(), "table");
        continue;
      }
      ASSERT_TRUE(other.grad().defined()) << item.key();
      EXPECT_TRUE(at::equal(other.grad(), item.value().grad())) << item.key();
    }
  }
  EXPECT_EQ(fast->captures(), 1u);
}

TEST(AttentionBlock, CompiledEqualsEager) {
  expect_compiled_equals_eager(9, true, true);      // one mask of all pairs
  expect_compiled_equals_eager(150, false, false);  // bands
  expect_compiled_equals_eager(150, true, true);
}

// Without a window on a long row: blocks of queries.
TEST(AttentionBlock, CompiledQueryBlocksEqualEager) {
  AttentionOptions options = some_options();
  options.windows = {};
  options.context = 1100;
  torch::manual_seed(5);
  struct OneImpl : torch::nn::Module {
    explicit OneImpl(const AttentionOptions& the_options)
        : attention(register_module("attention", made_attention(the_options, 0))) {}
    at::Tensor forward(const at::Tensor& x, const at::Tensor& documents) {
      return attention->forward(x, {at::Tensor(), AttentionMask::within_documents(documents)});
    }
    Attention attention;
  };
  auto plain = std::make_shared<OneImpl>(options), original = std::make_shared<OneImpl>(options);
  auto fast = graph::compile(original);
  const at::Tensor x = at::randn({1, 1030, 12}, at::kDouble), documents = random_documents(1, 1030);
  const at::Tensor expected = plain->forward(x, documents), actual = fast->forward(x, documents);
  EXPECT_TRUE(at::equal(actual, expected));
  for (const at::Tensor& y : {expected, actual}) y.pow(2).sum().backward();
  for (std::size_t i = 0; i < plain->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(original->parameters()[i].grad(), plain->parameters()[i].grad())) << i;
}

TEST(AttentionBlock, FakeShapes) {
  TwoLayers layers(some_options());
  FakeMode fake;
  const ModeGuard guard(fake);
  const at::Tensor x = at::empty({2, 150, 12}, at::kDouble), documents = at::empty({2, 150}, at::kInt);
  const at::Tensor y = layers->forward(x, documents, at::empty({2, 3, 150, 150}, at::kBool));
  EXPECT_TRUE(is_fake(y));
  EXPECT_EQ(y.sizes(), at::IntArrayRef({2, 150, 12}));
  const auto gradients = torch::autograd::grad({y.sum()}, layers->parameters());
  for (std::size_t i = 0; i < gradients.size(); ++i)
    EXPECT_EQ(gradients[i].sizes(), layers->parameters()[i].sizes());
}

// ---- metadata ----

TEST(AttentionMetadata, DocumentsFromBos) {
  const at::Tensor tokens = numbers({{5, 1, 2, 1, 1, 3}, {1, 2, 2, 2, 2, 2}});
  const at::Tensor documents = documents_from_bos(tokens, 1);
  EXPECT_EQ(documents.scalar_type(), at::kInt);
  EXPECT_TRUE(at::equal(documents.to(at::kLong), numbers({{0, 1, 1, 2, 3, 3}, {1, 1, 1, 1, 1, 1}})));
  EXPECT_TRUE(at::equal(documents_from_bos(tokens.to(at::kInt), 1), documents));
  EXPECT_EQ(documents_from_bos(tokens, 9).abs().max().item<int>(), 0);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         documents_from_bos(at::zeros({2, 3}), 1);
                       }),
                       "integers [batch, length]"));
  EXPECT_THROW(documents_from_bos(tokens[0], 1), ValueError);
  EXPECT_THROW(documents_from_bos({}, 1), ValueError);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { documents_from_bos(tokens, -1); }), "bos"));
}

TEST(AttentionMetadata, TheArgumentComesFirst) {
  AttentionOptions options;
  const at::Tensor argument = numbers({{7, 7}}), metadata = numbers({{8, 9}}), tokens = numbers({{1, 3}});
  const auto chosen = [&](const at::Tensor& first, const at::Tensor& second, bool cached) {
    return choose_documents(options, first, second, tokens, cached);
  };
  for (const DocumentSource source : {DocumentSource::Given, DocumentSource::BosTokens}) {
    options.documents = source;
    options.bos_token = 3;
    EXPECT_TRUE(at::equal(chosen(argument, metadata, false), argument));
    EXPECT_TRUE(at::equal(chosen({}, metadata, false), metadata));
    EXPECT_EQ(chosen({}, {}, false).defined(), source == DocumentSource::BosTokens);
    EXPECT_FALSE(chosen({}, {}, true).defined());
    EXPECT_FALSE(choose_documents(options, {}, {}, {}, false).defined());
  }
  EXPECT_TRUE(at::equal(chosen({}, {}, false).to(at::kLong), numbers({{0, 1}})));
  options.documents = DocumentSource::None;
  EXPECT_FALSE(chosen(argument, metadata, false).defined());
}

TEST(AttentionMetadata, TheSmallestCountApplies) {
  EXPECT_TRUE(AttentionMetadata{}.is_empty());
  EXPECT_FALSE(AttentionMetadata{}.valid_tokens().defined());
  const AttentionMetadata metadata{.row_valid_tokens = torch::tensor({9, 20, 5}, at::kInt),
                                   .row_valid_blocks = torch::tensor({3, 3, 3}, at::kInt),
                                   .row_valid_slots = torch::tensor({8, 7, 1}, at::kLong),
                                   .base_block_tokens = 4,
                                   .row_block_tokens = 2};
  EXPECT_FALSE(metadata.is_empty());
  EXPECT_TRUE(at::equal(metadata.valid_tokens(), torch::tensor({9, 12, 2}, at::kLong)));
}

TEST(AttentionMetadata, ItsMaskHidesPaddingAndOtherDocuments) {
  torch::manual_seed(6);
  const AttentionOptions options = some_options();
  const AttentionMetadata metadata{.documents = random_documents(2, 40),
                                   .row_valid_blocks = torch::tensor({2, 5}, at::kInt),
                                   .base_block_tokens = 8};
  for (const std::int64_t block : {0, 1}) {
    Attention attention = made_attention(options, block);
    const at::Tensor x = at::randn({2, 40, options.width}, at::kDouble);
    const at::Tensor y = attention->forward(x, context_for(options, metadata.mask(2, 40)));
    const AttentionRules rules{.documents = metadata.documents, .valid = torch::tensor({16, 40}, at::kLong)};
    EXPECT_LT(difference(y, block_by_definition(attention, options, block, x, rules)), 1e-11);
    EXPECT_EQ(y[0].narrow(0, 16, 24).abs().max().item<double>(), 0);
  }
}

TEST(AttentionMetadata, BadInputNamesTheField) {
  const auto message = [](const AttentionMetadata& metadata) {
    return message_of<ValueError>([&] { metadata.mask(2, 10); });
  };
  EXPECT_TRUE(has_text(message({.documents = at::zeros({2, 10})}), "documents: got Float [2, 10]"));
  EXPECT_TRUE(has_text(message({.documents = at::zeros({2, 9}, at::kInt)}), "integers [2, 10]"));
  EXPECT_TRUE(has_text(message({.row_valid_tokens = at::zeros({2, 1}, at::kInt)}), "row_valid_tokens"));
  EXPECT_TRUE(has_text(message({.row_valid_tokens = at::zeros({3}, at::kInt)}), "integers [2]"));
  EXPECT_TRUE(
      has_text(message({.row_valid_blocks = at::zeros({2}), .base_block_tokens = 4}), "row_valid_blocks"));
  EXPECT_TRUE(has_text(message({.row_valid_blocks = at::zeros({2}, at::kInt)}), "base_block_tokens: got 0"));
  EXPECT_TRUE(has_text(message({.row_valid_slots = at::zeros({2}, at::kInt)}), "row_block_tokens: got 0"));
  EXPECT_TRUE(has_text(message({.row_block_tokens = -1}), "row_block_tokens: got -1"));
}

TEST(RelationBias, IsTheSumOverRelations) {
  torch::manual_seed(7);
  const at::Tensor relations = at::rand({2, 3, 4, 5}).lt(0.5), table = at::randn({3, 6}).requires_grad_();
  const at::Tensor bias = relation_bias(relations, table);
  ASSERT_EQ(bias.sizes(), at::IntArrayRef({2, 6, 4, 5}));
  at::Tensor expected = at::zeros({2, 6, 4, 5});
  for (std::int64_t r = 0; r < 3; ++r)
    expected = expected + relations.select(1, r).unsqueeze(1).to(at::kFloat) * table[r].view({1, 6, 1, 1});
  EXPECT_LT(difference(bias, expected), 1e-6);
  const at::Tensor gradient = at::randn_like(expected);
  EXPECT_LT(difference(torch::autograd::grad({bias}, {table}, {gradient})[0],
                       torch::autograd::grad({expected}, {table}, {gradient})[0]),
            1e-5);
  EXPECT_EQ(relation_bias(relations, table.to(at::kBFloat16)).scalar_type(), at::kBFloat16);
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  EXPECT_EQ(relation_bias(relations, table).scalar_type(), at::kFloat);
}

TEST(RelationBias, OtherRanksAreErrors) {
  const at::Tensor table = at::randn({3, 6});
  const auto message = [](const at::Tensor& relations, const at::Tensor& of) {
    return message_of<ValueError>([&] { relation_bias(relations, of); });
  };
  EXPECT_TRUE(has_text(message(at::zeros({3, 4, 5}), table), "[batch, 3, i, j]"));
  EXPECT_TRUE(has_text(message(at::zeros({2, 2, 4, 5}), table), "one plane for each row"));
  EXPECT_TRUE(has_text(message({}, table), "no tensor"));
  EXPECT_TRUE(has_text(message(at::zeros({2, 3, 4, 5}), table[0]), "[relation, head]"));
  EXPECT_TRUE(has_text(message(at::zeros({2, 3, 4, 5}), at::zeros({3, 6}, at::kInt)), "floating point"));
}

}  // namespace attention_test
}  // namespace penstock::models
