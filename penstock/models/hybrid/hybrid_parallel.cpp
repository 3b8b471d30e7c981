#include "penstock/models/hybrid/hybrid_parallel.h"

#include <fmt/format.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/attention.h"
#include "penstock/models/blocks/dynamic_tanh.h"
#include "penstock/models/blocks/expert_parallel.h"
#include "penstock/models/blocks/experts.h"
#include "penstock/models/blocks/feed_forward.h"
#include "penstock/models/blocks/ngram_embedding.h"
#include "penstock/models/blocks/norm.h"
#include "penstock/models/blocks/platform_embedding.h"
#include "penstock/models/blocks/relation_bias_table.h"
#include "penstock/models/blocks/state_space.h"
#include "penstock/models/blocks/structure_embedding.h"
#include "penstock/models/blocks/tree_feed_forward.h"
#include "penstock/models/plan/hybrid_parts.h"
#include "penstock/tensor_parallel.h"

namespace penstock::models {
namespace {

// In the pattern or for multi-token prediction.
bool has_block(const HybridParts& parts, BlockKind kind) {
  if (parts.multi_token.depth > 0 && parts.multi_token_kind == kind) return true;
  return std::find(parts.pattern.blocks.begin(), parts.pattern.blocks.end(), kind) !=
         parts.pattern.blocks.end();
}

void split_rows(const torch::nn::Linear& part, const comm::MeshGroups& tensor) {
  distribute_parameter(part->weight, tensor, {Shard{0}});
}

void split_columns(const torch::nn::Linear& part, const comm::MeshGroups& tensor) {
  distribute_parameter(part->weight, tensor, {Shard{1}});
}

template <class Feed>
void split_feed(const Feed& feed, const comm::MeshGroups& tensor) {
  split_rows(feed.gate, tensor);
  split_rows(feed.up, tensor);
  split_columns(feed.down, tensor);
}

// By the kind of module, wherever it is in the stage. Others (norms, routers, embeddings of metadata and
// n-grams) stay whole: every rank computes the same with them.
void parallelize_tensors(torch::nn::Module& stage, const comm::MeshGroups& tensor, TokensOfRanks tokens) {
  for (const auto& module : stage.modules(/*include_self=*/false)) {
    if (const auto* attention = module->as<AttentionImpl>()) {
      for (const torch::nn::Linear& part : {attention->query, attention->key, attention->value})
        split_rows(part, tensor);
      split_columns(attention->output, tensor);
    } else if (const auto* feed = module->as<FeedForwardImpl>()) {
      split_feed(*feed, tensor);
    } else if (const auto* tree = module->as<TreeFeedForwardImpl>()) {
      split_feed(*tree, tensor);
      distribute_parameter(tree->mix, tensor, {Replicate{}});  // used by every rank for its columns
    } else if (const auto* table = module->as<RelationBiasTableImpl>()) {
      distribute_parameter(table->weight, tensor, {Shard{1}});  // each rank has the columns of its heads
    } else if (auto* states = module->as<StateSpaceImpl>()) {
      parallelize_state_space(*states, tensor);
    }
  }
  for (const auto& child : stage.named_children()) {
    if (child.key() == "embed") {
      const at::Tensor& weight = child.value()->as<torch::nn::EmbeddingImpl>()->weight;
      distribute_parameter(weight, tensor, {Shard{0}});
      set_embedding_boundary(weight, tokens);
    }
    if (child.key() == "head")
      distribute_parameter(child.value()->as<torch::nn::LinearImpl>()->weight, tensor, {Shard{0}});
  }
}

// What computes the tokens of its rank. Parameters that are split already, such as the norm within a state
// space, stay as they are.
void replicate_for_tokens(torch::nn::Module& stage, const comm::MeshGroups& tensor) {
  const auto replicate = [&](const torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters())
      if (!is_dtensor(parameter)) distribute_parameter(parameter, tensor, {Replicate{}});
  };
  for (const auto& module : stage.modules(/*include_self=*/false)) {
    if (const auto* experts = module->as<ExpertsImpl>()) replicate(*experts->router);
    if (module->as<RmsNormImpl>() || module->as<DynamicTanhImpl>() || module->as<NgramEmbeddingImpl>() ||
        module->as<StructureEmbeddingImpl>() || module->as<PlatformEmbeddingImpl>())
      replicate(*module);
  }
}

}  // namespace

void set_embedding_boundary(const at::Tensor& weight, TokensOfRanks tokens) {
  if (!is_dtensor(weight)) return;
  set_boundary(weight,
               {.mesh = mesh_of(weight),
                .axis = 0,
                .plain_input = Replicate{},
                .desired_input = Replicate{},
                .output = tokens == TokensOfRanks::All ? Placement(Replicate{}) : Placement(Shard{1})});
}

void check_tensor_parallel(const HybridOptions& options, int ranks) {
  const HybridOptions whole = options.resolved();
  const HybridParts parts = hybrid_parts(whole);
  const auto divides = [&](const char* field, std::int64_t size, const char* remedy) {
    if (size % ranks != 0)
      throw ConfigError(describe(fmt::format("layout.tp = {}: model.{}", ranks, field),
                                 fmt::format("{}", size), fmt::format("a multiple of {}", ranks), remedy));
  };
  if (has_block(parts, BlockKind::Attention)) {
    const char* const heads = "each rank gets whole heads: change the number of heads or layout.tp";
    divides("heads", whole.heads, heads);
    divides("key_value_heads", whole.key_value_heads, heads);
  }
  if (has_block(parts, BlockKind::Experts)) parts.experts.check_columns(ranks);
  if (has_block(parts, BlockKind::StateSpace)) parts.state_space.check_tensor_parallel(ranks);
}

void check_expert_parallel(const HybridOptions& options, int ranks) {
  const HybridParts parts = hybrid_parts(options.resolved());
  if (ranks > 1 && !has_block(parts, BlockKind::Experts))
    throw ConfigError(describe("layout.ep", fmt::format("{}", ranks),
                               fmt::format("1, because neither model.pattern = {} nor multi-token prediction "
                                           "has E blocks",
                                           options.pattern),
                               "use layout.dp or layout.shard alone"));
  if (has_block(parts, BlockKind::Experts)) parts.experts.check_parallel(ranks);
}

void parallelize_hybrid(torch::nn::Module& stage, const comm::MeshGroups& mesh, TokensOfRanks tokens) {
  const std::vector<std::string>& names = mesh.mesh().names();
  const bool tensor = std::find(names.begin(), names.end(), "tp") != names.end();
  for (const auto& module : stage.modules(/*include_self=*/false))
    if (auto* experts = module->as<ExpertsImpl>()) parallelize_experts(*experts, mesh);
  if (!tensor) return;
  const comm::MeshGroups ranks = mesh.with_mesh(mesh.mesh()["tp"]);
  parallelize_tensors(stage, ranks, tokens);
  if (tokens == TokensOfRanks::Divided) replicate_for_tokens(stage, ranks);
}

}  // namespace penstock::models
