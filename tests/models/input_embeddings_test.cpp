// What is added to the embedding of tokens: n-grams, structure, platform; and the relation bias.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/models/blocks/ngram_embedding.h"
#include "penstock/models/blocks/platform_embedding.h"
#include "penstock/models/blocks/relation_bias_table.h"
#include "penstock/models/blocks/structure_embedding.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace input_embeddings_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

constexpr std::int64_t kWidth = 4;

template <class Holder, class Options>
Holder made_with(const Options& options, at::ScalarType dtype = at::kDouble) {
  Holder module(options);
  module->to(dtype);
  module->initialize("embeddings.this", {.seed = 11, .deviation = 0.8});
  return module;
}

template <class Holder, class Call>
std::shared_ptr<CalledModule> called(Holder module, const Call& call) {
  return std::make_shared<CalledModule>(
      std::vector<std::shared_ptr<torch::nn::Module>>{module.ptr()},
      [module, call](const Tensors& in) mutable { return Tensors{call(*module, in)}; });
}

// ---- n-grams ----

// Token by token, with the arithmetic of the machine.
at::Tensor ngrams_by_definition(const NgramEmbeddingImpl& module, const at::Tensor& x,
                                const at::Tensor& tokens, const at::Tensor& documents) {
  const std::int64_t history = tokens.size(1) - x.size(1);
  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < x.size(0); ++row)
    for (std::int64_t place = history; place < tokens.size(1); ++place) {
      at::Tensor sum = x[row][place - history];
      for (std::size_t table = 0; table < module.options().orders.size(); ++table) {
        const NgramHash hash = NgramHash::of_table(static_cast<std::int64_t>(table));
        const auto prime = static_cast<std::uint64_t>(NgramHash::kPrime);
        std::uint64_t value = 0;
        for (std::int64_t back = module.options().orders[table] - 1; back >= 0; --back) {
          const std::int64_t from = place - back;
          std::int64_t token = -1;
          if (from >= 0 && (!documents.defined() || documents[row][from].item<std::int64_t>() ==
                                                        documents[row][place].item<std::int64_t>()))
            token = tokens[row][from].item<std::int64_t>();
          value =
              (value * static_cast<std::uint64_t>(hash.step) + static_cast<std::uint64_t>(token + 1)) % prime;
        }
        const auto bucket =
            static_cast<std::int64_t>(value * static_cast<std::uint64_t>(hash.spread) % prime %
                                      static_cast<std::uint64_t>(module.options().buckets));
        sum = sum + module.weight[static_cast<std::int64_t>(table)][bucket];
      }
      rows.push_back(sum);
    }
  return at::stack(rows).view(x.sizes());
}

TEST(NgramEmbedding, EqualsTheDefinitionWithItsGradients) {
  std::uint64_t seed = 0;
  for (const std::vector<std::int64_t>& orders :
       {std::vector<std::int64_t>{2}, {2, 3}, {4}, {3, 2, 5}, {2, 2}})
    for (const auto& [batch, length, history] : {std::tuple{1, 1, 0}, {2, 9, 0}, {1, 3, 1}, {2, 4, 6}})
      for (const bool with_documents : {false, true}) {
        NgramEmbedding ngrams =
            made_with<NgramEmbedding>(NgramOptions{.width = kWidth, .orders = orders, .buckets = 13});
        const at::Tensor x = leaf(random_tensor({batch, length, kWidth}, ++seed)),
                         tokens = random_ids(50000, {batch, history + length}, ++seed);
        const at::Tensor documents =
            with_documents ? random_ids(2, {batch, history + length}, ++seed).cumsum(1) : at::Tensor();
        expect_gradients({ngrams->forward(x, tokens, documents)},
                         {ngrams_by_definition(*ngrams, x, tokens, documents)}, {x, ngrams->weight});
        EXPECT_TRUE(at::equal(ngrams->forward(scattered(x.detach()), tokens.to(at::kInt), documents),
                              ngrams->forward(x, tokens, documents)));
      }
}

