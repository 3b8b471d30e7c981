#include "penstock/hybrid_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/plan/element_count.h"
#include "penstock/models/plan/hybrid_parts.h"
#include "penstock/models/plan/tree_feed_options.h"

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
          .router_bias_rate = options.router_bias_rate,
          .shared_expert_width = options.shared_expert_width,
          .capacity_factor = options.capacity_factor};
}

std::optional<RelationOptions> relations_of(const HybridOptions& options, const BlockPattern& pattern) {
  if (options.relations == 0) return std::nullopt;
  require_of_hybrid(options.relations > 0, "relations", fmt::format("{}", options.relations),
                    "at least 1, or 0 for no relation bias");
  require_of_hybrid(uses(pattern, BlockKind::Attention), "relations", fmt::format("{}", options.relations),
                    "0 for a pattern without A, because relations are a bias of attention",
                    "add an A to model.pattern or set model.relations to 0");
  return RelationOptions{.relations = options.relations, .heads = options.heads};
}

void check_tree_feed(const HybridOptions& options, const BlockPattern& pattern) {
  const bool has_feed = uses(pattern, BlockKind::FeedForward) ||
                        (options.attention_feed && uses(pattern, BlockKind::Attention));
  require_of_hybrid(!options.tree_feed || has_feed, "tree_feed", "true",
                    "false for a pattern without feed-forward parts",
                    "add an F to model.pattern, or set model.attention_feed to true");
}

BlockKind multi_token_kind_of(const HybridOptions& options, const BlockPattern& pattern) {
  if (options.multi_token_block.empty()) return pattern.blocks.back();
  require_of_hybrid(
      options.multi_token_block.size() == 1 && options.multi_token_block.find_first_of("AMEF") == 0,
      "multi_token_block", fmt::format("\"{}\"", options.multi_token_block),
      "one letter, A, M, E or F, or nothing for that of the last block");
  return parse_pattern(options.multi_token_block).blocks.front();
}

void check_depth_layers(const std::vector<std::int64_t>& blocks, std::int64_t layers) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    require_of_hybrid(blocks[i] >= 0 && blocks[i] < layers, "depth_layers", fmt::format("{}", blocks[i]),
                      fmt::format("a block from 0 to {}", layers - 1),
                      "they are the letters of model.pattern, counted from 0");
    require_of_hybrid(std::find(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(i), blocks[i]) ==
                          blocks.begin() + static_cast<std::ptrdiff_t>(i),
                      "depth_layers", fmt::format("{} twice", blocks[i]), "each block once");
  }
}

std::vector<ParameterShape> feed_shapes(const HybridOptions& options, const std::string& at) {
  if (options.tree_feed)
    return TreeFeedOptions{.width = options.width, .feed_width = options.feed_width}.shapes(at);
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
  if (!options.tree_feed) return;
  block.flops_per_token += 2 * static_cast<double>(options.width);
  block.moved_per_token += 3 * static_cast<double>(options.width);
}

// A block that only some tokens go through; every token is scored, and chosen ones are gathered and added.
void add_routing(BlockPlan& block, const HybridOptions& options, const HybridParts& parts,
                 const std::string& at) {
  const double share =
      static_cast<double>(parts.depth.chosen(options.context)) / static_cast<double>(options.context);
  const auto width = static_cast<double>(options.width);
  for (ParameterShape& shape : parts.depth.shapes(at)) block.parameters.push_back(std::move(shape));
  block.kind = "routed " + block.kind;
  block.flops_per_token = block.flops_per_token * share + parts.depth.flops_per_token(options.context);
  block.moved_per_token = block.moved_per_token * share + 3 * width;
}

