#include "penstock/plan/cost/placed_search.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace penstock::plan {
namespace {

// Sums of the same layers in another order round differently.
double with_rounding(double bound) { return bound * (1 + 1e-12); }

constexpr std::size_t kMostSums = 30'000;  // of ranges of layers; more of them exclude nothing

// Ascending, and sums that differ only by rounding once.
void keep_different(std::vector<double>& sums) {
  std::sort(sums.begin(), sums.end());
  sums.erase(std::unique(sums.begin(), sums.end(),
                         [](double a, double b) { return b - a <= 1e-12 * std::max(a, b); }),
             sums.end());
}

// The sums of one range of layers each. Empty: too many.
std::vector<double> sums_of_ranges(const std::vector<double>& sums, double most) {
  std::vector<double> all;
  for (std::size_t begin = 0; begin + 1 < sums.size(); ++begin) {
    for (std::size_t end = begin + 1; end < sums.size() && sums[end] - sums[begin] <= most; ++end)
      all.push_back(sums[end] - sums[begin]);
    if (all.size() > 4 * kMostSums) keep_different(all);
    if (all.size() > kMostSums) return {};
  }
  keep_different(all);
  return all;
}

// a + b for all pairs, as far as they are not above `most`. Empty: too many.
std::vector<double> sums_of_pairs(const std::vector<double>& a, const std::vector<double>& b, double most) {
  std::vector<double> all;
  for (const double first : a) {
    for (const double second : b) {
      if (first + second > most) break;
      all.push_back(first + second);
    }
    if (all.size() > 4 * kMostSums) keep_different(all);
    if (all.size() > kMostSums) return {};
  }
  keep_different(all);
  return all;
}

std::size_t idx(int index) { return static_cast<std::size_t>(index); }

}  // namespace

PlacedSearch::PlacedSearch(const SearchSpace& space, std::int64_t max_states)
    : space_(space), max_states_(max_states) {
  std::size_t stages = 0;
  for (const std::vector<int>& of_rank : space.rank_stages) stages += of_rank.size();
  stage_rank_.assign(stages, 0);
  for (std::size_t rank = 0; rank < space.rank_stages.size(); ++rank)
    for (const int stage : space.rank_stages[rank]) stage_rank_[idx(stage)] = static_cast<int>(rank);
  plan_steps();
  failed_.resize(steps_.size());
}

// Which cuts are known when does not depend on their values, so that the order of all choices is fixed.
void PlacedSearch::plan_steps() {
  const int parts = space_.parts, stages = static_cast<int>(stage_rank_.size());
  std::vector<bool> placed(idx(parts), false), known(idx(parts) + 1, false);
  known.front() = known.back() = true;
  finish_rank(all_, placed, known);
  const auto copies = [&](int part) {
    std::vector<int> all;
    for (int stage = part; stage < stages; stage += parts) all.push_back(stage);
    return all;
  };
  const auto append = [](std::vector<int>& to, const std::vector<int>& more) {
    to.insert(to.end(), more.begin(), more.end());
  };
  for (const std::vector<int>& of_rank : space_.rank_stages) {
    std::vector<int> own;
    for (const int stage : of_rank)
      if (!placed[idx(stage % parts)]) own.push_back(stage % parts);
    std::sort(own.begin(), own.end());
    own.erase(std::unique(own.begin(), own.end()), own.end());
    if (own.empty()) continue;  // no stages, or those of an earlier rank in the other direction
    Step ready;
    for (const int part : own)
      if (known[idx(part)] && known[idx(part) + 1]) append(ready.ended, copies(part));
    if (!ready.ended.empty()) steps_.push_back(std::move(ready));
    for (const int part : own) {
      for (const int cut : {part, part + 1}) {
        if (known[idx(cut)]) continue;
        Step step;
        step.cut = cut;
        for (step.below = cut - 1; !known[idx(step.below)]; --step.below) {
        }
        for (step.above = cut + 1; !known[idx(step.above)]; ++step.above) {
        }
        for (int p = step.below; p < cut; ++p) step.layers_below += space_.shortest[idx(p)];
        for (int p = cut; p < step.above; ++p) step.layers_above += space_.shortest[idx(p)];
        known[idx(cut)] = true;
        const auto is_own = [&](int p) { return std::find(own.begin(), own.end(), p) != own.end(); };
        if (step.below == cut - 1 && is_own(cut - 1)) step.ended = copies(cut - 1);
        if (step.above == cut + 1 && is_own(cut)) step.begun = copies(cut);
        steps_.push_back(std::move(step));
      }
    }
    for (const int part : own) placed[idx(part)] = true;
    finish_rank(steps_.back(), placed, known);
  }
}

