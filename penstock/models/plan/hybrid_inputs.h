// What the first stage of a hybrid model adds to the embedding of tokens: n-grams, structure, platform, and a
// norm of the sum.
//
//   const HybridInputs inputs = hybrid_inputs(options);
//   inputs.add_to(plan);                                  // parameters and costs
//
// Plain values, independent of LibTorch.
#pragma once

#include <optional>

#include "penstock/hybrid_options.h"
#include "penstock/models/plan/ngram_options.h"
#include "penstock/models/plan/norm_options.h"
#include "penstock/models/plan/structure_options.h"

namespace penstock::models {

// Names of the modules in the model.
inline constexpr const char* kNgramsName = "ngrams";
inline constexpr const char* kStructureName = "structure";
inline constexpr const char* kPlatformName = "platform";
inline constexpr const char* kEmbedNormName = "embed_norm";

// Nothing: the model has no such part.
struct HybridInputs {
  std::optional<NgramOptions> ngrams;
  std::optional<StructureOptions> structure;
  std::optional<PlatformOptions> platform;
  std::optional<NormOptions> norm;

  // Adds parameters and costs to those of the first stage.
  void add_to(ModelPlan& plan) const;
};

// Throws ConfigError that names the key.
HybridInputs hybrid_inputs(const HybridOptions& options);

}  // namespace penstock::models
