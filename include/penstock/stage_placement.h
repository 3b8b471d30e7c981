// Which rank holds which stage, and which microbatches pass through which stages.
//
// Ranks here are positions along the pipeline axis (plain integers), not global ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>


namespace penstock::schedule {

//   Loop           stage s on rank s mod P                         4 ranks: 0 1 2 3 0 1 2 3
//   V              up, then down, staying at each border           4 ranks: 0 1 2 3 3 2 1 0
//   Bidirectional  two copies of P stages in opposite directions   4 ranks: 0 1 2 3 3 2 1 0, two chains
enum class StagePlacement { Loop, V, Bidirectional };

// "loop", "v", "bidirectional"; any case. Throws ValueError for another name.
StagePlacement parse_stage_placement(std::string_view name);
std::string_view to_text(StagePlacement placement);

// V with a stage count that is not a multiple of the rank count: refused by default; `Allow` lets the last
// leg stop short, so that some ranks hold one stage fewer.
enum class PartialLeg { Refuse, Allow };

// Rank of each stage. Throws ValueError for counts below 1 and for a refused partial leg.
std::vector<int> stage_to_rank(StagePlacement placement, int ranks, int stages,
                               PartialLeg partial = PartialLeg::Refuse);
// Stages of each rank, ascending; every rank has an entry, possibly empty.
std::vector<std::vector<int>> rank_to_stages(StagePlacement placement, int ranks, int stages,
                                             PartialLeg partial = PartialLeg::Refuse);

// A run of consecutive stages that microbatches pass from the first to the last one. Most schedules have one
// chain. A bidirectional schedule has two: stages 0..P-1 (stage s on rank s) take the first half of the
// microbatches, and stages P..2P-1 (stage P+s is the second copy of model part s, on rank P-1-s) take the
// second half. Nothing is sent between the last stage of a chain and the first one of the next.
struct Chain {
  std::int32_t first_stage = 0;
  std::int32_t stages = 0;
  std::int32_t first_microbatch = 0;
  std::int32_t microbatches = 0;
  friend bool operator==(const Chain&, const Chain&) = default;
};

// Stage -> rank and the chains. Immutable; O(1) questions.
class StageMap {
 public:
  // One chain over all stages. Throws ValueError for an empty map or a rank outside [0, ranks).
  StageMap(int ranks, std::vector<int> stage_to_rank, int microbatches);
  // Several chains; they must cover the stages in order without gaps, and no microbatch twice.
  StageMap(int ranks, std::vector<int> stage_to_rank, std::vector<Chain> chains);
  // The map of a placement; for Bidirectional `stages` must be twice `ranks` and `microbatches` even.
  static StageMap make(StagePlacement placement, int ranks, int stages, int microbatches);

  int ranks() const { return ranks_; }
  int stages() const { return static_cast<int>(stage_to_rank_.size()); }
  // Of all chains together.
  int microbatches() const { return microbatches_; }
  const std::vector<Chain>& chains() const { return chains_; }
  const std::vector<int>& stage_to_rank() const { return stage_to_rank_; }

  bool has_stage(int stage) const { return stage >= 0 && stage < stages(); }
  int rank_of(int stage) const { return stage_to_rank_[static_cast<std::size_t>(stage)]; }
  const Chain& chain_of(int stage) const {
    std::size_t i = chains_.size() - 1;
    while (i > 0 && stage < chains_[i].first_stage) --i;
    return chains_[i];
  }
  bool is_first(int stage) const { return chain_of(stage).first_stage == stage; }
  bool is_last(int stage) const {
    const Chain& chain = chain_of(stage);
    return chain.first_stage + chain.stages - 1 == stage;
  }
  // Whether this stage runs this microbatch at all.
  bool runs(int stage, int microbatch) const {
    const Chain& chain = chain_of(stage);
    return microbatch >= chain.first_microbatch && microbatch < chain.first_microbatch + chain.microbatches;
  }
  // Stages of one rank, ascending.
  std::vector<int> stages_of(int rank) const;

  friend bool operator==(const StageMap&, const StageMap&) = default;

 private:
  int ranks_;
  std::vector<int> stage_to_rank_;
  std::vector<Chain> chains_;
  int microbatches_;
};

}  // namespace penstock::schedule