TEST(NgramEmbedding, OneTokenAtATimeEqualsTheWholeRow) {
  NgramEmbedding ngrams =
      made_with<NgramEmbedding>(NgramOptions{.width = kWidth, .orders = {2, 4}, .buckets = 101});
  const at::Tensor x = random_tensor({2, 12, kWidth}, 1), tokens = random_ids(90, {2, 12}, 2),
                   documents =
                       numbers({{0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3}, {5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5}});
  const at::Tensor whole = ngrams->forward(x, tokens, documents);
  for (std::int64_t place = 0; place < 12; ++place) {
    const std::int64_t first = std::max<std::int64_t>(0, place - ngrams->options().reach());
    const std::int64_t count = place + 1 - first;
    EXPECT_TRUE(at::equal(ngrams->forward(x.narrow(1, place, 1), tokens.narrow(1, first, count),
                                          documents.narrow(1, first, count)),
                          whole.narrow(1, place, 1)))
        << "token " << place;
  }
}

TEST(NgramEmbedding, IsCausalAndSeparatesDocuments) {
  NgramEmbedding ngrams =
      made_with<NgramEmbedding>(NgramOptions{.width = kWidth, .orders = {3}, .buckets = 1009});
  const at::Tensor x = at::zeros({1, 8, kWidth}, at::kDouble), tokens = random_ids(90, {1, 8}, 3);
  at::Tensor changed = tokens.clone();
  changed[0][4] = 91;
  const at::Tensor different = ngrams->forward(x, tokens).ne(ngrams->forward(x, changed)).any(-1)[0];
  EXPECT_TRUE(at::equal(different.to(at::kLong), torch::tensor({0, 0, 0, 0, 1, 1, 1, 0}, at::kLong)));
  const at::Tensor documents = numbers({{0, 0, 0, 0, 0, 1, 1, 1}});
  const at::Tensor alone = ngrams->forward(x.narrow(1, 5, 3), tokens.narrow(1, 5, 3));
  EXPECT_TRUE(at::equal(ngrams->forward(x, tokens, documents).narrow(1, 5, 3), alone));
  EXPECT_FALSE(at::equal(ngrams->forward(x, tokens).narrow(1, 5, 3), alone));
}

// Constants are part of the format of a trained model: a change would make its tables useless.
TEST(NgramEmbedding, TheHashStaysTheSame) {
  NgramEmbedding ngrams =
      made_with<NgramEmbedding>(NgramOptions{.width = 1, .orders = {2, 3}, .buckets = 1000});
  const at::Tensor rows = ngrams->rows_of(numbers({{1, 2, 3, 49999}}), {}, 4);
  EXPECT_TRUE(at::equal(rows.squeeze(1), numbers({{638, 910, 779, 590}, {1475, 1955, 1607, 1027}}))) << rows;
  for (std::int64_t table = 0; table < 64; ++table) {
    const NgramHash hash = NgramHash::of_table(table);
    for (const std::int64_t constant : {hash.step, hash.spread}) {
      EXPECT_EQ(constant % 2, 1);
      EXPECT_GE(constant, 1 << 20);
      EXPECT_LT(constant, NgramHash::kPrime);
    }
  }
}

// Few collisions: about as many different rows as a random function has.
TEST(NgramEmbedding, TheHashSpreads) {
  constexpr std::int64_t kBuckets = 4096, kSide = 64;
  NgramEmbedding ngrams =
      made_with<NgramEmbedding>(NgramOptions{.width = 1, .orders = {2, 2}, .buckets = kBuckets});
  const at::Tensor first = at::arange(kSide).repeat_interleave(kSide),
                   second = at::arange(kSide).repeat({kSide});
  const at::Tensor rows = ngrams->rows_of(at::stack({first, second}, 1), {}, 1).squeeze(-1);
  std::set<std::pair<std::int64_t, std::int64_t>> pairs;
  for (std::int64_t table = 0; table < 2; ++table) {
    std::set<std::int64_t> different;
    for (std::int64_t i = 0; i < kSide * kSide; ++i) different.insert(rows[table][i].item<std::int64_t>());
    EXPECT_GT(different.size(), kBuckets * 6 / 10) << "table " << table;  // a random function has 63 %
  }
  for (std::int64_t i = 0; i < kSide * kSide; ++i)
    pairs.insert({rows[0][i].item<std::int64_t>(), rows[1][i].item<std::int64_t>()});
  EXPECT_GT(pairs.size(), kSide * kSide - 8);  // what collides in one table does not in the other
}

