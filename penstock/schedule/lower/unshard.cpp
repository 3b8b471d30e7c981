// The unshard/reshard pass: decides which stages a rank holds gathered at each slot of its row.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/lower.h"

namespace penstock::schedule {

namespace {

// The gathered stages. When several are freed before one slot, their order is visible in the text. It must
// match PyTorch 2.14, which iterates a Python set: an open-addressing hash table of initial size 8 that
// probes runs of adjacent entries before perturbing, grows at three fifths, and reuses the last removed entry
// passed while probing. Membership is a linear search over a handful of entries.
class ActiveStages {
 public:
  bool contains(int stage) const {
    return std::ranges::any_of(table_,
                               [&](const Entry& e) { return e.state == State::Used && e.stage == stage; });
  }

  void add(int stage) {
    ++used_;
    if (place(table_, stage) == State::Removed) return;
    ++filled_;
    const std::size_t mask = table_.size() - 1;
    if (filled_ * 5 >= mask * 3) rebuild();
  }

  void remove(int stage) {
    for (Entry& entry : table_) {
      if (entry.state == State::Used && entry.stage == stage) {
        entry.state = State::Removed;
        --used_;
        return;
      }
    }
  }

  std::vector<int> in_order() const {
    std::vector<int> stages;
    for (const Entry& entry : table_) {
      if (entry.state == State::Used) stages.push_back(entry.stage);
    }
    return stages;
  }

  std::size_t size() const { return used_; }

 private:
  enum class State : char { Free, Used, Removed };
  struct Entry {
    State state = State::Free;
    int stage = 0;
  };
  static constexpr std::size_t kSmallest = 8;
  static constexpr std::size_t kNearby = 9;

  // Returns the previous state of the entry.
  static State place(std::vector<Entry>& table, int stage) {
    const std::size_t mask = table.size() - 1;
    auto perturb = static_cast<std::size_t>(stage);
    std::size_t i = perturb & mask;
    Entry* removed = nullptr;
    while (true) {
      const std::size_t last = i + kNearby <= mask ? i + kNearby : i;
      for (std::size_t at = i; at <= last; ++at) {
        if (table[at].state == State::Removed) removed = &table[at];
        if (table[at].state == State::Free) {
          Entry& chosen = removed != nullptr ? *removed : table[at];
          const State before = chosen.state;
          chosen = {State::Used, stage};
          return before;
        }
      }
      perturb >>= 5;
      i = (i * 5 + 1 + perturb) & mask;
    }
  }

  void rebuild() {
    const std::size_t wanted = used_ > 50000 ? used_ * 2 : used_ * 4;
    std::size_t size = kSmallest;
    while (size <= wanted) size *= 2;
    std::vector<Entry> fresh(size);
    for (const Entry& entry : table_) {
      if (entry.state == State::Used) place(fresh, entry.stage);
    }
    table_ = std::move(fresh);
    filled_ = used_;
  }

  std::vector<Entry> table_ = std::vector<Entry>(kSmallest);
  std::size_t filled_ = 0;  // used and removed entries
  std::size_t used_ = 0;
};

// The next use of a stage. Sorted by slot, then by position within an overlap.
struct Upcoming {
  std::size_t slot;
  std::size_t member;
  std::size_t stage;  // index into the stages of the row
};

// The future slots of every stage of a row, so that finding the next stages does not scan the row.
class Lookahead {
 public:
  explicit Lookahead(const Row& row) : row_(row) {
    std::unordered_map<int, std::size_t> known;
    std::size_t last = 0;  // consecutive slots mostly use the same one or two stages
    for (std::size_t slot = 0; slot < row.size(); ++slot) {
      for (const Action& action : row[slot]) {
        const int stage = action.stage();
        if (uses_.empty() || uses_[last].stage != stage) {
          const auto [found, fresh] = known.try_emplace(stage, uses_.size());
          last = found->second;
          if (fresh) {
            uses_.push_back({stage, {}, 0});
            insert(slot, last);
          }
        }
        std::vector<std::size_t>& slots = uses_[last].slots;
        if (slots.empty() || slots.back() != slot) slots.push_back(slot);
      }
    }
  }

  // Up to the requested number of stages, in the order of their next use; members of an overlap count
  // together.
  void next_stages(std::size_t wanted, std::vector<int>& stages) const {
    stages.clear();
    for (std::size_t i = 0; i < upcoming_.size(); ++i) {
      if (stages.size() >= wanted && upcoming_[i].slot != upcoming_[i - 1].slot) return;
      stages.push_back(uses_[upcoming_[i].stage].stage);
    }
  }

  // Advances past `slot`: its stages move to their next use.
  void leave(std::size_t slot) {
    while (!upcoming_.empty() && upcoming_.front().slot == slot) {
      const std::size_t stage = upcoming_.front().stage;
      upcoming_.erase(upcoming_.begin());
      Uses& uses = uses_[stage];
      ++uses.next;
      if (uses.next < uses.slots.size()) insert(uses.slots[uses.next], stage);
    }
  }

 private:
  struct Uses {
    int stage;
    std::vector<std::size_t> slots;
    std::size_t next;
  };

  void insert(std::size_t slot, std::size_t stage) {
    const Slot members = row_[slot];
    const auto found =
        std::ranges::find_if(members, [&](const Action& a) { return a.stage() == uses_[stage].stage; });
    const Upcoming entry = {slot, static_cast<std::size_t>(found - members.begin()), stage};
    const auto before = [](const Upcoming& a, const Upcoming& b) {
      return a.slot != b.slot ? a.slot < b.slot : a.member < b.member;
    };
    upcoming_.insert(std::upper_bound(upcoming_.begin(), upcoming_.end(), entry, before), entry);
  }

  const Row& row_;
  std::vector<Uses> uses_;
  std::vector<Upcoming> upcoming_;
};

}  // namespace

Row add_unshard_reshard(const Row& row, int max_active_stages) {
  if (max_active_stages < 1) {
    throw ValueError(describe("stages gathered at once", fmt::format("{}", max_active_stages), "at least 1"));
  }
  Row result;
  result.reserve(row.size() + 8);
  Lookahead lookahead(row);
  ActiveStages active;
  std::vector<int> wanted;
  for (std::size_t slot = 0; slot < row.size(); ++slot) {
    if (row[slot].empty()) continue;
    lookahead.next_stages(static_cast<std::size_t>(max_active_stages), wanted);
    std::size_t wanted_and_active = 0;
    for (const int stage : wanted) wanted_and_active += active.contains(stage) ? 1 : 0;
    if (wanted_and_active < active.size()) {
      for (const int stage : active.in_order()) {
        if (std::ranges::find(wanted, stage) != wanted.end()) continue;
        active.remove(stage);
        result.push(Action(ActionKind::Reshard, stage));
      }
    }
    if (wanted_and_active < wanted.size()) {
      for (const int stage : wanted) {
        if (active.contains(stage)) continue;
        active.add(stage);
        result.push(Action(ActionKind::Unshard, stage));
      }
    }
    result.push_slot(row[slot]);
    lookahead.leave(slot);
  }
  for (const int stage : active.in_order()) result.push(Action(ActionKind::Reshard, stage));
  return result;
}

}  // namespace penstock::schedule
