// Decides whether layers can be split so that no rank exceeds a bound, and finds such a split.
//
// A split of K parts is a list of cuts x[0] = 0 <= x[1] <= ... <= x[K] = layers. Ranks are placed one after
// the other: all parts of rank 0, then all of rank 1, and so on. What later ranks can do depends only on the
// cuts between placed and unplaced parts, the frontier: with one stage per rank that is one cut, in a V of
// two legs two. A depth-first search over ranks that remembers the frontiers from which it failed therefore
// visits each frontier once, and its answer is exact.
//
//   PlacedSearch search(space, max_states);
//   auto cuts = search.find(bound);  // none: search.next_bound() is the next bound worth trying
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace penstock::plan {

// One thing that stages need, time or bytes: fixed + sums of layers + factor * (other sums of layers).
struct StageNeed {
  std::vector<double> sums, scaled_sums;  // of the first i layers
  std::vector<double> factor, fixed;      // by stage

  double of(int stage, int begin, int end) const {
    const auto s = static_cast<std::size_t>(stage), b = static_cast<std::size_t>(begin),
               e = static_cast<std::size_t>(end);
    return fixed[s] + (sums[e] - sums[b]) + factor[s] * (scaled_sums[e] - scaled_sums[b]);
  }
};

struct SearchSpace {
  int layers = 0;
  int parts = 0;                              // stage s holds part s mod parts
  std::vector<std::vector<int>> rank_stages;  // ranks with the same parts need not be adjacent
  std::vector<int> shortest;                  // by part: 0 if it may be empty, else 1
  StageNeed time, bytes;
  std::vector<double> limits;  // of bytes, by rank; empty: none
  bool by_stage = false;       // whether the bound is for each stage, not for the sum of a rank
};

class PlacedSearch {
 public:
  PlacedSearch(const SearchSpace& space, std::int64_t max_states);

  // Prepares for bounds up to `most`, which then fail earlier. Needs no more than some milliseconds.
  void prepare(double most);
  // Returns cuts x[0] to x[parts], or nothing if there are none or the search is exhausted.
  std::optional<std::vector<int>> find(double bound);
  // After a find() without result: no bound below this has one. Infinity if only memory is in the way.
  double next_bound() const { return next_bound_; }
  // Whether max_states cuts were tried, by all calls together.
  bool exhausted() const { return states_ > max_states_; }

 private:
  // Chooses one cut, or none, and then knows the layers of `ended` and `begun`.
  struct Step {
    int cut = -1;                            // -1: all cuts of these stages are known
    int below = 0, above = 0;                // the nearest known cuts
    int layers_below = 0, layers_above = 0;  // that the parts between them need at least
    std::vector<int> ended, begun;           // stages that end, or begin, at the cut, or have known cuts
    bool ends_rank = false;
    // Of what is not placed when a rank is complete:
    std::vector<int> frontier;              // cuts
    std::vector<std::pair<int, int>> runs;  // parts first to end - 1, next to each other
    double fixed_time = 0, fixed_bytes = 0, least_factor = 0;
    std::vector<int> ranks;
    double shares = 0, limits = 0;  // number of bounds, and sum of the limits
    // For the bound of the current find(): what the ranks whose possible times are known can be filled with,
    // and the smallest bound for which that is more; and the number of other bounds.
    double known_capacity = 0, next_known = 0, other_shares = 0;
  };
  struct Range {
    int low = 0, high = 0;
  };
  // What a rank had before a stage was added.
  struct Loaded {
    std::size_t rank;
    double time, bytes;
  };

  void plan_steps();
  void set_capacity(Step& step) const;
  void finish_rank(Step& step, const std::vector<bool>& placed, const std::vector<bool>& known) const;
  bool run(std::size_t step);
  bool try_cut(std::size_t step, int value);
  bool finish(std::size_t step);
  bool add(int stage);
  void narrow(int stage, bool ends_here, int cut, Range& range);
  bool fits(int stage, double time, double bytes);
  bool rest_fits(const Step& step);
  int preferred(const Step& step) const;
  int begin_of(int stage) const { return cuts_[static_cast<std::size_t>(stage % space_.parts)]; }
  int end_of(int stage) const { return cuts_[static_cast<std::size_t>(stage % space_.parts) + 1]; }
  std::size_t rank_of(int stage) const {
    return static_cast<std::size_t>(stage_rank_[static_cast<std::size_t>(stage)]);
  }

  const SearchSpace& space_;
  const std::int64_t max_states_;
  std::vector<int> stage_rank_;
  Step all_;  // before the first step
  std::vector<Step> steps_;
  std::vector<std::vector<double>> possible_;  // by rank: times that it can have, ascending; empty: unknown
  std::int64_t states_ = 0;

  // Of the current find():
  double bound_ = 0, next_bound_ = 0;
  std::vector<int> cuts_;
  std::vector<double> rank_time_, rank_bytes_;
  std::vector<Loaded> undo_;
  std::vector<std::unordered_set<std::u16string>> failed_;  // by step: frontiers
};

}  // namespace penstock::plan