TEST(NgramEmbedding, CapturedEqualsEager) {
  const auto make = [] {
    return called(
        made_with<NgramEmbedding>(NgramOptions{.width = kWidth, .orders = {2, 3}, .buckets = 7}, at::kFloat),
        [](NgramEmbeddingImpl& each, const Tensors& in) { return each.forward(in[0], in[1], in[2]); });
  };
  const at::Tensor x = leaf(random_tensor({2, 5, kWidth}, 1, at::kFloat)), tokens = random_ids(9, {2, 5}, 2);
  expect_captured(make, {x, tokens, at::Tensor()});
  expect_captured(make, {x, tokens, random_ids(2, {2, 5}, 3).cumsum(1)});
}

TEST(NgramEmbedding, OptionsAndBadInput) {
  NgramEmbedding ngrams =
      made_with<NgramEmbedding>(NgramOptions{.width = kWidth, .orders = {2, 3}, .buckets = 5});
  expect_shapes(*ngrams, ngrams->options().shapes(""));
  EXPECT_EQ(ngrams->options().parameter_count(), 2 * 5 * kWidth);
  EXPECT_EQ(ngrams->options().active_parameter_count(), 2 * kWidth);
  const at::Tensor x = at::zeros({2, 3, kWidth}, at::kDouble), tokens = random_ids(9, {2, 3}, 1);
  expect_copies(ngrams, [&](NgramEmbeddingImpl& each) { return each.forward(x, tokens); });
  const auto option = [](const NgramOptions& options) {
    return message_of<ConfigError>([&] { NgramEmbedding{options}; });
  };
  EXPECT_TRUE(has_text(option({.orders = {}}), "model.ngram_orders: got no orders"));
  EXPECT_TRUE(has_text(option({.orders = {2, 1}}), "model.ngram_orders: got 1"));
  EXPECT_TRUE(has_text(option({.orders = {17}}), "from 2 to 16"));
  EXPECT_TRUE(has_text(option({.buckets = 0}), "model.ngram_buckets: got 0"));
  const auto message = [&](const at::Tensor& in, const at::Tensor& ids, const at::Tensor& owners) {
    return message_of<ValueError>([&] { ngrams->forward(in, ids, owners); });
  };
  EXPECT_TRUE(has_text(message(at::zeros({2, 3, 5}), tokens, {}), "hidden states [batch, length, 4]"));
  EXPECT_TRUE(has_text(message(x, tokens.narrow(1, 0, 2), {}), "[2, 3 or more]"));
  EXPECT_TRUE(has_text(message(x, tokens.to(at::kFloat), {}), "Long or Int"));
  EXPECT_TRUE(
      has_text(message(x, tokens, tokens.narrow(1, 0, 2)), "NgramEmbedding: documents: got Long [2, 2]"));
}

// ---- structure ----

constexpr StructureOptions kSmallStructure{.width = kWidth,
                                           .structure_kinds = 3,
                                           .dependency_levels = 4,
                                           .syntax_depths = 5,
                                           .sibling_indices = 2,
                                           .node_types = 6};

StructureIds some_ids(std::int64_t batch, std::int64_t length) {
  return {.structure_kinds = random_ids(3, {batch, length}, 1),
          .dependency_levels = random_ids(9, {batch, length}, 2),  // some past the table
          .syntax_depths = random_ids(9, {batch, length}, 3),
          .sibling_indices = random_ids(9, {batch, length}, 4),
          .node_types = random_ids(6, {batch, length}, 5)};
}

void expect_sum_of_five_rows(at::Device device) {
  StructureEmbedding structure = made_with<StructureEmbedding>(kSmallStructure);
  structure->to(device);
  const at::Tensor x = leaf(random_tensor({2, 7, kWidth}, 6).to(device));
  StructureIds ids = some_ids(2, 7);
  for (at::Tensor* each : {&ids.structure_kinds, &ids.dependency_levels, &ids.syntax_depths,
                           &ids.sibling_indices, &ids.node_types})
    *each = each->to(device);
  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < 2; ++row)
    for (std::int64_t place = 0; place < 7; ++place) {
      at::Tensor sum = x[row][place];
      std::size_t table = 0;
      for (const at::Tensor& each : {ids.structure_kinds, ids.dependency_levels, ids.syntax_depths,
                                     ids.sibling_indices, ids.node_types}) {
        const at::Tensor& weight = structure->tables[table++]->weight;
        sum = sum + weight[std::min(each[row][place].item<std::int64_t>(), weight.size(0) - 1)];
      }
      rows.push_back(sum);
    }
  Tensors of{x};
  for (const at::Tensor& parameter : structure->parameters()) of.push_back(parameter);
  expect_gradients({structure->forward(x, ids)}, {at::stack(rows).view({2, 7, kWidth})}, of);
}

