#include "penstock/models/hybrid/input_embeddings.h"

#include <ATen/ATen.h>

#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock::models {
namespace {

StructureIds structure_ids(const HybridMetadata& metadata) {
  return {.structure_kinds = metadata.structure_kinds,
          .dependency_levels = metadata.dependency_levels,
          .syntax_depths = metadata.syntax_depths,
          .sibling_indices = metadata.sibling_indices,
          .node_types = metadata.node_types};
}

}  // namespace

InputEmbeddings::InputEmbeddings(torch::nn::Module& stage, const HybridInputs& options) : options_(options) {
  if (options_.ngrams) ngrams_ = stage.register_module(kNgramsName, NgramEmbedding(*options_.ngrams));
  if (options_.structure)
    structure_ = stage.register_module(kStructureName, StructureEmbedding(*options_.structure));
  if (options_.platform)
    platform_ = stage.register_module(kPlatformName, PlatformEmbedding(*options_.platform));
  if (options_.norm) {
    norm_ = AnyNorm(*options_.norm);
    stage.register_module(kEmbedNormName, norm_.module());
  }
}

at::Tensor InputEmbeddings::forward(at::Tensor x, const at::Tensor& tokens, const HybridMetadata& metadata) {
  if (options_.ngrams) x = ngrams_->forward(x, tokens, metadata.documents);
  if (options_.structure) x = structure_->forward(x, structure_ids(metadata));
  if (options_.platform && metadata.platforms.defined()) x = platform_->forward(x, metadata.platforms);
  if (!options_.norm) return x;
  const NoAutocastScope exact;  // hidden states keep their dtype; only the products of blocks are in 16 bits
  return norm_.forward(x);
}

void InputEmbeddings::initialize(const BlockInit& init) {
  if (options_.ngrams) ngrams_->initialize(kNgramsName, init);
  if (options_.structure) structure_->initialize(kStructureName, init);
  if (options_.platform) platform_->initialize(kPlatformName, init);
  if (options_.norm) norm_.initialize(kEmbedNormName, init);
}

}  // namespace penstock::models