BlockPlan block_plan(const HybridOptions& options, const HybridParts& parts, std::int64_t index) {
  const BlockKind kind = parts.kind(index);
  const std::string at = fmt::format("blocks.{}.", index);
  BlockPlan block{.letter = letter_of(kind), .kind = name_of(kind)};
  const bool routed = parts.is_routed(index);
  const std::int64_t length = routed ? parts.depth.chosen(options.context) : options.context;
  const auto width = static_cast<double>(options.width);
  switch (kind) {
    case BlockKind::Attention: {
      add_residual(block, parts, at, "attention", attention_shapes(parts.attention, at + "attention"));
      block.flops_per_token += attention_flops_per_token(parts.attention, index, length);
      const std::int64_t window = parts.attention.window_of(index);
      // Costs are measured once for each kind.
      if (window > 0 && window < options.context)
        block.kind = fmt::format("{} with a window of {}", block.kind, window);
      const std::int64_t seen = window > 0 ? std::min(window, length) : length;
      block.moved_per_token += 8 * width + 4 * static_cast<double>(seen * options.heads);
      if (parts.relations) block.moved_per_token += 2 * static_cast<double>(options.context * options.heads);
      if (options.attention_feed) add_feed(block, options, parts, at);
      break;
    }
    case BlockKind::StateSpace:
      add_residual(block, parts, at, "state_space", parameter_shapes(parts.state_space, at + "state_space."));
      block.flops_per_token += flops_per_token(parts.state_space, length);
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
  if (routed) add_routing(block, options, parts, at + "depth");
  return block;
}

// The contraction with the mask is counted once, at the first attention block; in a pipeline every stage with
// attention computes it.
void add_relations(ModelPlan& plan, const HybridParts& parts) {
  if (!parts.relations) return;
  std::vector<std::int64_t> users;
  for (std::size_t i = 0; i < plan.blocks.size(); ++i)
    if (parts.kind(static_cast<std::int64_t>(i)) == BlockKind::Attention)
      users.push_back(static_cast<std::int64_t>(i));
  plan.blocks[static_cast<std::size_t>(users.front())].flops_per_token +=
      parts.relations->flops_per_token(plan.context);
  for (ParameterShape& shape : parts.relations->shapes("relations"))
    plan.shared.push_back({std::move(shape), users});
}

// What multi-token prediction adds to the last stage: for each depth a projection, a block and the head.
void add_multi_token(ModelPlan& plan, const HybridOptions& options, const HybridParts& parts) {
  const auto append = [&](std::vector<ParameterShape> shapes) {
    for (ParameterShape& shape : shapes) plan.head.push_back(std::move(shape));
  };
  const double head_flops = plan.head_flops_per_token, head_moved = plan.head_moved_per_token;
  append(parts.multi_token.shapes("multi_token"));
  plan.head_flops_per_token += parts.multi_token.flops_per_token(options.context);
  const HybridParts extended = parts.with_multi_token_blocks();
  const auto layers = static_cast<std::int64_t>(parts.pattern.blocks.size());
  for (std::int64_t d = 0; d < parts.multi_token.depth; ++d) {
    BlockPlan block = block_plan(options, extended, layers + d);
    plan.multi_token_letters += block.letter;
    plan.head_inactive_parameters += block.inactive_parameters;
    plan.head_flops_per_token += head_flops + block.flops_per_token;
    plan.head_moved_per_token += head_moved + block.moved_per_token;
    append(std::move(block.parameters));
  }
}

}  // namespace

std::int64_t HybridParts::residuals(const HybridOptions& options) const {
  const auto attention = std::count(pattern.blocks.begin(), pattern.blocks.end(), BlockKind::Attention);
  return static_cast<std::int64_t>(pattern.blocks.size()) + (options.attention_feed ? attention : 0);
}

bool HybridParts::is_routed(std::int64_t block) const {
  return std::find(depth_layers.begin(), depth_layers.end(), block) != depth_layers.end();
}

std::int64_t HybridParts::blocks_with(std::string_view loss) const {
  if (loss == "depth_router") return static_cast<std::int64_t>(depth_layers.size());
  if (loss != "balance" && loss != "router_z") return 1;
  const auto experts = std::count(pattern.blocks.begin(), pattern.blocks.end(), BlockKind::Experts);
  return experts + (multi_token_kind == BlockKind::Experts ? multi_token.depth : 0);
}

std::vector<AuxiliaryTerm> HybridParts::auxiliary_terms() const {
  std::vector<AuxiliaryTerm> terms;
  for (const char* each : {"balance", "router_z", "depth_router"})
    if (blocks_with(each) > 0) terms.push_back({each, weights.of(each)});
  if (multi_token.depth > 0) terms.push_back({"multi_token", weights.of("multi_token")});
  return terms;
}