// The tables have their gradients on every device.
TEST(StructureEmbedding, IsTheSumOfFiveRows) {
  expect_sum_of_five_rows(at::kCPU);
  if (torch::cuda::is_available()) expect_sum_of_five_rows(at::Device(at::kCUDA, 0));
}

TEST(StructureEmbedding, AbsentIdsAddNothing) {
  StructureEmbedding structure = made_with<StructureEmbedding>(kSmallStructure);
  const at::Tensor x = random_tensor({1, 3, kWidth}, 6);
  EXPECT_TRUE(at::equal(structure->forward(x, {}), x));
  const at::Tensor types = numbers({{0, 5, 2}});
  EXPECT_LT(apart(structure->forward(x, {.node_types = types}),
                  x + structure->tables[4]->weight.index_select(0, types[0])),
            1e-15);
}

TEST(StructureEmbedding, SixteenBitsAreRoundedOnce) {
  StructureEmbedding structure = made_with<StructureEmbedding>(kSmallStructure, at::kFloat);
  const at::Tensor x = random_tensor({2, 7, kWidth}, 6, at::kBFloat16);
  const at::Tensor sum = structure->forward(x, some_ids(2, 7));
  EXPECT_EQ(sum.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(sum, structure->forward(x.to(at::kFloat), some_ids(2, 7)).to(at::kBFloat16)));
}

TEST(StructureEmbedding, CapturedEqualsEager) {
  const auto make = [] {
    return called(made_with<StructureEmbedding>(kSmallStructure, at::kFloat),
                  [](StructureEmbeddingImpl& each, const Tensors& in) {
                    return each.forward(in[0], {in[1], in[2], in[3], in[4], in[5]});
                  });
  };
  const StructureIds ids = some_ids(2, 5);
  expect_captured(make, {leaf(random_tensor({2, 5, kWidth}, 1, at::kFloat)), ids.structure_kinds,
                         ids.dependency_levels, ids.syntax_depths, ids.sibling_indices, ids.node_types});
}

TEST(StructureEmbedding, OptionsAndBadInput) {
  StructureEmbedding structure = made_with<StructureEmbedding>(kSmallStructure);
  expect_shapes(*structure, kSmallStructure.shapes(""));
  EXPECT_EQ(kSmallStructure.parameter_count(), 20 * kWidth);
  const at::Tensor x = at::zeros({2, 3, kWidth}, at::kDouble);
  expect_copies(structure, [&](StructureEmbeddingImpl& each) { return each.forward(x, some_ids(2, 3)); });
  StructureOptions none = kSmallStructure;
  none.sibling_indices = 0;
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { StructureEmbedding{none}; }), "model.sibling_indices: got 0"));
  const auto message = [&](const StructureIds& ids) {
    return message_of<ValueError>([&] { structure->forward(x, ids); });
  };
  EXPECT_TRUE(has_text(message({.node_types = at::zeros({2, 3})}), "node_types: got Float [2, 3]"));
  EXPECT_TRUE(has_text(message({.syntax_depths = numbers({{1, 2, 3}})}), "syntax_depths: got Long [1, 3]"));
  EXPECT_TRUE(has_text(message({.node_types = numbers({{1, 2, 6}, {0, 0, 0}})}),
                       "node_types: got 6, expected 0 to 5; set model.node_types higher"));
  EXPECT_TRUE(
      has_text(message({.syntax_depths = numbers({{1, -2, 6}, {0, 0, 0}})}), "syntax_depths: got -2"));
}

// ---- platform ----

