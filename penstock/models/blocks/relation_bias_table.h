// Relation bias: a learnt number for each kind of relation and each head of attention. A mask says which
// pairs of tokens (or chunks) are related; the sum of the numbers of their relations is added to their score.
//
//   RelationBiasTable table(RelationOptions{.relations = 8, .heads = 16});
//   const at::Tensor bias = table->forward(mask);     // [batch, relations, i, j] -> [batch, heads, i, j]
//
// Computed in the dtype of the table, also under autocast. Every stage of a pipeline that has attention uses
// the same table.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <string>

#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/plan/structure_options.h"

namespace penstock::models {

class RelationBiasTableImpl : public torch::nn::Cloneable<RelationBiasTableImpl> {
 public:
  // Throws ConfigError for options that are not valid.
  explicit RelationBiasTableImpl(const RelationOptions& options);
  void reset() override;
  // Zeros, whatever the seed: a model starts without bias, and the gradients of the table are not zero.
  void initialize(const std::string& name, const BlockInit& init);
  // mask [batch, relations, i, j]: Bool, or numbers that weight the relation. With a table that is split over
  // its heads, returns the heads of this rank. Throws ValueError for a mask of another shape.
  at::Tensor forward(const at::Tensor& mask);

  const RelationOptions& options() const { return options_; }

  at::Tensor weight;  // [relations, heads]

 private:
  RelationOptions options_;
};
TORCH_MODULE(RelationBiasTable);

}  // namespace penstock::models
