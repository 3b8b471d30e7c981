// Tensor parallelism of the transformer: how parallelize_transformer (transformer.h) splits each parameter.
//
// Column parallel (outputs split): query, key, value, gate, up, head. Row parallel (inputs split, results
// summed): output, down. The embedding is split by vocabulary, like the head, so a tied weight has one
// layout. Norms are replicated. A block sends two sums forward and two backward, each of the size of an
// activation. Activations in between are equal on all ranks. With ModelStage::set_sequence_parallel() their
// tokens are divided over the ranks: in place of each sum a gather and a scattered sum, half as large each.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "penstock/tensor_parallel.h"
#include "penstock/transformer.h"

namespace penstock::models {

using ParallelPlan = std::vector<std::pair<std::string, ParallelStylePtr>>;

// The plan for parallelize_module on a stage; by default of the whole model. Call distribute_module
// afterwards to replicate the norms.
ParallelPlan tensor_parallel_plan(const TransformerOptions& options);
ParallelPlan tensor_parallel_plan(const TransformerOptions& options, const StagePart& part);

// Throws ConfigError if heads or key_value_heads is not a multiple of `size`.
void check_tensor_parallel(const TransformerOptions& options, int size);

}  // namespace penstock::models
