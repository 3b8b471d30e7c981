#include "penstock/models/blocks/tree_feed_forward.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "penstock/errors.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace tree_feed_forward_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

constexpr std::int64_t kWidth = 6;

TreeFeedForward made_feed(at::ScalarType dtype = at::kDouble) {
  TreeFeedForward feed(TreeFeedOptions{.width = kWidth, .feed_width = 10});
  feed->to(dtype);
  feed->initialize("blocks.2.feed", {.seed = 4, .deviation = 0.5, .residual = 0.3});
  const at::NoGradGuard no_grad;
  feed->mix.copy_(random_tensor({kWidth}, 77, dtype));
  return feed;
}

// A tree for each row: every parent is before its token, some tokens have none.
at::Tensor random_parents(std::int64_t batch, std::int64_t length, std::uint64_t seed) {
  const at::Tensor any = random_ids(1 << 20, {batch, length}, seed);
  return any.remainder(at::arange(1, length + 1)).sub(1);
}

at::Tensor by_definition(const TreeFeedForwardImpl& feed, const at::Tensor& x, const at::Tensor& parents,
                         const at::Tensor& documents) {
  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < x.size(0); ++row)
    for (std::int64_t place = 0; place < x.size(1); ++place) {
      at::Tensor h = x[row][place];
      const auto parent = parents[row][place].item<std::int64_t>();
      if (parent >= 0 && (!documents.defined() || documents[row][parent].item<std::int64_t>() ==
                                                      documents[row][place].item<std::int64_t>()))
        h = h + feed.mix * x[row][parent];
      else
        h = h + feed.mix * at::zeros({kWidth}, at::kDouble);
      const at::Tensor gate = at::mv(feed.gate->weight, h);
      rows.push_back(at::mv(feed.down->weight, gate / (1 + (-gate).exp()) * at::mv(feed.up->weight, h)));
    }
  return at::stack(rows).view(x.sizes());
}

TEST(TreeFeedForward, EqualsTheDefinitionWithItsGradients) {
  std::uint64_t seed = 0;
  for (const auto& [batch, length] : {std::pair{1, 1}, {2, 8}, {3, 5}})
    for (const bool with_documents : {false, true}) {
      TreeFeedForward feed = made_feed();
      const at::Tensor x = leaf(random_tensor({batch, length, kWidth}, ++seed)),
                       parents = random_parents(batch, length, ++seed);
      const at::Tensor documents =
          with_documents ? random_ids(2, {batch, length}, ++seed).cumsum(1) : at::Tensor();
      Tensors of{x};
      for (const at::Tensor& parameter : feed->parameters()) of.push_back(parameter);
      const TreeContext context{.parents = parents, .documents = documents};
      const at::Tensor expected = by_definition(*feed, x, parents, documents);
      EXPECT_LT(apart(feed->forward(scattered(x.detach()), context), expected), 1e-13);
      expect_gradients({feed->forward(x, context)}, {expected}, of);
    }
}

// Many children of one parent: their gradients add up.
TEST(TreeFeedForward, AParentGetsTheGradientsOfAllChildren) {
  TreeFeedForward feed = made_feed();
  const at::Tensor x = leaf(random_tensor({1, 40, kWidth}, 3));
  at::Tensor parents = at::zeros({1, 40}, at::kLong);
  parents[0][0] = -1;
  expect_gradients({feed->forward(x, {.parents = parents})}, {by_definition(*feed, x, parents, {})},
                   {x, feed->mix});
}

TEST(TreeFeedForward, StartsAsAPlainFeedForward) {
  TreeFeedForward feed(TreeFeedOptions{.width = kWidth, .feed_width = 10});
  feed->to(at::kDouble);
  feed->initialize("feed", {.seed = 4, .deviation = 0.5, .residual = 0.3});
  const at::Tensor x = random_tensor({2, 5, kWidth}, 1), none = at::full({2, 5}, -1, at::kLong);
  const at::Tensor mixed = feed->forward(x, {.parents = random_parents(2, 5, 2)});
  EXPECT_TRUE(at::equal(mixed, feed->forward(x, {.parents = none})));
  EXPECT_GT(gradients({mixed}, {feed->mix})[0].abs().max().item<double>(), 1e-4);
}

TEST(TreeFeedForward, OneTokenAtATimeEqualsTheWholeRow) {
  TreeFeedForward feed = made_feed();
  const at::Tensor x = random_tensor({2, 9, kWidth}, 5), parents = random_parents(2, 9, 6),
                   documents = numbers({{0, 0, 0, 0, 1, 1, 1, 1, 1}, {2, 2, 2, 2, 2, 2, 3, 3, 3}});
  const at::Tensor whole = feed->forward(x, {.parents = parents, .documents = documents});
  for (std::int64_t place = 0; place < 9; ++place)
    EXPECT_LT(apart(feed->forward(x.narrow(1, place, 1), {.parents = parents.narrow(1, place, 1),
                                                          .documents = documents.narrow(1, 0, place + 1),
                                                          .earlier = x.narrow(1, 0, place)}),
                    whole.narrow(1, place, 1)),
              1e-14)
        << "token " << place;
}

