#include "penstock/transformer_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

constexpr std::int64_t kFeedMultiple = 32;

void require(bool good, const char* field, const std::string& actual, const std::string& expected,
             const std::string& remedy = {}) {
  if (!good) throw ConfigError(describe(fmt::format("model.{}", field), actual, expected, remedy));
}

void require_positive(const char* field, std::int64_t value) {
  require(value >= 1, field, fmt::format("{}", value), "at least 1");
}

std::int64_t size_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1},
                         [](std::int64_t a, std::int64_t b) { return a * b; });
}

std::vector<ParameterShape> block_shapes(const TransformerOptions& options, std::int64_t block) {
  const std::int64_t width = options.width, keys = options.key_value_heads * options.head_width(),
                     feed = options.feed_width;
  const std::string at = fmt::format("blocks.{}.", block);
  return {{at + "attention_norm.weight", {width}},          {at + "attention.query.weight", {width, width}},
          {at + "attention.key.weight", {keys, width}},     {at + "attention.value.weight", {keys, width}},
          {at + "attention.output.weight", {width, width}}, {at + "feed_norm.weight", {width}},
          {at + "feed.gate.weight", {feed, width}},         {at + "feed.up.weight", {feed, width}},
          {at + "feed.down.weight", {width, feed}}};
}

}  // namespace

TransformerOptions TransformerOptions::resolved() const {
  TransformerOptions whole = *this;
  require_positive("vocabulary", vocabulary);
  require_positive("width", width);
  require_positive("layers", layers);
  require_positive("heads", heads);
  require_positive("context", context);
  require(width % heads == 0, "width", fmt::format("{}", width),
          fmt::format("a multiple of heads, {}", heads),
          fmt::format("use {} or another number of heads", (width / heads + 1) * heads));
  require(head_width() % 2 == 0, "width", fmt::format("{}, that is {} per head", width, head_width()),
          "an even number per head, because rotary positions rotate pairs",
          fmt::format("use a multiple of {}", 2 * heads));
  require(key_value_heads >= 0, "key_value_heads", fmt::format("{}", key_value_heads),
          "at least 1, or 0 for as many as heads");
  if (whole.key_value_heads == 0) whole.key_value_heads = heads;
  require(heads % whole.key_value_heads == 0, "key_value_heads", fmt::format("{}", key_value_heads),
          fmt::format("a divisor of heads, {}", heads));
  require(feed_width >= 0, "feed_width", fmt::format("{}", feed_width),
          "at least 1, or 0 for two thirds of 4 * width");
  if (whole.feed_width == 0)
    whole.feed_width = (8 * width / 3 + kFeedMultiple - 1) / kFeedMultiple * kFeedMultiple;
  require(rope_theta > 1 && rope_theta < 1e15, "rope_theta", fmt::format("{}", rope_theta),
          "more than 1; 10000 is usual");
  require(norm_epsilon > 0 && norm_epsilon < 1, "norm_epsilon", fmt::format("{}", norm_epsilon),
          "a small positive number; 1e-5 is usual");
  require(dropout >= 0 && dropout < 1, "dropout", fmt::format("{}", dropout), "from 0 to less than 1");
  return whole;
}

std::int64_t block_parameter_count(const TransformerOptions& options) {
  std::int64_t count = 0;
  for (const ParameterShape& shape : block_shapes(options.resolved(), 0)) count += size_of(shape.shape);
  return count;
}

double block_flops_per_token(const TransformerOptions& options, std::int64_t length) {
  const std::int64_t products =
      block_parameter_count(options) - 2 * options.width;  // norms are not matrix products
  return 2.0 * static_cast<double>(products) +
         4.0 * static_cast<double>(length) * static_cast<double>(options.width);
}

double head_flops_per_token(const TransformerOptions& options) {
  return 2.0 * static_cast<double>(options.vocabulary) * static_cast<double>(options.width);
}

double training_flops_per_token(const TransformerOptions& options, std::int64_t length) {
  return 3 * (static_cast<double>(options.layers) * block_flops_per_token(options, length) +
              head_flops_per_token(options));
}

ModelPlan TransformerOptions::plan() const {
  const TransformerOptions whole = resolved();
  const auto elements = static_cast<double>(whole.width), words = static_cast<double>(whole.vocabulary);
  ModelPlan plan{.vocabulary = whole.vocabulary, .width = whole.width, .context = whole.context};
  plan.embed = {{"embed.weight", {whole.vocabulary, whole.width}}};
  // Besides the products, about 20 elements of the width and 6 of the feed-forward are touched; scores are
  // touched 4 times per head.
  const double moved = 20 * elements + 6 * static_cast<double>(whole.feed_width) +
                       4 * static_cast<double>(whole.context * whole.heads);
  const double flops = block_flops_per_token(whole, whole.context);
  for (std::int64_t block = 0; block < whole.layers; ++block)
    plan.blocks.push_back(
        {.parameters = block_shapes(whole, block), .flops_per_token = flops, .moved_per_token = moved});
  plan.head = {{"norm.weight", {whole.width}}};
  if (whole.tie_head)
    plan.tied = {"embed.weight"};
  else
    plan.head.push_back({"head.weight", {whole.vocabulary, whole.width}});
  plan.head_flops_per_token = head_flops_per_token(whole);
  plan.head_moved_per_token = 2 * words + 4 * elements;
  return plan;
}

}  // namespace penstock::models
