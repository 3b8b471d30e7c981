#include "penstock/pipeline/shared/tie_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

std::string tie_text(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

void check_declarations(const std::vector<DeclaredUses>& ranks) {
  const auto& ties = ranks.front().ties;
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const auto& others = ranks[rank].ties;
    if (others == ties) continue;
    const auto place = static_cast<std::size_t>(
        std::mismatch(ties.begin(), ties.end(), others.begin(), others.end()).first - ties.begin());
    const auto text = [&](const auto& of) {
      return place < of.size() ? fmt::format("({})", tie_text(of[place])) : std::string("no such tie");
    };
    throw ValueError(describe(fmt::format("tie {} of the pipeline's rank {}", place, rank), text(others),
                              fmt::format("{}, as on its rank 0", text(ties)),
                              "declare the same ties in the same order on all ranks"));
  }
  std::set<std::string> known;
  for (const std::vector<std::string>& names : ties) {
    if (names.empty())
      throw ValueError(describe("a tie of parameters", "no names", "at least one name of a parameter",
                                "pass the names of the parameters that are one"));
    for (const std::string& name : names)
      if (!known.insert(name).second)
        throw ValueError(describe(fmt::format("tie of ({})", tie_text(names)),
                                  fmt::format("{}, which is named twice", name), "each name once, in one tie",
                                  "declare one tie with all names of the parameter"));
  }
}

// A use, and the position of its rank along the pipeline.
struct UseOnRank {
  const PlacedUse* use;
  int rank;
  std::size_t index;  // among the uses of the tie on the rank
  int repeat;         // 0 for the first use of this name and stage on the rank, 1 for the second

  std::tuple<int, std::string, int> key() const { return {use->stage, use->name, repeat}; }
  std::string text() const {
    return fmt::format("{} of stage {} on the pipeline's rank {}", use->name, use->stage, rank);
  }
};

std::vector<UseOnRank> uses_of_tie(const std::vector<DeclaredUses>& ranks, int tie) {
  std::vector<UseOnRank> all;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    std::map<std::pair<int, std::string>, int> repeats;
    std::size_t index = 0;
    for (const PlacedUse& use : ranks[rank].uses)
      if (use.tie == tie && !use.again)
        all.push_back({&use, static_cast<int>(rank), index++, repeats[{use.stage, use.name}]++});
  }
  return all;
}

void check_uses(const std::vector<DeclaredUses>& ranks, const std::vector<std::string>& names,
                const std::vector<UseOnRank>& uses) {
  std::set<std::string> known;
  for (const DeclaredUses& rank : ranks)
    for (const PlacedUse& use : rank.uses) known.insert(use.name);
  for (const std::string& name : names)
    if (!known.contains(name))
      throw ValueError(describe(fmt::format("tie of ({})", tie_text(names)),
                                fmt::format("{}, which no stage has", name),
                                "names of parameters as named_parameters() of the stages lists them"));
  for (const UseOnRank& each : uses)
    if (each.use->layout != uses.front().use->layout)
      throw ValueError(describe(
          fmt::format("tie of ({}): {}", tie_text(names), each.text()), each.use->layout,
          fmt::format("{}, as {}", uses.front().use->layout, uses.front().text()),
          "tie parameters of one shape, dtype and placement, all of them trainable or all of them frozen"));
}

// Takes ranks in order into the first cover that lacks all their uses. In a pipeline with one chain every
// rank is in the first one.
std::vector<TieCover> covers_of(const std::string& text, const std::vector<UseOnRank>& uses) {
  using Key = std::tuple<int, std::string, int>;
  std::map<int, std::vector<const UseOnRank*>> by_rank;
  std::set<Key> keys;
  for (const UseOnRank& each : uses) {
    by_rank[each.rank].push_back(&each);
    keys.insert(each.key());
  }
  std::vector<TieCover> covers;
  std::vector<std::map<Key, TieCover::Term>> covered;
  for (const auto& [rank, here] : by_rank) {
    std::size_t place = 0;
    while (place < covers.size() && std::any_of(here.begin(), here.end(), [&](const UseOnRank* each) {
             return covered[place].contains(each->key());
           }))
      ++place;
    if (place == covers.size()) {
      covers.emplace_back();
      covered.emplace_back();
    }
    for (const UseOnRank* each : here)
      covered[place][each->key()] = {.member = covers[place].members.size(), .use = each->index};
    covers[place].members.push_back(rank);
  }
  for (std::size_t place = 0; place < covers.size(); ++place) {
    if (covered[place].size() != keys.size())
      throw ValueError(describe(fmt::format("tie of ({})", text),
                                fmt::format("{} of {} uses on the pipeline's ranks {}", covered[place].size(),
                                            keys.size(), fmt::join(covers[place].members, ", ")),
                                "each use once, or, in a bidirectional pipeline, each use on two ranks",
                                "pass the schedule's stage map to parameter_uses"));
    for (const auto& [key, term] : covered[place]) covers[place].terms.push_back(term);
  }
  return covers;
}

}  // namespace

std::vector<TiePlan> plan_ties(const std::vector<DeclaredUses>& ranks) {
  check_declarations(ranks);
  std::vector<TiePlan> plans;
  for (std::size_t tie = 0; tie < ranks.front().ties.size(); ++tie) {
    const std::vector<std::string>& names = ranks.front().ties[tie];
    const std::vector<UseOnRank> uses = uses_of_tie(ranks, static_cast<int>(tie));
    check_uses(ranks, names, uses);
    TiePlan& plan = plans.emplace_back();
    plan.text = tie_text(names);
    plan.covers = covers_of(plan.text, uses);
    const std::vector<int>& members = plan.covers.front().members;
    for (const UseOnRank& each : uses)
      if (std::binary_search(members.begin(), members.end(), each.rank))
        plan.stages.push_back(each.use->stage);
    std::sort(plan.stages.begin(), plan.stages.end());
  }
  return plans;
}

}  // namespace penstock