void PlacedSearch::finish_rank(Step& step, const std::vector<bool>& placed,
                               const std::vector<bool>& known) const {
  step.ends_rank = true;
  for (int cut = 1; cut < space_.parts; ++cut)
    if (known[idx(cut)] && placed[idx(cut) - 1] != placed[idx(cut)]) step.frontier.push_back(cut);
  for (int part = 0; part < space_.parts; ++part) {
    if (placed[idx(part)]) continue;
    if (part > 0 && !placed[idx(part) - 1]) {
      step.runs.back().second = part + 1;
    } else {
      step.runs.emplace_back(part, part + 1);
    }
  }
  step.least_factor = std::numeric_limits<double>::infinity();
  for (std::size_t rank = 0; rank < space_.rank_stages.size(); ++rank) {
    bool is_left = false;
    for (const int stage : space_.rank_stages[rank]) {
      if (placed[idx(stage % space_.parts)]) continue;
      is_left = true;
      step.fixed_time += space_.time.fixed[idx(stage)];
      step.fixed_bytes += space_.bytes.fixed[idx(stage)];
      step.least_factor = std::min(step.least_factor, space_.bytes.factor[idx(stage)]);
      if (space_.by_stage) step.shares += 1;
    }
    if (!is_left) continue;
    step.ranks.push_back(static_cast<int>(rank));
    if (!space_.by_stage) step.shares += 1;
    if (!space_.limits.empty()) step.limits += with_rounding(space_.limits[rank]);
  }
}

void PlacedSearch::prepare(double most) {
  const StageNeed& time = space_.time;
  if (std::any_of(time.scaled_sums.begin(), time.scaled_sums.end(), [](double sum) { return sum > 0; }))
    return;  // the time of a range depends on the stage
  possible_.assign(space_.rank_stages.size(), {});
  std::vector<std::vector<double>> of_ranges{{0.0}, sums_of_ranges(time.sums, with_rounding(most))};
  for (std::size_t rank = 0; rank < possible_.size(); ++rank) {
    const std::vector<int>& stages = space_.rank_stages[rank];
    while (of_ranges.size() <= stages.size())
      of_ranges.push_back(sums_of_pairs(of_ranges.back(), of_ranges[1], with_rounding(most)));
    double fixed = 0;
    bool may_be_empty = false;
    for (const int stage : stages) {
      fixed += time.fixed[idx(stage)];
      may_be_empty = may_be_empty || space_.shortest[idx(stage % space_.parts)] == 0;
    }
    // With fewer ranges, if a stage may have none: all of them, so that nothing possible is left out.
    for (std::size_t count = may_be_empty ? 0 : stages.size(); count <= stages.size(); ++count) {
      if (of_ranges[count].empty()) {
        possible_[rank].clear();
        break;
      }
      for (const double sum : of_ranges[count]) possible_[rank].push_back(fixed + sum);
    }
    std::sort(possible_[rank].begin(), possible_[rank].end());
  }
}

void PlacedSearch::set_capacity(Step& step) const {
  step.known_capacity = 0;
  step.next_known = std::numeric_limits<double>::infinity();
  step.other_shares = step.shares;
  if (possible_.empty() || space_.by_stage) return;
  for (const int rank : step.ranks) {
    const std::vector<double>& sums = possible_[idx(rank)];
    const auto above = std::upper_bound(sums.begin(), sums.end(), bound_);
    if (above == sums.end()) continue;  // not known so far
    step.other_shares -= 1;
    step.known_capacity += above == sums.begin() ? 0 : *(above - 1);
    step.next_known = std::min(step.next_known, *above);
  }
}

std::optional<std::vector<int>> PlacedSearch::find(double bound) {
  bound_ = with_rounding(bound);
  next_bound_ = std::numeric_limits<double>::infinity();
  cuts_.assign(idx(space_.parts) + 1, 0);
  cuts_.back() = space_.layers;
  rank_time_.assign(space_.rank_stages.size(), 0);
  rank_bytes_.assign(space_.rank_stages.size(), 0);
  for (auto& failed : failed_) failed.clear();
  set_capacity(all_);
  for (Step& step : steps_) set_capacity(step);
  if (!rest_fits(all_) || !run(0)) return std::nullopt;
  return cuts_;
}

bool PlacedSearch::run(std::size_t index) {
  if (index == steps_.size()) return true;
  const Step& step = steps_[index];
  if (step.cut < 0) return try_cut(index, 0);
  Range range{cuts_[idx(step.below)] + step.layers_below, cuts_[idx(step.above)] - step.layers_above};
  for (const int stage : step.ended) narrow(stage, true, step.cut, range);
  for (const int stage : step.begun) narrow(stage, false, step.cut, range);
  if (range.low > range.high) return false;
  // From an even split outwards: a split that exists is found early, and is about even.
  const int middle = std::clamp(preferred(step), range.low, range.high);
  for (int up = middle, down = middle - 1; up <= range.high || down >= range.low; ++up, --down) {
    if (up <= range.high && try_cut(index, up)) return true;
    if (down >= range.low && try_cut(index, down)) return true;
    if (exhausted()) return false;
  }
  return false;
}