TEST(PlatformEmbedding, OnePerRowOrOnePerToken) {
  PlatformEmbedding platform = made_with<PlatformEmbedding>(PlatformOptions{.width = kWidth, .platforms = 5});
  const at::Tensor x = leaf(random_tensor({3, 4, kWidth}, 1)), rows = torch::tensor({4, 0, 2}, at::kLong),
                   tokens = random_ids(5, {3, 4}, 2);
  const at::Tensor one_hot = at::one_hot(tokens, 5).to(at::kDouble);
  expect_gradients({platform->forward(x, tokens)}, {x + at::matmul(one_hot, platform->weight)},
                   {x, platform->weight});
  expect_gradients({platform->forward(x, rows)}, {platform->forward(x, rows.unsqueeze(1).expand({3, 4}))},
                   {x, platform->weight});
  expect_shapes(*platform, platform->options().shapes(""));
}

TEST(PlatformEmbedding, CapturedEqualsEagerAndBadInput) {
  const auto make = [] {
    return called(made_with<PlatformEmbedding>(PlatformOptions{.width = kWidth, .platforms = 5}, at::kFloat),
                  [](PlatformEmbeddingImpl& each, const Tensors& in) { return each.forward(in[0], in[1]); });
  };
  expect_captured(make, {leaf(random_tensor({3, 4, kWidth}, 1, at::kFloat)), random_ids(5, {3}, 2)});
  PlatformEmbedding platform = made_with<PlatformEmbedding>(PlatformOptions{.width = kWidth, .platforms = 5});
  const at::Tensor x = at::zeros({3, 4, kWidth}, at::kDouble);
  expect_copies(platform,
                [&](PlatformEmbeddingImpl& each) { return each.forward(x, random_ids(5, {3}, 2)); });
  const auto message = [&](const at::Tensor& ids) {
    return message_of<ValueError>([&] { platform->forward(x, ids); });
  };
  EXPECT_TRUE(has_text(message(at::zeros({4}, at::kLong)), "one for each row [3]"));
  EXPECT_TRUE(has_text(message(at::zeros({3, 5}, at::kLong)), "one for each token [3, 4]"));
  EXPECT_TRUE(has_text(message({}), "no tensor"));
  EXPECT_TRUE(
      has_text(message(torch::tensor({1, 5, 0}, at::kLong)), "got 5, expected 0 to 4; set model.platforms"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { PlatformEmbedding{PlatformOptions{.platforms = 0}}; }),
                       "model.platforms"));
}

// ---- relations ----

TEST(RelationBiasTable, SumsTheNumbersOfTheRelations) {
  RelationBiasTable table(RelationOptions{.relations = 3, .heads = 2});
  table->to(at::kDouble);
  table->initialize("relation_bias", {});
  EXPECT_TRUE(table->weight.eq(0).all().item<bool>());
  {
    const at::NoGradGuard no_grad;
    table->weight.copy_(random_tensor({3, 2}, 1));
  }
  const at::Tensor mask = random_ids(2, {2, 3, 4, 5}, 2).to(at::kBool);
  expect_gradients({table->forward(mask)},
                   {at::einsum("brij,rh->bhij", {mask.to(at::kDouble), table->weight})}, {table->weight});
  expect_shapes(*table, table->options().shapes(""));
  expect_copies(table, [&](RelationBiasTableImpl& each) { return each.forward(mask); });
  // In the dtype of the table, also under autocast.
  table->to(at::kFloat);
  const at::Tensor plain = table->forward(mask);
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  EXPECT_TRUE(at::equal(table->forward(mask), plain));
}

TEST(RelationBiasTable, CapturedEqualsEagerAndBadInput) {
  const auto make = [] {
    RelationBiasTable table(RelationOptions{.relations = 3, .heads = 2});
    return called(table, [](RelationBiasTableImpl& each, const Tensors& in) { return each.forward(in[0]); });
  };
  expect_captured(make, {random_ids(2, {2, 3, 4, 4}, 2).to(at::kBool)});
  RelationBiasTable table(RelationOptions{.relations = 3, .heads = 2});
  const auto message = [&](const at::Tensor& mask) {
    return message_of<ValueError>([&] { table->forward(mask); });
  };
  EXPECT_TRUE(has_text(message(at::zeros({2, 4, 5, 5})), "[batch, 3, i, j]"));
  EXPECT_TRUE(has_text(message(at::zeros({2, 3, 5})), "got Float [2, 3, 5]"));
  EXPECT_TRUE(has_text(message({}), "no tensor"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { RelationBiasTable{RelationOptions{.relations = 0}}; }),
                       "model.relations"));
}

}  // namespace input_embeddings_test
}  // namespace penstock::models
