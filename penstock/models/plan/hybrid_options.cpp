#include "penstock/hybrid_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/plan/element_count.h"
#include "penstock/models/plan/hybrid_parts.h"

namespace penstock::models {
namespace {

constexpr std::int64_t kFeedRounding = 32;

bool uses(const BlockPattern& pattern, BlockKind kind) {
  return std::find(pattern.blocks.begin(), pattern.blocks.end(), kind) != pattern.blocks.end();
}

void require_of_hybrid(bool good, const char* field, const std::string& actual, const std::string& expected,
                       const std::string& remedy = {}) {
  if (!good) throw ConfigError(describe(fmt::format("model.{}", field), actual, expected, remedy));
}

AttentionOptions attention_of(const HybridOptions& options, std::int64_t layers) {
  return {.width = options.width,
          .heads = options.heads,
          .key_value_heads = options.key_value_heads,
          .layers = layers,
          .windows = options.windows,
          .nope_layers = options.nope_layers,
          .rope_theta = options.rope_theta,
          .context = options.context,
          .documents = options.bos_token > 0 ? DocumentSource::BosTokens : DocumentSource::Given,
          .bos_token = options.bos_token};
}

StateSpaceOptions state_space_of(const HybridOptions& options) {
  return {.width = options.width,
          .state_size = options.state_size,
          .state_head_width = options.state_head_width,
          .state_expand = options.state_expand,
          .state_groups = options.state_groups,
          .state_kernel = options.state_kernel,
          .state_chunk = options.state_chunk,
          .norm_epsilon = options.norm_epsilon};
}

ExpertOptions experts_of(const HybridOptions& options) {
  return {.width = options.width,
          .experts = options.experts,
          .top_k = options.top_k,
          .expert_width = options.expert_width,
          .router_scores = parse_router_scores(options.router_scores),
          .router_normalize = options.router_normalize,
          .shared_expert_width = options.shared_expert_width,
          .capacity_factor = options.capacity_factor};
}

std::vector<ParameterShape> feed_shapes(const HybridOptions& options, const std::string& at) {
  return {{at + ".gate.weight", {options.feed_width, options.width}},
          {at + ".up.weight", {options.feed_width, options.width}},
          {at + ".down.weight", {options.width, options.feed_width}}};
}

// Adds a residual: its norm and its parameters, and the elements that both touch.
void add_residual(BlockPlan& block, const HybridParts& parts, const std::string& at, const char* name,
                  std::vector<ParameterShape> parameters) {
  for (ParameterShape& shape : parts.norm.shapes(at + name + "_norm"))
    block.parameters.push_back(std::move(shape));
  for (ParameterShape& shape : parameters) block.parameters.push_back(std::move(shape));
  block.moved_per_token += 6 * static_cast<double>(parts.norm.width);
}

void add_feed(BlockPlan& block, const HybridOptions& options, const HybridParts& parts,
              const std::string& at) {
  add_residual(block, parts, at, "feed", feed_shapes(options, at + "feed"));
  block.flops_per_token += 6 * static_cast<double>(options.width) * static_cast<double>(options.feed_width);
  block.moved_per_token += 6 * static_cast<double>(options.feed_width);
}

BlockPlan block_plan(const HybridOptions& options, const HybridParts& parts, std::int64_t index) {
  const BlockKind kind = parts.kind(index);
  const std::string at = fmt::format("blocks.{}.", index);
  BlockPlan block{.letter = letter_of(kind), .kind = name_of(kind)};
  const auto width = static_cast<double>(options.width);
  switch (kind) {
    case BlockKind::Attention: {
      add_residual(block, parts, at, "attention", attention_shapes(parts.attention, at + "attention"));
      block.flops_per_token += attention_flops_per_token(parts.attention, index, options.context);
      const std::int64_t window = parts.attention.window_of(index);
      const std::int64_t seen = window > 0 ? std::min(window, options.context) : options.context;
      block.moved_per_token += 8 * width + 4 * static_cast<double>(seen * options.heads);
      if (options.attention_feed) add_feed(block, options, parts, at);
      break;
    }
    case BlockKind::StateSpace:
      add_residual(block, parts, at, "state_space", parameter_shapes(parts.state_space, at + "state_space."));
      block.flops_per_token += flops_per_token(parts.state_space, options.context);
      block.moved_per_token += 16 * width * static_cast<double>(options.state_expand);
      break;
    case BlockKind::Experts:
      add_residual(block, parts, at, "experts", parameter_shapes(parts.experts, at + "experts"));
      block.inactive_parameters = parameter_count(parts.experts) - active_parameter_count(parts.experts);
      block.flops_per_token += flops_per_token(parts.experts);
      block.moved_per_token += static_cast<double>(options.top_k) *
                               (4 * width + 6 * static_cast<double>(parts.experts.expert_width));
      break;
    case BlockKind::FeedForward:
      add_feed(block, options, parts, at);
      break;
  }
  return block;
}

}  // namespace

std::int64_t HybridParts::residuals(const HybridOptions& options) const {
  const auto attention = std::count(pattern.blocks.begin(), pattern.blocks.end(), BlockKind::Attention);
  return static_cast<std::int64_t>(pattern.blocks.size()) + (options.attention_feed ? attention : 0);
}

HybridOptions HybridOptions::resolved() const {
  HybridOptions whole = *this;
  const auto positive = [](const char* field, std::int64_t value) {
    require_of_hybrid(value >= 1, field, fmt::format("{}", value), "at least 1");
  };
  positive("vocabulary", vocabulary);
  positive("width", width);
  positive("context", context);
  require_of_hybrid(feed_width >= 0, "feed_width", fmt::format("{}", feed_width),
                    "at least 1, or 0 for two thirds of 4 * width");
  require_of_hybrid(expert_width >= 0, "expert_width", fmt::format("{}", expert_width),
                    "at least 1, or 0 for model.feed_width");
  require_of_hybrid(dropout >= 0 && dropout < 1, "dropout", fmt::format("{}", dropout),
                    "from 0 to less than 1");
  if (whole.feed_width == 0)
    whole.feed_width = (8 * width / 3 + kFeedRounding - 1) / kFeedRounding * kFeedRounding;
  if (whole.expert_width == 0) whole.expert_width = whole.feed_width;
  const BlockPattern parsed = parse_pattern(pattern);
  if (uses(parsed, BlockKind::Attention) && key_value_heads == 0) whole.key_value_heads = heads;
  hybrid_parts(whole);
  return whole;
}

HybridParts hybrid_parts(const HybridOptions& options) {
  HybridParts parts{
      .pattern = parse_pattern(options.pattern),
      .norm = {.kind = norm_kind_from(options.norm), .width = options.width, .epsilon = options.norm_epsilon},
      .attention = {},
      .state_space = {},
      .experts = {},
      .weights = {}};
  parts.norm.check();
  const auto layers = static_cast<std::int64_t>(parts.pattern.blocks.size());
  if (uses(parts.pattern, BlockKind::Attention)) parts.attention = attention_of(options, layers).resolved();
  if (uses(parts.pattern, BlockKind::StateSpace)) {
    parts.state_space = state_space_of(options);
    parts.state_space.check();
  }
  if (uses(parts.pattern, BlockKind::Experts)) {
    parts.experts = experts_of(options);
    parts.experts.check();
    require_of_hybrid(options.balance_scope == "microbatch" || options.balance_scope == "replica",
                      "balance_scope", fmt::format("\"{}\"", options.balance_scope),
                      "\"microbatch\" or \"replica\"");
  }
  parts.weights.set("balance", options.balance_weight);
  parts.weights.set("router_z", options.router_z_weight);
  return parts;
}

ModelPlan HybridOptions::plan() const {
  const HybridOptions whole = resolved();
  const HybridParts parts = hybrid_parts(whole);
  ModelPlan plan{.vocabulary = whole.vocabulary, .width = whole.width, .context = whole.context};
  plan.embed = {{"embed.weight", {whole.vocabulary, whole.width}}};
  for (std::size_t i = 0; i < parts.pattern.blocks.size(); ++i)
    plan.blocks.push_back(block_plan(whole, parts, static_cast<std::int64_t>(i)));
  plan.head = parts.norm.shapes("norm");
  if (whole.tie_head)
    plan.tied = {"embed.weight"};
  else
    plan.head.push_back({"head.weight", {whole.vocabulary, whole.width}});
  plan.head_flops_per_token = 2.0 * static_cast<double>(whole.vocabulary) * static_cast<double>(whole.width);
  plan.head_moved_per_token =
      2.0 * static_cast<double>(whole.vocabulary) + 4.0 * static_cast<double>(whole.width);
  return plan;
}

}  // namespace penstock::models
