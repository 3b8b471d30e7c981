// Which rank holds which stage, and which microbatches pass through which stages.
//
//   schedule::StageMap stages = schedule::StageMap::make(schedule::StagePlacement::V, 4, 8, 16);
//   std::cout << stages.rank_of(7);                    // 0
//   std::vector<int> of_rank_0 = stages.stages_of(0);  // 0 7
//
// The placements, for 4 ranks and 8 stages:
//
//   Loop           stage s on rank s mod P                         0 1 2 3 0 1 2 3
//   V              up, then down, twice on the rank of the turn    0 1 2 3 3 2 1 0
//   Bidirectional  two copies of P stages in opposite directions   0 1 2 3 3 2 1 0, two chains
//
// Ranks are positions along the pipeline axis, not global ranks.
//
// Thread safety: values; concurrent reads are safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace penstock::schedule {

// How stages are assigned to P ranks.
enum class StagePlacement {
  Loop,           // stage s on rank s mod P
  V,              // up, then down, twice on the rank where it turns
  Bidirectional,  // two copies of P stages in opposite directions, each a chain of its own
};

// Reads "loop", "v" or "bidirectional", in any case. Throws ValueError for another name.
StagePlacement parse_stage_placement(std::string_view name);
// Returns "loop", "v" or "bidirectional".
std::string_view to_text(StagePlacement placement);

// What to do with a V whose stage count is not a multiple of the rank count.
enum class PartialLeg {
  Refuse,  // it is an error
  Allow,   // the last leg ends early, so that some ranks have one stage less
};

// Returns the rank of each stage. Throws ValueError for counts below 1, for a partial leg that is refused,
// and for a bidirectional placement unless `stages` is twice `ranks`.
std::vector<int> stage_to_rank(StagePlacement placement, int ranks, int stages,
                               PartialLeg partial = PartialLeg::Refuse);
// Returns the stages of each rank in ascending order; every rank has an entry, possibly empty. Throws as
// stage_to_rank.
std::vector<std::vector<int>> rank_to_stages(StagePlacement placement, int ranks, int stages,
                                             PartialLeg partial = PartialLeg::Refuse);

// Consecutive stages that microbatches pass from the first to the last. Most schedules have one chain. A
// bidirectional schedule has two: stages 0 to P-1 (stage s on rank s) run the first half of the microbatches,
// and stages P to 2P-1 (stage P+s is the second copy of model part s, on rank P-1-s) run the second half.
// Nothing is sent between the last stage of a chain and the first of the next.
struct Chain {
  std::int32_t first_stage = 0;       // first stage of the chain
  std::int32_t stages = 0;            // number of stages
  std::int32_t first_microbatch = 0;  // first microbatch that the chain runs
  std::int32_t microbatches = 0;      // number of microbatches that the chain runs
  // Compares all members.
  friend bool operator==(const Chain&, const Chain&) = default;
};

// The rank of each stage, and the chains. Immutable, except by assignment; most queries take constant time.
class StageMap {
 public:
  // One chain over all stages. Throws ValueError for an empty map or a rank outside [0, ranks).
  StageMap(int ranks, std::vector<int> stage_to_rank, int microbatches);
  // Several chains. Throws ValueError for an empty map, a rank outside [0, ranks), and chains that do not
  // cover stages and microbatches in order, each once.
  StageMap(int ranks, std::vector<int> stage_to_rank, std::vector<Chain> chains);
  // Returns the map of a placement. Throws ValueError as stage_to_rank, and for a bidirectional placement
  // with an odd number of microbatches.
  static StageMap make(StagePlacement placement, int ranks, int stages, int microbatches);

  // Number of ranks.
  int ranks() const { return ranks_; }
  // Number of stages.
  int stages() const { return static_cast<int>(stage_to_rank_.size()); }
  // Number of microbatches, of all chains together.
  int microbatches() const { return microbatches_; }
  // The chains in the order of their stages.
  const std::vector<Chain>& chains() const { return chains_; }
  // Rank of each stage.
  const std::vector<int>& stage_to_rank() const { return stage_to_rank_; }

  // Whether a stage is in [0, stages()).
  bool has_stage(int stage) const { return stage >= 0 && stage < stages(); }
  // Rank of a stage. The stage must exist, here and in the functions below; it is not checked.
  int rank_of(int stage) const { return stage_to_rank_[static_cast<std::size_t>(stage)]; }
  // The chain of a stage. Takes time linear in the number of chains.
  const Chain& chain_of(int stage) const {
    std::size_t i = chains_.size() - 1;
    while (i > 0 && stage < chains_[i].first_stage) --i;
    return chains_[i];
  }
  // Whether a stage is the first of its chain.
  bool is_first(int stage) const { return chain_of(stage).first_stage == stage; }
  // Whether a stage is the last of its chain.
  bool is_last(int stage) const {
    const Chain& chain = chain_of(stage);
    return chain.first_stage + chain.stages - 1 == stage;
  }
  // Whether the chain of a stage runs this microbatch.
  bool runs(int stage, int microbatch) const {
    const Chain& chain = chain_of(stage);
    return microbatch >= chain.first_microbatch && microbatch < chain.first_microbatch + chain.microbatches;
  }
  // Returns the stages of one rank in ascending order.
  std::vector<int> stages_of(int rank) const;

  // Compares ranks, stages and chains.
  friend bool operator==(const StageMap&, const StageMap&) = default;

 private:
  int ranks_;
  std::vector<int> stage_to_rank_;
  std::vector<Chain> chains_;
  int microbatches_;
};

}  // namespace penstock::schedule