HybridParts HybridParts::with_multi_token_blocks() const {
  HybridParts more = *this;
  more.pattern.blocks.insert(more.pattern.blocks.end(), static_cast<std::size_t>(multi_token.depth),
                             multi_token_kind);
  more.attention.layers = static_cast<std::int64_t>(more.pattern.blocks.size());
  more.attention.windows.clear();
  more.attention.nope_layers.clear();
  more.depth_layers.clear();
  return more;
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
  if (key_value_heads == 0) whole.key_value_heads = heads;
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
      .weights = {},
      .inputs = hybrid_inputs(options),
      .relations = {},
      .depth = {.width = options.width,
                .capacity = options.depth_capacity,
                .kind = depth_kind_from(options.depth_kind),
                .gamma = options.depth_gamma},
      .depth_layers = options.depth_layers,
      .multi_token = {.depth = options.multi_token_depth, .norm = {}}};
  parts.norm.check();
  const auto layers = static_cast<std::int64_t>(parts.pattern.blocks.size());
  check_depth_layers(parts.depth_layers, layers);
  if (!parts.depth_layers.empty()) parts.depth.check();
  require_of_hybrid(options.multi_token_depth >= 0, "multi_token_depth",
                    fmt::format("{}", options.multi_token_depth), "at least 1, or 0 for none");
  // The farthest token that a row can be asked for is its last.
  require_of_hybrid(options.multi_token_depth < options.context, "multi_token_depth",
                    fmt::format("{}", options.multi_token_depth),
                    fmt::format("less than model.context, {}", options.context),
                    "lower model.multi_token_depth, or raise model.context");
  if (options.multi_token_depth > 0) {
    parts.multi_token.norm = parts.norm;
    parts.multi_token_kind = multi_token_kind_of(options, parts.pattern);
  }
  const auto used = [&](BlockKind kind) {
    return uses(parts.pattern, kind) || (options.multi_token_depth > 0 && parts.multi_token_kind == kind);
  };
  if (used(BlockKind::Attention)) parts.attention = attention_of(options, layers).resolved();
  if (used(BlockKind::StateSpace)) {
    parts.state_space = state_space_of(options);
    parts.state_space.check();
  }
  if (used(BlockKind::Experts)) {
    parts.experts = experts_of(options);
    parts.experts.check();
    require_of_hybrid(options.balance_scope == "microbatch" || options.balance_scope == "replica",
                      "balance_scope", fmt::format("\"{}\"", options.balance_scope),
                      "\"microbatch\" or \"replica\"");
  }
  parts.relations = relations_of(options, parts.pattern);
  check_tree_feed(options, parts.pattern);
  parts.weights.set("balance", options.balance_weight);
  parts.weights.set("router_z", options.router_z_weight);
  parts.weights.set("depth_router", options.depth_weight);
  parts.weights.set("multi_token", options.multi_token_weight);
  return parts;
}

ModelPlan HybridOptions::plan() const {
  const HybridOptions whole = resolved();
  const HybridParts parts = hybrid_parts(whole);
  ModelPlan plan{.vocabulary = whole.vocabulary, .width = whole.width, .context = whole.context};
  plan.embed = {{"embed.weight", {whole.vocabulary, whole.width}}};
  parts.inputs.add_to(plan);
  for (std::size_t i = 0; i < parts.pattern.blocks.size(); ++i)
    plan.blocks.push_back(block_plan(whole, parts, static_cast<std::int64_t>(i)));
  add_relations(plan, parts);
  plan.head = parts.norm.shapes("norm");
  // Multi-token prediction reads the embedding of the true tokens at the last stage.
  if (whole.tie_head || whole.multi_token_depth > 0) plan.tied = {"embed.weight"};
  if (!whole.tie_head) plan.head.push_back({"head.weight", {whole.vocabulary, whole.width}});
  plan.head_flops_per_token = 2.0 * static_cast<double>(whole.vocabulary) * static_cast<double>(whole.width);
  plan.head_moved_per_token =
      2.0 * static_cast<double>(whole.vocabulary) + 4.0 * static_cast<double>(whole.width);
  if (whole.multi_token_depth > 0) add_multi_token(plan, whole, parts);
  plan.auxiliary = parts.auxiliary_terms();
  return plan;
}

}  // namespace penstock::models