// Where the cut would be if all parts between its known neighbours took the same time.
int PlacedSearch::preferred(const Step& step) const {
  const std::vector<double>& sums = space_.time.sums;
  const double low = sums[idx(cuts_[idx(step.below)])], high = sums[idx(cuts_[idx(step.above)])];
  const double wanted = low + (high - low) * (step.cut - step.below) / (step.above - step.below);
  const auto after = std::lower_bound(sums.begin(), sums.end(), wanted);
  const int place = static_cast<int>(after - sums.begin());
  return place > 0 && after != sums.end() && *after - wanted > wanted - *(after - 1) ? place - 1 : place;
}

bool PlacedSearch::try_cut(std::size_t index, int value) {
  const Step& step = steps_[index];
  ++states_;
  if (step.cut >= 0) cuts_[idx(step.cut)] = value;
  const std::size_t before = undo_.size();
  bool good = true;
  for (const std::vector<int>* stages : {&step.ended, &step.begun})
    for (const int stage : *stages) {
      if (!good) break;
      const std::size_t rank = rank_of(stage);
      undo_.push_back({rank, rank_time_[rank], rank_bytes_[rank]});
      good = add(stage);
    }
  good = good && (step.ends_rank ? finish(index) : run(index + 1));
  while (undo_.size() > before) {
    const Loaded& old = undo_.back();
    rank_time_[old.rank] = old.time;
    rank_bytes_[old.rank] = old.bytes;
    undo_.pop_back();
  }
  return good;
}

bool PlacedSearch::finish(std::size_t index) {
  const Step& step = steps_[index];
  if (!rest_fits(step)) return false;
  std::u16string frontier;
  for (const int cut : step.frontier) frontier += static_cast<char16_t>(cuts_[idx(cut)]);
  if (failed_[index].contains(frontier)) return false;
  if (exhausted()) return false;
  if (run(index + 1)) return true;
  if (!exhausted()) failed_[index].insert(std::move(frontier));
  return false;
}

bool PlacedSearch::fits(int stage, double time, double bytes) {
  const std::size_t rank = rank_of(stage);
  const double whole_time = space_.by_stage ? time : rank_time_[rank] + time;
  if (!space_.limits.empty() && rank_bytes_[rank] + bytes > with_rounding(space_.limits[rank])) return false;
  if (whole_time <= bound_) return true;
  next_bound_ = std::min(next_bound_, whole_time);
  return false;
}

bool PlacedSearch::add(int stage) {
  const double time = space_.time.of(stage, begin_of(stage), end_of(stage)),
               bytes = space_.bytes.of(stage, begin_of(stage), end_of(stage));
  if (!fits(stage, time, bytes)) return false;
  rank_time_[rank_of(stage)] += time;
  rank_bytes_[rank_of(stage)] += bytes;
  return true;
}

// Removes values for which this stage alone is too much. Needs grow with the layers of the stage, so that the
// others are consecutive.
void PlacedSearch::narrow(int stage, bool ends_here, int cut, Range& range) {
  const auto fits_at = [&](int value) {
    const int begin = ends_here ? cuts_[idx(cut) - 1] : value, end = ends_here ? value : cuts_[idx(cut) + 1];
    return fits(stage, space_.time.of(stage, begin, end), space_.bytes.of(stage, begin, end));
  };
  int low = range.low, high = range.high + 1;
  while (low < high) {  // ends_here: the first that does not fit; else: the first that fits
    const int middle = low + (high - low) / 2;
    if (fits_at(middle) == ends_here) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  (ends_here ? range.high : range.low) = ends_here ? low - 1 : low;
}

// Whether the other ranks can hold what is left, if it could be divided at will.
bool PlacedSearch::rest_fits(const Step& step) {
  if (step.runs.empty()) return true;
  const double copies = static_cast<double>(stage_rank_.size()) / space_.parts;
  double time = step.fixed_time, bytes = step.fixed_bytes;
  for (const auto& [first, end] : step.runs) {
    const int begin = cuts_[idx(first)], last = cuts_[idx(end)];
    const auto between = [&](const std::vector<double>& sums) { return sums[idx(last)] - sums[idx(begin)]; };
    time += copies * between(space_.time.sums);
    bytes += copies * (between(space_.bytes.sums) + step.least_factor * between(space_.bytes.scaled_sums));
  }
  if (!space_.limits.empty() && bytes > with_rounding(step.limits)) return false;
  const double capacity = step.known_capacity + bound_ * step.other_shares;
  if (time <= capacity * (1 + 1e-11)) return true;  // sums that were taken as equal
  const double next =
      step.other_shares > 0 ? (time - step.known_capacity) / step.other_shares : step.next_known;
  next_bound_ = std::min(next_bound_, std::min(next, step.next_known));
  return false;
}

}  // namespace penstock::plan
