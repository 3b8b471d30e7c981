#include "penstock/train/job/configured_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/models/transformer/trainable_transformer.h"
#include "penstock/trainer.h"

namespace penstock::train {
namespace {

std::shared_ptr<models::TrainableModel> make_transformer(const TrainConfig& config) {
  return models::trainable_transformer(transformer_options(config.model));
}

std::shared_ptr<models::TrainableModel> make_hybrid(const TrainConfig& config) {
  return models::trainable_hybrid(hybrid_options(config.model),
                                  1.0 / static_cast<double>(config.training.accumulation));
}

// The transformer has no other blocks than A with a feed-forward part, and none of the options of others.
bool fits_transformer(const ModelConfig& model) {
  return model.attention_feed && model.norm == "rms_norm" && !model.embed_scale && model.windows.empty() &&
         model.nope_layers.empty() && model.bos_token == 0 && model.relations == 0 && !model.tree_feed &&
         model.ngram_orders.empty() && !model.structure_embedding && model.platforms == 0 &&
         model.embed_norm == "none" && model.depth_layers.empty() && model.multi_token_depth == 0 &&
         model.pattern.find_first_not_of("A|") == std::string::npos;
}

// Models by name. Registered at the start of a program, read by the threads of its ranks.
class Models {
 public:
  static Models& all() {
    static Models models;
    return models;
  }

  void add(const std::string& name, ModelFactory factory) {
    const std::lock_guard lock(mutex_);
    if (name.empty() || name == "auto" || !factories_.emplace(name, std::move(factory)).second)
      throw ValueError(describe("register_model", fmt::format("\"{}\"", name), "a name that is not in use",
                                "choose another name"));
  }

  ModelFactory find(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto found = factories_.find(name);
    if (found != factories_.end()) return found->second;
    std::vector<std::string> names{"auto"};
    for (const auto& [known, factory] : factories_) names.push_back(known);
    throw ConfigError(describe("model.type", quote(name), fmt::format("one of {}", fmt::join(names, ", ")),
                               "a program can add its own with register_model()"));
  }

 private:
  Models() : factories_{{"transformer", make_transformer}, {"hybrid", make_hybrid}} {}

  mutable std::mutex mutex_;
  std::map<std::string, ModelFactory> factories_;
};

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

std::shared_ptr<models::TrainableModel> configured_model(const TrainConfig& config) {
  std::string type = config.model.type;
  if (type == "auto") type = fits_transformer(config.model) ? "transformer" : "hybrid";
  if (type == "transformer" && !fits_transformer(config.model))
    throw ConfigError(
        describe("model.type", "transformer, with settings that it cannot have",
                 "A blocks with a feed-forward part, rms_norm, and no windows, nope_layers, "
                 "embed_scale, bos_token, relations, tree_feed, ngram_orders, "
                 "structure_embedding, platforms, embed_norm, depth_layers or multi_token_depth",
                 "set model.type to hybrid or auto"));
  std::shared_ptr<models::TrainableModel> model = Models::all().find(type)(config);
  if (!model) throw StateError(fmt::format("register_model(\"{}\"): the function returned no model", type));
  return model;
}

models::RecomputePlan configured_recompute(const TrainConfig& config, const models::TrainableModel& model,
                                           int stages) {
  const TrainingConfig& training = config.training;
  models::RecomputePlan plan = models::parse_recompute(training.recompute, model.plan());
  plan.stages = training.recompute_stages;
  plan.microbatches = training.recompute_microbatches;
  models::check_recompute(plan, stages, config.layout.microbatches);
  model.check_recompute(plan);
  return plan;
}

void register_model(const std::string& name, ModelFactory factory) {
  Models::all().add(name, std::move(factory));
}

}  // namespace penstock::train
