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
#pragma once

#include <torch/nn/module.h>

#include "penstock/hybrid_options.h"
#include "penstock/world.h"

namespace penstock::models {

// Throws ConfigError that names the sizes which cannot be split over `ranks` tensor-parallel ranks.
void check_tensor_parallel(const HybridOptions& options, int ranks);
// Throws ConfigError unless the experts can be divided over `ranks` data-parallel ranks.
void check_expert_parallel(const HybridOptions& options, int ranks);

// [collective] Splits the parameters of a stage over a mesh with the axes "ep", "tp", or both.
void parallelize_hybrid(torch::nn::Module& stage, const comm::MeshGroups& mesh);

// Lets plain tokens be looked up in a weight that is split by vocabulary; does nothing for a plain weight.
void set_embedding_boundary(const at::Tensor& weight);

}  // namespace penstock::models
