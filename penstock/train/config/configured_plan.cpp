#include "penstock/train/config/configured_plan.h"

#include <fmt/format.h>

#include <cstddef>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock::train {
namespace {

// The transformer has no other blocks than A with a feed-forward part, and none of the options of others.
bool fits_transformer(const ModelConfig& model) {
  return model.attention_feed && model.norm == "rms_norm" && !model.embed_scale && model.windows.empty() &&
         model.nope_layers.empty() && model.bos_token == 0 && model.relations == 0 && !model.tree_feed &&
         model.ngram_orders.empty() && !model.structure_embedding && model.platforms == 0 &&
         model.embed_norm == "none" && model.depth_layers.empty() && model.multi_token_depth == 0 &&
         model.pattern.find_first_not_of("A|") == std::string::npos;
}

}  // namespace

models::TransformerOptions transformer_options(const ModelConfig& config) {
  return models::TransformerOptions{.vocabulary = config.vocabulary,
                                    .width = config.width,
                                    .layers = config.layers,
                                    .heads = config.heads,
                                    .key_value_heads = config.key_value_heads,
                                    .feed_width = config.feed_width,
                                    .context = config.context,
                                    .rope_theta = config.rope_theta,
                                    .norm_epsilon = config.norm_epsilon,
                                    .tie_head = config.tie_head,
                                    .dropout = config.dropout}
      .resolved();
}

models::HybridOptions hybrid_options(const ModelConfig& config) {
  const std::string pattern =
      config.pattern.empty() ? std::string(static_cast<std::size_t>(config.layers), 'A') : config.pattern;
  models::HybridOptions options{.pattern = pattern,
                                .vocabulary = config.vocabulary,
                                .width = config.width,
                                .context = config.context,
                                .norm = config.norm,
                                .norm_epsilon = config.norm_epsilon,
                                .tie_head = config.tie_head,
                                .embed_scale = config.embed_scale,
                                .dropout = config.dropout};
  options.heads = config.heads;
  options.key_value_heads = config.key_value_heads;
  options.feed_width = config.feed_width;
  options.attention_feed = config.attention_feed;
  options.rope_theta = config.rope_theta;
  options.windows = config.windows;
  options.nope_layers = config.nope_layers;
  options.bos_token = config.bos_token;
  options.relations = config.relations;
  options.tree_feed = config.tree_feed;
  options.ngram_orders = config.ngram_orders;
  options.ngram_buckets = config.ngram_buckets;
  options.structure_embedding = config.structure_embedding;
  options.structure_kinds = config.structure_kinds;
  options.dependency_levels = config.dependency_levels;
  options.syntax_depths = config.syntax_depths;
  options.sibling_indices = config.sibling_indices;
  options.node_types = config.node_types;
  options.platforms = config.platforms;
  options.embed_norm = config.embed_norm;
  options.state_size = config.state_size;
  options.state_head_width = config.state_head_width;
  options.state_expand = config.state_expand;
  options.state_groups = config.state_groups;
  options.state_kernel = config.state_kernel;
  options.state_chunk = config.state_chunk;
  options.experts = config.experts;
  options.top_k = config.top_k;
  options.expert_width = config.expert_width;
  options.router_scores = config.router_scores;
  options.router_normalize = config.router_normalize;
  options.shared_expert_width = config.shared_expert_width;
  options.capacity_factor = config.capacity_factor;
  options.balance_weight = config.balance_weight;
  options.balance_scope = config.balance_scope;
  options.router_z_weight = config.router_z_weight;
  options.router_bias_rate = config.router_bias_rate;
  options.depth_layers = config.depth_layers;
  options.depth_capacity = config.depth_capacity;
  options.depth_kind = config.depth_kind;
  options.depth_gamma = config.depth_gamma;
  options.depth_weight = config.depth_weight;
  options.multi_token_depth = config.multi_token_depth;
  options.multi_token_block = config.multi_token_block;
  options.multi_token_weight = config.multi_token_weight;
  return options.resolved();
}

std::string configured_type(const ModelConfig& model) {
  if (model.type == "auto") return fits_transformer(model) ? "transformer" : "hybrid";
  if (model.type == "transformer" && !fits_transformer(model))
    throw ConfigError(
        describe("model.type", "transformer, with settings that it cannot have",
                 "A blocks with a feed-forward part, rms_norm, and no windows, nope_layers, "
                 "embed_scale, bos_token, relations, tree_feed, ngram_orders, "
                 "structure_embedding, platforms, embed_norm, depth_layers or multi_token_depth",
                 "set model.type to hybrid or auto"));
  return model.type;
}

models::ModelPlan configured_plan(const ModelConfig& model) {
  const std::string type = configured_type(model);
  if (type == "transformer") return transformer_options(model).plan();
  if (type == "hybrid") return hybrid_options(model).plan();
  throw ConfigError(describe("model.type", quote(type), "transformer, hybrid or auto",
                             "the blocks of other models are known only to the program that registers them: "
                             "use models::partition_model() there"));
}

models::PartitionOptions configured_partition(const TrainConfig& config) {
  using models::Balance;
  const std::string& by = config.layout.partition;
  return {.balance = by == "cost"     ? Balance::Cost
                     : by == "weight" ? Balance::Weight
                                      : Balance::Count,
          .pattern = config.model.pattern};
}

}  // namespace penstock::train
