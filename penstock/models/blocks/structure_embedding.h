// Structure embedding: five numbers per token about its place in the syntax tree select rows of five tables,
// which are added to the embedding of the token.
//
//   StructureEmbedding structure(StructureOptions{.width = 1024});
//   x = structure->forward(x, {.structure_kinds = kinds, .node_types = types});
//
// Ids that are not given contribute nothing. Dependency levels, depths and sibling indices have no natural
// bound: numbers past a table count as its last row. A kind or type outside its table is an error: ValueError
// on the CPU, LibTorch's error in captured graphs and on a GPU.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <vector>

#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/plan/structure_options.h"

namespace penstock::models {

// Each undefined, or Long or Int [batch, length], from 0.
struct StructureIds {
  at::Tensor structure_kinds = {};    // what the token is part of
  at::Tensor dependency_levels = {};  // level of its definition in the graph of dependencies
  at::Tensor syntax_depths = {};      // depth in the syntax tree
  at::Tensor sibling_indices = {};    // place among the children of its parent
  at::Tensor node_types = {};         // type of its node
};

class StructureEmbeddingImpl : public torch::nn::Cloneable<StructureEmbeddingImpl> {
 public:
  // Throws ConfigError for options that are not valid.
  explicit StructureEmbeddingImpl(const StructureOptions& options);
  void reset() override;
  // `name`: of this module in the model.
  void initialize(const std::string& name, const BlockInit& init);
  // x [batch, length, width]. Returns x plus the rows, in the dtype of x, differentiable on every device; the
  // sum is computed in float32 (float64 for float64) and rounded once.
  at::Tensor forward(const at::Tensor& x, const StructureIds& ids);

  const StructureOptions& options() const { return options_; }

  // In the order of StructureOptions::tables().
  std::vector<torch::nn::Embedding> tables;

 private:
  StructureOptions options_;
};
TORCH_MODULE(StructureEmbedding);

}  // namespace penstock::models
