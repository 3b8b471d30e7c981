// The options of the blocks of a hybrid model, taken from those of the model.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "penstock/hybrid_options.h"
#include "penstock/model_plan.h"
#include "penstock/models/plan/attention_options.h"
#include "penstock/models/plan/depth_options.h"
#include "penstock/models/plan/expert_options.h"
#include "penstock/models/plan/hybrid_inputs.h"
#include "penstock/models/plan/loss_weights.h"
#include "penstock/models/plan/multi_token_options.h"
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
  DepthOptions depth;                        // of the blocks in depth_layers
  std::vector<std::int64_t> depth_layers;    // blocks that a mixture of depths wraps
  MultiTokenOptions multi_token;             // depth 0: none
  BlockKind multi_token_kind = BlockKind::FeedForward;

  BlockKind kind(std::int64_t block) const { return pattern.blocks.at(static_cast<std::size_t>(block)); }
  // Whether a mixture of depths wraps this block.
  bool is_routed(std::int64_t block) const;
  // Number of blocks of the whole model that have this auxiliary loss; 1 for a loss of the model itself.
  std::int64_t blocks_with(std::string_view loss) const;
  // The auxiliary losses that the model has, whatever their weight.
  std::vector<AuxiliaryTerm> auxiliary_terms() const;
  // The same parts with one more block for each depth of multi-token prediction, after those of the pattern:
  // they have no window and no mixture of depths.
  HybridParts with_multi_token_blocks() const;
  // Number of residual additions of the whole model.
  std::int64_t residuals(const HybridOptions& options) const;
};

// Checks only what the pattern uses: a model without E may have any experts. Throws ConfigError.
HybridParts hybrid_parts(const HybridOptions& options);

}  // namespace penstock::models
