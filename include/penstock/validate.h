// Checks that a schedule, compute-only or lowered, can be executed and computes the right result.
//
//   schedule::Schedule schedule = schedule::parse_schedule(csv);
//   schedule::Report report = schedule::check(schedule);
//   if (!report.ok()) std::cerr << report.text();
//   schedule::validate(schedule);  // throws ScheduleError instead
//
// What is checked:
//
//   Completeness  every stage runs F once for each microbatch of its chain, and B once or I and W once each
//   Order         on the stage's rank, F comes before B or I, and I before W; in a lowered schedule, the
//                 input of a compute action (its RECV, or the adjacent stage on the same rank) and the data
//                 of a SEND come before it
//   Place         every stage acts on one rank, that of the stage map
//   Transfers     (lowered) each activation and gradient that changes rank is sent once and received once,
//                 and on each communicator sends and receives have the same order
//   Sharding      (lowered) UNSHARD and RESHARD of a stage alternate and enclose its compute actions, and
//                 REDUCE_GRAD occurs once, after the last weight gradient of its stage
//   Deadlock      all rows can run to their end in parallel
//
// Communication is modeled as follows. Each ordered pair of ranks has one communicator for activations and
// one for gradients, so a forward transfer never waits for a backward one. A communicator has no tags: its
// n-th send matches its n-th receive. A rank executes its slots one after the other. A receive blocks its
// rank until the matching send is reached. A send blocks its rank until the matching receive is reached
// (SendModel::Blocking), or not at all (SendModel::Posted). `lower` returns rows that run under Blocking;
// rows with deferred receives need Posted. In a compute-only schedule transfers take no slots: an action
// waits for its input.
//
// Thread safety: pure functions; they may be called from any number of threads.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/errors.h"
#include "penstock/schedule.h"

namespace penstock::schedule {

// Kinds of violations, in the order in which they are best repaired and in which a report lists them.
enum class ViolationKind {
  Extent,         // ranks, stages or microbatches differ from ValidateOptions::expected
  Malformed,      // a stage or microbatch outside the schedule, a microbatch missing or out of place
  WrongRank,      // an action on a rank that does not hold its stage
  Duplicate,      // the same work done twice
  Order,          // an action before one on the same rank that it needs
  Missing,        // work that no rank does
  TransferOrder,  // sends and receives of one communicator in different order, or unmatched
  Sharding,       // UNSHARD, RESHARD or REDUCE_GRAD out of place
  Deadlock,       // ranks that wait for each other
};
// Returns "extent", "wrong rank", ...
std::string_view to_text(ViolationKind kind);

// A slot of a schedule.
struct Place {
  int rank;          // position along the pipeline
  std::size_t slot;  // index in the row of the rank
  // Compares both members.
  friend bool operator==(const Place&, const Place&) = default;
};

// One reason why a schedule cannot be executed.
struct Violation {
  ViolationKind kind;         // what is wrong
  std::string text;           // what, where, what was expected, and what to change
  std::vector<Place> places;  // the slots involved; may be empty
};

// One link of a deadlock: the rank of `at` waits for `needs`, which comes on the next link's rank after the
// slot where that rank waits.
struct WaitLink {
  Place at;        // where the rank waits
  Action action;   // the action there
  Action needs;    // the action that it waits for
  Place needs_at;  // where that action is
};

// The result of `check`.
struct Report {
  std::vector<Violation> violations;  // the one to repair first comes first; see max_violations
  std::vector<WaitLink> cycle;        // the shortest cycle of a deadlock, else empty
  std::string grid;                   // the rows around the places: >this< waits, [that] is waited for

  // Whether there are no violations.
  bool ok() const { return violations.empty(); }
  // Returns all violations, the cycle and the grid as text.
  std::string text() const;
};

// How long a send blocks its rank.
enum class SendModel {
  Blocking,  // until the matching receive is reached: the strictest transport
  Posted,    // not at all; sends complete by the end of the row
};

// Options of `check` and `validate`.
struct ValidateOptions {
  SendModel sends = SendModel::Blocking;  // how long a send blocks its rank
  std::size_t max_violations = 16;        // checking stops after this many
  // The size of a schedule.
  struct Extent {
    int ranks;         // number of ranks
    int stages;        // number of stages
    int microbatches;  // number of microbatches
  };
  std::optional<Extent> expected = std::nullopt;  // the size that the schedule must have, if known
  // Checks only what the validator of PyTorch 2.14 checks, which counts distinct microbatches and looks at
  // one rank at a time: accepts duplicate forwards and deadlocks between ranks. For parity tests only.
  bool as_pytorch = false;
};

// A schedule that cannot be executed. Carries the whole report.
class ScheduleError : public ValueError {
 public:
  // The message contains report.text().
  explicit ScheduleError(Report report);
  // All violations.
  const Report& report() const { return report_; }

 private:
  Report report_;
};

// Returns everything that is wrong with a schedule, up to max_violations. Does not throw for an invalid
// schedule. Takes time and memory linear in the number of actions.
Report check(const Schedule& schedule, const ValidateOptions& options = {});
// Throws ScheduleError unless `check` finds nothing. Returns its argument, so that calls can be nested:
// lower(validate(schedule)).
const Schedule& validate(const Schedule& schedule, const ValidateOptions& options = {});
// The same for a temporary: lower(validate(generate(kind, shape))).
Schedule validate(Schedule&& schedule, const ValidateOptions& options = {});

}  // namespace penstock::schedule
