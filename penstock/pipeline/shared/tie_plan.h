// Which ranks have which uses of shared parameters, and who adds the gradients of whom: the same on every
// rank of a pipeline. Plain values; no communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// A use of a tie on one rank.
struct PlacedUse {
  std::int32_t tie = 0;    // index of the tie
  std::int32_t stage = 0;  // position in the model
  std::string name;
  std::string layout;  // dtype, shape, placements, whether it is trainable
  bool again = false;  // another name of a tensor that the rank has declared: no use of its own
};

// What one rank declares.
struct DeclaredUses {
  std::vector<std::vector<std::string>> ties;  // names
  std::vector<PlacedUse> uses;                 // in the order of stages; ties may alternate
};

// Ranks that together have every use of a tie once.
struct TieCover {
  // An entry of the sum: the place of a member in `members`, and the index of the use among those of the
  // member, in the order of stages.
  struct Term {
    std::size_t member, use;
  };
  std::vector<int> members;  // positions along the pipeline, ascending
  std::vector<Term> terms;   // in the order of stages
};

// The uses of one tie in the whole pipeline.
struct TiePlan {
  std::string text;              // "embed.weight, head.weight"
  std::vector<int> stages;       // that have uses, in order; a stage may have several
  std::vector<TieCover> covers;  // several in a bidirectional pipeline
};

// `ranks`: what every rank of the pipeline declares, in pipeline order. Throws ValueError as the constructor
// of SharedParameters.
std::vector<TiePlan> plan_ties(const std::vector<DeclaredUses>& ranks);

}  // namespace penstock