// On a device parents are not checked; there one that is not before its token counts as none. Fake inputs
// take the same path in a capture, which then runs on real ones.
TEST(TreeFeedForward, IsCausalWhateverTheParents) {
  TreeFeedForward feed = made_feed();
  auto original = std::make_shared<CalledModule>(
      std::vector<std::shared_ptr<torch::nn::Module>>{feed.ptr()},
      [feed](const Tensors& in) mutable { return Tensors{feed->forward(in[0], {.parents = in[1]})}; });
  const auto fast = graph::compile(original);
  const at::Tensor x = random_tensor({1, 4, kWidth}, 8);
  const at::Tensor usable = numbers({{-1, 0, -1, -1}});
  EXPECT_TRUE(at::equal(fast->forward(Tensors{x, usable})[0], feed.ptr()->forward(x, {.parents = usable})));
  EXPECT_TRUE(at::equal(fast->forward(Tensors{x, numbers({{0, 0, 3, 4}})})[0],
                        feed.ptr()->forward(x, {.parents = usable})));
  EXPECT_EQ(fast->captures(), 1u);
}

TEST(TreeFeedForward, CapturedEqualsEager) {
  const auto make = [] {
    TreeFeedForward feed = made_feed(at::kFloat);
    return std::make_shared<CalledModule>(
        std::vector<std::shared_ptr<torch::nn::Module>>{feed.ptr()}, [feed](const Tensors& in) mutable {
          return Tensors{feed->forward(in[0], {.parents = in[1], .documents = in[2], .earlier = in[3]})};
        });
  };
  const at::Tensor x = leaf(random_tensor({2, 6, kWidth}, 1, at::kFloat));
  expect_captured(make, {x, random_parents(2, 6, 2), at::Tensor(), at::Tensor()});
  expect_captured(make, {x, random_parents(2, 6, 2), random_ids(2, {2, 6}, 3).cumsum(1), at::Tensor()});
  expect_captured(make, {x, random_parents(2, 6, 2).add(3), at::Tensor(),
                         leaf(random_tensor({2, 3, kWidth}, 4, at::kFloat))});
}

TEST(TreeFeedForward, SixteenBitsAndAutocast) {
  TreeFeedForward feed = made_feed(at::kBFloat16), exact = made_feed(at::kFloat);
  const at::Tensor x = random_tensor({2, 8, kWidth}, 9, at::kBFloat16), parents = random_parents(2, 8, 10);
  const at::Tensor in = leaf(x), low = feed->forward(in, {.parents = parents}),
                   high = exact->forward(x.to(at::kFloat), {.parents = parents});
  EXPECT_EQ(low.scalar_type(), at::kBFloat16);
  EXPECT_LT(apart(low, high), 0.02);
  EXPECT_EQ(gradients({low}, {in})[0].scalar_type(), at::kBFloat16);
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  EXPECT_LT(apart(exact->forward(x.to(at::kFloat), {.parents = parents}), high), 0.02);
}

TEST(TreeFeedForward, OptionsAndBadInput) {
  TreeFeedForward feed = made_feed();
  expect_shapes(*feed, feed->options().shapes(""));
  EXPECT_EQ(feed->options().parameter_count(), kWidth + 3 * 10 * kWidth);
  const at::Tensor x = random_tensor({2, 3, kWidth}, 1), good = numbers({{-1, 0, 1}, {-1, -1, 0}});
  expect_copies(feed, [&](TreeFeedForwardImpl& each) { return each.forward(x, {.parents = good}); });
  const auto message = [&](const TreeContext& context) {
    return message_of<ValueError>([&] { feed->forward(x, context); });
  };
  // No parents at all, and none for each token.
  EXPECT_TRUE(
      at::equal(feed->forward(x, {}), feed->forward(x, {.parents = at::full({2, 3}, -1, at::kLong)})));
  EXPECT_TRUE(has_text(message({.parents = at::zeros({2, 3})}), "Long or Int"));
  EXPECT_TRUE(has_text(message({.parents = good.narrow(0, 0, 1)}), "places of parents [2, 3]"));
  EXPECT_TRUE(has_text(message({.parents = numbers({{-1, 0, 1}, {-1, 1, 0}})}),
                       "got 1 for token 1 of row 1, expected a place before the token"));
  EXPECT_TRUE(
      has_text(message({.parents = numbers({{-2, 0, 1}, {-1, 0, 0}})}), "got -2 for token 0 of row 0"));
  EXPECT_TRUE(
      has_text(message({.parents = good, .documents = numbers({{1, 2, 3}})}), "documents: got Long [1, 3]"));
  EXPECT_TRUE(has_text(message({.parents = good, .earlier = at::zeros({2, 1, 5})}), "inputs [2, h, 6]"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { TreeFeedForward{TreeFeedOptions{.feed_width = 0}}; }),
                       "model.feed_width"));
}

}  // namespace tree_feed_forward_test
}  // namespace penstock::models
