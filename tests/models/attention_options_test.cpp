#include "penstock/models/plan/attention_options.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::models {
namespace attention_options_test {

using test::has_text;
using test::message_of;

TEST(AttentionOptions, ZerosAreFilledIn) {
  const AttentionOptions whole = AttentionOptions{.width = 96, .heads = 4}.resolved();
  EXPECT_EQ(whole.key_value_heads, 4);
  EXPECT_EQ(whole.head_width, 24);
  EXPECT_EQ(whole.resolved(), whole);
  // Heads need not fill the width.
  const AttentionOptions wide =
      AttentionOptions{.width = 10, .heads = 3, .key_value_heads = 1, .head_width = 8}.resolved();
  EXPECT_EQ(wide.query_width(), 24);
  EXPECT_EQ(wide.key_width(), 8);
}

TEST(AttentionOptions, WindowsOfLayers) {
  const auto windows = [](std::vector<std::int64_t> given) {
    const AttentionOptions options{.layers = 6, .windows = std::move(given)};
    options.check();
    std::vector<std::int64_t> all;
    for (std::int64_t layer = 0; layer < 6; ++layer) all.push_back(options.window_of(layer));
    return all;
  };
  using List = std::vector<std::int64_t>;
  EXPECT_EQ(windows({}), (List{0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(windows({7}), (List{7, 7, 7, 7, 7, 7}));
  EXPECT_EQ(windows({7, 0}), (List{7, 0, 7, 0, 7, 0}));
  EXPECT_EQ(windows({1, 2, 3}), (List{1, 2, 3, 1, 2, 3}));
  EXPECT_EQ(windows({1, 2, 3, 4, 5, 6}), (List{1, 2, 3, 4, 5, 6}));
  EXPECT_THROW(AttentionOptions{.layers = 6}.window_of(6), ValueError);
  EXPECT_THROW(AttentionOptions{.layers = 6}.window_of(-1), ValueError);
}

TEST(AttentionOptions, NopeLayersAreGlobalIndices) {
  const AttentionOptions options{.layers = 6, .nope_layers = {1, 5}};
  options.check();
  for (std::int64_t layer = 0; layer < 6; ++layer)
    EXPECT_EQ(options.has_positions(layer), layer != 1 && layer != 5) << layer;
}

TEST(AttentionOptions, EachMistakeNamesItsKey) {
  const auto message = [](const AttentionOptions& options) {
    return message_of<ConfigError>([&] { options.check(); });
  };
  EXPECT_TRUE(has_text(message({.width = 0}), "model.width"));
  EXPECT_TRUE(has_text(message({.heads = 0}), "model.heads"));
  EXPECT_TRUE(has_text(message({.layers = 0}), "model.layers"));
  EXPECT_TRUE(has_text(message({.context = 0}), "model.context"));
  EXPECT_TRUE(has_text(message({.width = 130, .heads = 4}), "use another number of heads"));
  EXPECT_TRUE(has_text(message({.width = 12, .heads = 4}), "model.head_width: got 3"));
  EXPECT_TRUE(has_text(message({.head_width = -2}), "model.head_width"));
  EXPECT_TRUE(has_text(message({.heads = 4, .key_value_heads = 3}), "a divisor of heads, 4"));
  EXPECT_TRUE(has_text(message({.key_value_heads = -1}), "model.key_value_heads"));
  EXPECT_TRUE(has_text(message({.rope_theta = 1}), "model.rope_theta"));
  EXPECT_TRUE(has_text(message({.documents = DocumentSource::BosTokens}), "model.bos_token"));
  for (const std::string part : {"model.windows: got [8, 0, 8, 0]", "each of the 6 layers", "divides"})
    EXPECT_TRUE(has_text(message({.layers = 6, .windows = {8, 0, 8, 0}}), part));
  EXPECT_TRUE(has_text(message({.layers = 2, .windows = {1, 2, 3, 4}}), "model.windows"));
  EXPECT_TRUE(has_text(message({.layers = 2, .windows = {4, -1}}), "replace -1"));
  for (const std::string part : {"model.nope_layers: got [0, 6]", "0 to 5", "remove 6"})
    EXPECT_TRUE(has_text(message({.layers = 6, .nope_layers = {0, 6}}), part));
  EXPECT_TRUE(has_text(message({.layers = 6, .nope_layers = {-1}}), "remove -1"));
  EXPECT_TRUE(has_text(message({.layers = 6, .nope_layers = {2, 2}}), "at most once"));
}

// A window limits the keys of a token; the products with the parameters do not change.
TEST(AttentionOptions, Operations) {
  const AttentionOptions options{
      .width = 32, .heads = 4, .key_value_heads = 2, .head_width = 16, .layers = 2, .windows = {10, 0}};
  const double parameters = 32 * 64 + 2 * 32 * 32 + 64 * 32;
  EXPECT_EQ(static_cast<double>(attention_parameter_count(options)), parameters);
  EXPECT_EQ(attention_flops_per_token(options, 0, 100), 2 * parameters + 4 * 10 * 64);
  EXPECT_EQ(attention_flops_per_token(options, 0, 7), 2 * parameters + 4 * 7 * 64);
  EXPECT_EQ(attention_flops_per_token(options, 1, 100), 2 * parameters + 4 * 100 * 64);
  // As the transformer counts them.
  const TransformerOptions transformer{.width = 32, .layers = 2, .heads = 4, .feed_width = 64};
  EXPECT_EQ(block_flops_per_token(transformer, 100) - 2.0 * 3 * 32 * 64,
            attention_flops_per_token(attention_options(transformer), 1, 100));
}

}  // namespace attention_options_test
}  // namespace penstock::models
