#include "penstock/models/plan/attention_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

void require_attention(bool good, const char* key, const std::string& actual, const std::string& expected,
                       const std::string& remedy = {}) {
  if (!good) throw ConfigError(describe(fmt::format("model.{}", key), actual, expected, remedy));
}

std::string list_text(const std::vector<std::int64_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}

void check_heads_of(const AttentionOptions& whole, const AttentionOptions& given) {
  require_attention(given.head_width > 0 || given.width % given.heads == 0, "heads",
                    fmt::format("{}", given.heads), fmt::format("a divisor of width, {}", given.width),
                    "use another number of heads");
  require_attention(whole.head_width % 2 == 0, "head_width", fmt::format("{}", whole.head_width),
                    "an even number, because rotary positions rotate pairs", "use another number of heads");
  require_attention(whole.heads % whole.key_value_heads == 0, "key_value_heads",
                    fmt::format("{}", given.key_value_heads),
                    fmt::format("a divisor of heads, {}", whole.heads));
}

void check_windows(const AttentionOptions& options) {
  const std::int64_t count = static_cast<std::int64_t>(options.windows.size());
  require_attention(count == 0 || (count <= options.layers && options.layers % count == 0), "windows",
                    fmt::format("{}, {} values", list_text(options.windows), count),
                    fmt::format("one value, one for each of the {} layers, or a list whose repetition gives "
                                "exactly {}",
                                options.layers, options.layers),
                    "use a number of values that divides the number of layers");
  for (const std::int64_t window : options.windows)
    require_attention(window >= 0, "windows", list_text(options.windows),
                      "numbers of tokens, at least 1, or 0 for all", fmt::format("replace {}", window));
}

void check_nope_layers(const AttentionOptions& options) {
  std::set<std::int64_t> seen;
  for (const std::int64_t layer : options.nope_layers) {
    require_attention(layer >= 0 && layer < options.layers, "nope_layers", list_text(options.nope_layers),
                      fmt::format("indices of layers of the whole model, 0 to {}", options.layers - 1),
                      fmt::format("remove {}", layer));
    require_attention(seen.insert(layer).second, "nope_layers", list_text(options.nope_layers),
                      "every layer at most once", fmt::format("remove one {}", layer));
  }
}

}  // namespace

AttentionOptions AttentionOptions::resolved() const {
  for (const auto& [key, value] : {std::pair{"width", width}, std::pair{"heads", heads},
                                   std::pair{"layers", layers}, std::pair{"context", context}})
    require_attention(value >= 1, key, fmt::format("{}", value), "at least 1");
  require_attention(key_value_heads >= 0, "key_value_heads", fmt::format("{}", key_value_heads),
                    "at least 1, or 0 for as many as heads");
  require_attention(head_width >= 0, "head_width", fmt::format("{}", head_width),
                    "at least 2, or 0 for width / heads");
  AttentionOptions whole = *this;
  if (whole.key_value_heads == 0) whole.key_value_heads = heads;
  if (whole.head_width == 0) whole.head_width = width / heads;
  check_heads_of(whole, *this);
  check_windows(whole);
  check_nope_layers(whole);
  require_attention(rope_theta > 1 && rope_theta < 1e15, "rope_theta", fmt::format("{}", rope_theta),
                    "more than 1; 10000 is usual");
  require_attention(documents != DocumentSource::BosTokens || bos_token >= 1, "bos_token",
                    fmt::format("{}", bos_token),
                    "the number of the token that begins a document, at least 1",
                    "set it, or take documents from the data");
  return whole;
}

std::int64_t AttentionOptions::window_of(std::int64_t layer) const {
  if (layer < 0 || layer >= layers)
    throw ValueError(
        describe("attention: layer", fmt::format("{}", layer), fmt::format("0 to {}", layers - 1)));
  return windows.empty() ? 0 : windows[static_cast<std::size_t>(layer) % windows.size()];
}

bool AttentionOptions::has_positions(std::int64_t layer) const {
  return std::find(nope_layers.begin(), nope_layers.end(), layer) == nope_layers.end();
}

AttentionOptions attention_options(const TransformerOptions& options) {
  const TransformerOptions whole = options.resolved();
  return AttentionOptions{.width = whole.width,
                          .heads = whole.heads,
                          .key_value_heads = whole.key_value_heads,
                          .head_width = whole.head_width(),
                          .layers = whole.layers,
                          .rope_theta = whole.rope_theta,
                          .context = whole.context};
}

std::vector<ParameterShape> attention_shapes(const AttentionOptions& options, const std::string& prefix) {
  const AttentionOptions whole = options.resolved();
  return {{prefix + ".query.weight", {whole.query_width(), whole.width}},
          {prefix + ".key.weight", {whole.key_width(), whole.width}},
          {prefix + ".value.weight", {whole.key_width(), whole.width}},
          {prefix + ".output.weight", {whole.width, whole.query_width()}}};
}

std::int64_t attention_parameter_count(const AttentionOptions& options) {
  const AttentionOptions whole = options.resolved();
  return 2 * whole.width * (whole.query_width() + whole.key_width());
}

double attention_flops_per_token(const AttentionOptions& options, std::int64_t layer, std::int64_t length) {
  const AttentionOptions whole = options.resolved();
  const std::int64_t window = whole.window_of(layer), seen = window == 0 ? length : std::min(window, length);
  return 2.0 * static_cast<double>(attention_parameter_count(whole)) +
         4.0 * static_cast<double>(seen) * static_cast<double>(whole.query_width());
}

}  // namespace penstock::models
