// What the first stage of a hybrid model computes from tokens and metadata after their embedding:
//
//   x + ngrams(tokens) + structure(ids) + platform(ids), then a norm
//
// Each part only if the options have it; structure and platform only for metadata that is given.
//
//   InputEmbeddings inputs(stage, parts.inputs);           // registers the modules with the stage
//   x = inputs.forward(at::embedding(weight, tokens), tokens, metadata);
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "penstock/hybrid_metadata.h"
#include "penstock/models/blocks/any_norm.h"
#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/blocks/ngram_embedding.h"
#include "penstock/models/blocks/platform_embedding.h"
#include "penstock/models/blocks/structure_embedding.h"
#include "penstock/models/plan/hybrid_inputs.h"

namespace penstock::models {

class InputEmbeddings {
 public:
  // Has no parts.
  InputEmbeddings() = default;
  // Creates the parts and registers them with `stage`, under the names of hybrid_inputs.h.
  InputEmbeddings(torch::nn::Module& stage, const HybridInputs& options);

  // x [batch, length, width]; tokens [batch, h + length]: those before the row, of which the last reach()
  // matter, and the row. Documents, if given, are those of the row: h must then be 0.
  at::Tensor forward(at::Tensor x, const at::Tensor& tokens, const HybridMetadata& metadata);
  // Fills the parameters as functions of seed and name.
  void initialize(const BlockInit& init);
  // How many tokens before a token matter to it.
  std::int64_t reach() const { return options_.ngrams ? options_.ngrams->reach() : 0; }

 private:
  HybridInputs options_;
  NgramEmbedding ngrams_{nullptr};
  StructureEmbedding structure_{nullptr};
  PlatformEmbedding platform_{nullptr};
  AnyNorm norm_;
};

}  // namespace penstock::models
