// Checks that a schedule, compute-only or lowered, can be executed and computes the right thing.
//
// Completeness  every stage runs F once for each microbatch of its chain, and B once or I and W once each
// Order         on the stage's rank, F before B or I, I before W; in a lowered schedule a compute action also needs its
//               input there before (its RECV, or the neighbouring stage on the same rank), and a SEND what it sends
// Place         every stage acts on one rank, the one of the stage map
// Transfers     (lowered) each activation and gradient that changes rank is sent once and received once, and on each
//               communicator sends and receives come in the same order
// Sharding      (lowered) UNSHARD and RESHARD of a stage alternate and enclose its compute; REDUCE_GRAD follows the last
//               weight gradient of its stage and comes once
// Deadlock      the rows can run to their end side by side
//
// The model of communication. For each ordered pair of ranks there is one communicator for activations and
// one for gradients, so a forward transfer never waits behind a backward one. A communicator has no tags: its
// n-th send meets its n-th receive. A rank executes its slots one after the other. A receive holds up its
// rank until the matching send was reached. A send holds up its rank until the matching receive was reached
// (SendModel::Blocking, the strictest transport), or not at all until the end of the row (SendModel::Posted).
// `lower` gives rows that run under Blocking; rows with deferred receives need Posted. In a compute-only
// schedule a transfer takes no slot: an action waits for its input.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/errors.h"
#include "penstock/schedule.h"

namespace penstock::schedule {

// In the order in which they are best repaired; a report lists them so.
enum class ViolationKind {
  Extent,         // ranks, stages or microbatches differ from what was expected
  Malformed,      // a stage or microbatch outside the schedule, a microbatch missing or out of place
  WrongRank,      // an action on a rank that does not hold its stage
  Duplicate,      // the same work twice
  Order,          // before what it needs on its own rank
  Missing,        // work that nobody does
  TransferOrder,  // sends and receives of one communicator in different order, or unmatched
  Sharding,       // UNSHARD, RESHARD or REDUCE_GRAD out of place
  Deadlock,       // ranks that wait for each other
};
std::string_view to_text(ViolationKind kind);

struct Place {
  int rank;
  std::size_t slot;
  friend bool operator==(const Place&, const Place&) = default;
};

struct Violation {
  ViolationKind kind;
  std::string text;           // what, where, expected, remedy
  std::vector<Place> places;  // the slots concerned
};

// One link of a deadlock: the rank stands at `at` and waits for `needs`, which stands at `needs_at` on the
// next link's rank, behind the slot where that one waits.
struct WaitLink {
  Place at;
  Action action;
  Action needs;
  Place needs_at;
};

struct Report {
  std::vector<Violation> violations;  // the first one is the one to repair first; at most `max_violations`
  std::vector<WaitLink> cycle;        // shortest cycle of a deadlock, else empty
  std::string grid;  // the rows around the places, marked: >here< waits, [there] is waited for

  bool ok() const { return violations.empty(); }
  // All violations in words, the cycle, and the grid.
  std::string text() const;
};

enum class SendModel { Blocking, Posted };

struct ValidateOptions {
  SendModel sends = SendModel::Blocking;
  std::size_t max_violations = 16;
  // What the schedule must have, where the caller knows it.
  struct Extent {
    int ranks;
    int stages;
    int microbatches;
  };
  std::optional<Extent> expected = std::nullopt;
  // Comparison with the reference validator, which counts distinct microbatches and looks at one rank at a
  // time: lets duplicates of forwards and cross-rank deadlocks through. For parity tests only.
  bool as_pytorch = false;
};

// A schedule that must not be executed. Carries the whole report.
class ScheduleError : public ValueError {
 public:
  explicit ScheduleError(Report report);
  const Report& report() const { return report_; }

 private:
  Report report_;
};

// Never throws for a bad schedule. Time and memory linear in the number of actions.
Report check(const Schedule& schedule, const ValidateOptions& options = {});
// Returns its argument, so that calls chain: lower(validate(generate(kind, shape))). Throws ScheduleError.
const Schedule& validate(const Schedule& schedule, const ValidateOptions& options = {});
Schedule validate(Schedule&& schedule, const ValidateOptions& options = {});

}  // namespace penstock::schedule
