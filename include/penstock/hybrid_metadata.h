// What a batch says about its tokens besides their text, for hybrid models: documents, padding, places in the
// syntax tree, platforms, and relations between tokens.
//
//   models::HybridStage hybrid(models::HybridOptions{.pattern = "AF", .tree_feed = true});
//   models::HybridMetadata metadata;
//   metadata.documents = documents;
//   metadata.parents = torch::arange(-1, tokens.size(1) - 1).expand_as(tokens);
//   at::Tensor output = hybrid->forward_with(tokens, metadata);
//   Tree keywords = metadata.keywords();  // for pipelines: PipelineRuntime::step(args, keywords, target)
//   models::TokenBatch batch{.tokens = tokens, .targets = targets, .metadata = keywords};
//
// Everything is optional. A part of a model whose metadata is not given contributes nothing, and metadata
// that a model has no part for is ignored. A keyword has the name of the member. A stage of a pipeline must
// be given what its blocks use (the first one also ids and platforms), and may be given the metadata of all.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "penstock/pytree.h"

namespace penstock::models {

// Undefined tensors and zeros: not given. Dim 0 is the batch.
struct HybridMetadata {
  // Integers [batch, length]: the document of each token. Attention, states, n-grams and parents do not reach
  // into another one.
  at::Tensor documents = {};

  // ---- for structure_embedding: Long or Int [batch, length], from 0 ----
  at::Tensor structure_kinds = {};    // what the token is part of
  at::Tensor dependency_levels = {};  // level of its definition in the graph of dependencies
  at::Tensor syntax_depths = {};      // depth in the syntax tree
  at::Tensor sibling_indices = {};    // place among the children of its parent
  at::Tensor node_types = {};         // type of its node

  at::Tensor parents = {};    // for tree_feed: Long or Int [batch, length], a place before the token, or -1
  at::Tensor platforms = {};  // for platforms: Long or Int [batch] or [batch, length], from 0
  at::Tensor relations = {};  // for relations: Bool or numbers [batch, relations, length, length], how query
                              // i (dim 2) is related to key j (dim 3)

  // ---- for multi_token_depth, in training: both or neither, [batch, length] ----
  at::Tensor tokens = {};   // Long or Int: what the model reads, also for the last stage
  at::Tensor targets = {};  // Long: the token after each one; kIgnoredTarget does not count

  // ---- padding at the ends of rows: no other token depends on it. The smallest of the counts that are given
  // applies. Hidden states of padding have no meaning: its targets should be kIgnoredTarget
  // (language_model.h) ----
  at::Tensor row_valid_tokens = {};    // integers [batch]: tokens of a row before its padding
  at::Tensor row_valid_blocks = {};    // integers [batch]: the same in blocks of base_block_tokens
  at::Tensor row_valid_slots = {};     // integers [batch]: the same in slots of row_block_tokens
  std::int64_t base_block_tokens = 0;  // tokens in a block
  std::int64_t row_block_tokens = 0;   // tokens in a slot

  // Returns what is given as a dict for forward_with() and pipelines; None if nothing is.
  Tree keywords() const;
  // Reads keywords(); None is no metadata, also as a value. Throws ValueError for an unknown keyword, with
  // the known ones, and for a value of another kind.
  static HybridMetadata from_keywords(const Tree& keywords);
  // Throws ValueError that names the member for tensors of another shape or dtype, and for counts without
  // their unit.
  void check(std::int64_t batch, std::int64_t length) const;
};

}  // namespace penstock::models
