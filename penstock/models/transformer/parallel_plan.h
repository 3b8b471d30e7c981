// Tensor parallelism of the transformer: which parameter is split how.
//
//   parallelize_transformer(*stage, mesh);                                      // a mesh of one axis: plain inputs
//   parallelize_transformer(*stage, mesh, "tp");                                // one axis of several: distributed inputs
//
// Column parallel (outputs split): query, key, value, gate, up, head. Row parallel (inputs split, results summed): output, down. The
// embedding is split by vocabulary, as the head is, so a tied weight is one layout. Norms are replicated. A block sends two sums forward
// and two backward, each of an activation's size. Activations between are whole on every rank: splitting them along the sequence, too,
// would save memory for norms and cost two more transfers a sum on meshes that are not overlapped; it is left out.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/tensor_parallel.h"
#include "penstock/transformer.h"

namespace penstock::models {

using ParallelPlan = std::vector<std::pair<std::string, ParallelStylePtr>>;

// For parallelize_module on a stage; default: of the whole model. Behind it distribute_module replicates the norms.
ParallelPlan tensor_parallel_plan(const TransformerOptions& options);
ParallelPlan tensor_parallel_plan(const TransformerOptions& options, const StagePart& part);

// Throws ConfigError where heads or key_value_heads are no multiples of `size`.
void check_tensor_parallel(const TransformerOptions& options, int size);

// [collective] All of it: checks, splits by the plan, replicates the rest.
void parallelize_transformer(TransformerStageImpl& stage, const comm::MeshGroups& mesh, const std::string& axis = {});

}  // namespace penstock::models
