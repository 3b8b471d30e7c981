// The options of a hybrid model: attention, state-space, expert and feed-forward blocks in any order.
//
//   models::HybridOptions options{.pattern = "AEME", .width = 256, .heads = 4};
//   options.experts = 8;
//   options.top_k = 2;
//   models::ModelPlan plan = options.plan();
//   std::int64_t all = models::parameter_count(plan), used = models::active_parameter_count(plan);
//
// A letter of the pattern is one residual, x + block(norm(x)): A attention, M state space, E experts, F
// feed-forward. With attention_feed an A has a feed-forward residual of its own after the attention, as the
// blocks of a transformer do. Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/model_plan.h"

namespace penstock::models {

// Sizes and constants of a hybrid model. Fields have the names of the configuration's keys, model.*.
struct HybridOptions {
  std::string pattern = "AEME";   // one letter per block; '|' where a stage of a pipeline ends
  std::int64_t vocabulary = 256;  // number of different tokens
  std::int64_t width = 128;       // elements of a hidden state
  std::int64_t context = 256;     // the longest sequence
  std::string norm = "rms_norm";  // rms_norm or dynamic_tanh
  double norm_epsilon = 1e-5;     // added to the mean square in rms_norm
  bool tie_head = false;          // the head uses the weight of the embedding
  bool embed_scale = false;       // multiply embeddings by sqrt(width)
  double dropout = 0;             // on the embedding and on what each residual adds, in training mode

  // ---- attention (A) and feed-forward (F) ----
  std::int64_t heads = 4;                      // query heads
  std::int64_t key_value_heads = 0;            // 0: same as heads; fewer: each serves a group of query heads
  std::int64_t feed_width = 0;                 // 0: two thirds of 4 * width, rounded up to a multiple of 32
  bool attention_feed = false;                 // an A has a feed-forward residual after its attention
  double rope_theta = 10000;                   // base of the rotary frequencies
  std::vector<std::int64_t> windows = {};      // tokens that a token sees, itself included; 0: all. Empty: 0;
                                               // one: for every layer; several: repeated over the layers
  std::vector<std::int64_t> nope_layers = {};  // layers (letters, from 0) without rotary positions
  std::int64_t bos_token = 0;  // documents begin at this token if none are given, except in generation; 0: no

  // ---- state space (M) ----
  std::int64_t state_size = 128;       // elements of the state for each element of a head
  std::int64_t state_head_width = 64;  // elements of a head
  std::int64_t state_expand = 2;       // inner width / width
  std::int64_t state_groups = 1;       // groups of heads that share keys and queries
  std::int64_t state_kernel = 4;       // taps of the convolution
  std::int64_t state_chunk = 128;      // tokens of a row that are computed at once

  // ---- experts (E) ----
  std::int64_t experts = 8;               // number of experts
  std::int64_t top_k = 2;                 // experts per token
  std::int64_t expert_width = 0;          // inner width of an expert; 0: feed_width
  std::string router_scores = "softmax";  // softmax over the experts, or sigmoid of each
  bool router_normalize = true;           // the weights of a token's experts sum to 1
  std::int64_t shared_expert_width = 0;   // inner width of an expert that serves every token; 0: none
  double capacity_factor = 0;             // 0: no token is dropped; else an expert's limit / its even share
  double balance_weight = 0.01;           // of the loss that balances the experts
  // Whose choices the balance loss counts: those of all data-parallel ranks in a microbatch ("microbatch"),
  // or of each rank alone ("replica").
  std::string balance_scope = "microbatch";
  double router_z_weight = 0.001;  // of the loss that keeps router logits small
  double router_bias_rate = 0;     // step of a bias that balances the experts; 0: no bias

  // ---- mixture of depths: only some tokens go through a block ----
  std::vector<std::int64_t> depth_layers = {};  // layers (letters, from 0) that the other tokens pass by
  double depth_capacity = 0.5;                  // fraction of the tokens of a row that go through a layer
  std::string depth_kind = "plain";             // plain, or gamma: with a learnt scale of what is added
  double depth_gamma = 0.1;                     // initial value of that scale
  double depth_weight = 0.01;                   // of the loss that makes the choice predictable

  // ---- multi-token prediction: in training the model predicts the tokens after the next one, too ----
  std::int64_t multi_token_depth = 0;  // how many tokens after the next one; 0: none
  std::string multi_token_block = {};  // letter of the block of each depth; empty: that of the last block
  double multi_token_weight = 0.3;     // of its loss

  // ---- added to the embedding of tokens, at the first stage ----
  std::vector<std::int64_t> ngram_orders = {};  // a table of hashed n-grams for each of these n; empty: none
  std::int64_t ngram_buckets = 65536;           // rows of each of these tables
  bool structure_embedding = false;             // five tables of places in the syntax tree (HybridMetadata)
  std::int64_t structure_kinds = 16;            // rows of the first: what a token is part of
  std::int64_t dependency_levels = 32;          // rows of the second: levels of the graph of dependencies
  std::int64_t syntax_depths = 64;              // rows of the third: depths in the syntax tree
  std::int64_t sibling_indices = 64;            // rows of the fourth: places among the children of a node
  std::int64_t node_types = 256;                // rows of the fifth: types of nodes of the syntax tree
  std::int64_t platforms = 0;                   // number of platforms, each with a row; 0: none
  std::string embed_norm = "none";              // of the sum of all of these: none, rms_norm or dynamic_tanh

  // ---- what else blocks know about tokens, from HybridMetadata ----
  std::int64_t relations = 0;  // kinds of relations between tokens, each with a bias of attention; 0: none
  bool tree_feed = false;      // feed-forwards mix every token with its parent in the syntax tree

  // Compares all fields as they are.
  bool operator==(const HybridOptions&) const = default;

  // Returns the options with zeros replaced by their defaults. Throws ConfigError that names the invalid
  // field and the remedy.
  HybridOptions resolved() const;
  // Throws like resolved().
  void check() const { resolved(); }

  // Returns what follows from the options for partitions, reports and memory. Throws like resolved().
  ModelPlan plan() const;
  // The same, so that functions of plans accept options.
  operator ModelPlan() const { return plan(); }
};

}  // namespace penstock::models
