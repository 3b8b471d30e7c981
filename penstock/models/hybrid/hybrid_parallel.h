// How the parameters of a hybrid model are split over tensor-parallel and expert-parallel ranks.
//
//   A     query, key, value by columns (whole heads), output by rows
//   F     gate, up by columns, down by rows; also the shared expert of an E
//   E     with "tp" the columns of every expert, with "ep" the experts; the router is whole on every rank
//   M     gate, value, step and what belongs to a head; keys and queries by groups (state_space.h)
//   embed, head    by vocabulary
//   relations      by heads
//
// Everything else (norms, routers, tables of n-grams and of metadata) stays plain. It is computed from
// activations that are equal on all tensor-parallel ranks, so that its gradients are complete and equal on
// each of them, and auxiliary losses count once. A residual sends one sum forward and one backward.
//
// With sequence parallelism the tokens of activations between residuals are divided over the tensor-parallel
// ranks (split_rows.h). What sees the tokens of one rank only is replicated: norms, routers of experts and
// the tables of the first stage, whose gradients are terms of a sum over the ranks. A residual sends one
// all-gather and one reduce-scatter in each direction, as many bytes as the two sums. Blocks within a mixture
// of depths, which takes tokens from anywhere in a row, and multi-token prediction have whole rows.
#pragma once

#include <torch/nn/module.h>

#include "penstock/hybrid_options.h"
#include "penstock/world.h"

namespace penstock::models {

// Throws ConfigError that names the sizes which cannot be split over `ranks` tensor-parallel ranks.
void check_tensor_parallel(const HybridOptions& options, int ranks);
// Throws ConfigError unless the experts can be divided over `ranks` data-parallel ranks.
void check_expert_parallel(const HybridOptions& options, int ranks);

// What the ranks of the axis "tp" have of activations between residuals.
enum class TokensOfRanks { All, Divided };

// [collective] Splits the parameters of a stage over a mesh with the axes "ep", "tp", or both.
void parallelize_hybrid(torch::nn::Module& stage, const comm::MeshGroups& mesh,
                        TokensOfRanks tokens = TokensOfRanks::All);

// Lets tokens be looked up in a weight that is split by vocabulary; does nothing for a plain weight. With
// Divided each rank gets its tokens of the result, for distributed tokens as a distributed tensor.
void set_embedding_boundary(const at::Tensor& weight, TokensOfRanks tokens = TokensOfRanks::All);

}  // namespace penstock::models
