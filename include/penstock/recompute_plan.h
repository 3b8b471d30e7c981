// Which activations of a model are recomputed in the backward instead of kept (recompute.h): those of chosen
// blocks, in chosen stages, for chosen microbatches.
//
//   models::HybridOptions options{.pattern = "AEME"};
//   models::RecomputePlan plan = models::parse_recompute("experts", options.plan());
//   plan.microbatches = {0, 1};  // of the others everything is kept
//   bool again = plan.recomputes({.number = 3, .letter = 'E'}, /*stage=*/1, /*microbatch=*/0);
//
// Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/model_plan.h"

namespace penstock::models {

// A block of a model.
struct BlockId {
  std::int64_t number = 0;  // index in the whole model; blocks of multi-token prediction follow the others
  char letter = 'A';        // in patterns
};

// What is recomputed. The default is nothing.
struct RecomputePlan {
  // Blocks with these letters; '*' stands for every letter.
  std::string letters = {};
  // One entry for each block of the model, instead of letters; blocks of multi-token prediction have none and
  // are kept.
  std::vector<bool> blocks = {};
  // Stages to which this is restricted; empty: all.
  std::vector<std::int64_t> stages = {};
  // Microbatches of a run of the schedule to which this is restricted; empty: all.
  std::vector<std::int64_t> microbatches = {};

  // Returns a plan that recomputes every block.
  static RecomputePlan all() { return {.letters = "*"}; }
  // Returns whether anything is recomputed.
  bool any() const;
  // Returns whether the block is recomputed in some stage and microbatch.
  bool chooses(const BlockId& block) const;
  // Returns whether the block is recomputed in this stage and microbatch; without a microbatch, in some.
  bool recomputes(const BlockId& block, int stage, std::optional<std::int64_t> microbatch) const;
};

// Reads "none", "block" (every block), "attention" (A), "experts" (E), "letters:ME" or "pattern:.R.R", with
// one mark for each block of the model: R, or the letter of the block, to recompute it, '.' to keep it;
// spaces and '|' are ignored. Throws ConfigError for other text, for letters that the model does not have,
// and for a pattern of another length or other letters.
RecomputePlan parse_recompute(std::string_view text, const ModelPlan& model);

// Throws ConfigError for stages and microbatches that do not exist.
void check_recompute(const RecomputePlan& plan, std::int64_t stages, std::int64_t microbatches);

}  // namespace penstock::models
