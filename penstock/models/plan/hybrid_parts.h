// The options of the blocks of a hybrid model, taken from those of the model.
#pragma once

#include <cstdint>
#include <optional>

#include "penstock/hybrid_options.h"
#include "penstock/models/plan/attention_options.h"
#include "penstock/models/plan/expert_options.h"
#include "penstock/models/plan/hybrid_inputs.h"
#include "penstock/models/plan/loss_weights.h"
#include "penstock/models/plan/norm_options.h"
#include "penstock/models/plan/pattern.h"
#include "penstock/models/plan/state_space_options.h"
#include "penstock/models/plan/structure_options.h"

namespace penstock::models {

// All options have zeros replaced by their defaults.
struct HybridParts {
  BlockPattern pattern;
  NormOptions norm;
  AttentionOptions attention;
  StateSpaceOptions state_space;
  ExpertOptions experts;
  LossWeights weights;
  HybridInputs inputs;                       // what is added to the embedding of tokens
  std::optional<RelationOptions> relations;  // nothing: no relation bias

  BlockKind kind(std::int64_t block) const { return pattern.blocks.at(static_cast<std::size_t>(block)); }
  // Number of residual additions of the whole model.
  std::int64_t residuals(const HybridOptions& options) const;
};

// Checks only what the pattern uses: a model without E may have any experts. Throws ConfigError.
HybridParts hybrid_parts(const HybridOptions& options);

}  // namespace penstock::models
