#include "tests/chaos/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tests/chaos/random.h"

namespace penstock::chaos {

namespace {

struct Row {
  Fault fault;
  const char* name;
  const char* meaning;
};

constexpr std::array<Row, 21> kRows = {{
    {Fault::KillRank, "kill-rank", "SIGKILL of a rank"},
    {Fault::StopRank, "stop-rank", "SIGSTOP of a rank, for good"},
    {Fault::PauseRank, "pause-rank", "SIGSTOP of a rank, SIGCONT within 2.5 s"},
    {Fault::KillLauncher, "kill-launcher", "SIGKILL of the launcher"},
    {Fault::PauseLauncher, "pause-launcher", "SIGSTOP of the launcher, SIGCONT within 3 s"},
    {Fault::KillHost, "kill-host", "every process of a host ends at once"},
    {Fault::StopHost, "stop-host", "SIGSTOP of every process of a host"},
    {Fault::Delay, "delay", "5 to 40 ms on the cable, each way, with jitter"},
    {Fault::Loss, "loss", "0.2 to 2 % of the packets are lost"},
    {Fault::Reorder, "reorder", "5 to 30 % of the packets arrive after later ones"},
    {Fault::Rate, "rate", "the cable carries 1 to 20 Mbit/s"},
    {Fault::CablePulled, "cable-3s", "the cable is pulled for 3 s"},
    {Fault::CableCut, "cable-cut", "the cable is pulled for good"},
    {Fault::DiskFull, "disk-full", "no space for checkpoints"},
    {Fault::DiskReadOnly, "disk-read-only", "the folder of the checkpoints becomes read-only"},
    {Fault::DiskSlow, "disk-slow", "every write and flush of a file takes 1 to 50 ms longer"},
    {Fault::CheckpointDamaged, "checkpoint-damaged", "bytes flipped, files cut off, emptied or missing"},
    {Fault::ClockJump, "clock-jump", "the time of day jumps by up to a day, either way"},
    {Fault::Garbage, "garbage", "random bytes on every port that the job listens on"},
    {Fault::Flood, "flood", "connections to every port as fast as possible"},
    {Fault::HalfOpen, "half-open", "connections to every port that stay and say nothing"},
}};

const Row& row_of(Fault fault) {
  // The rows are in the order of the enumeration; a test compares them.
  return kRows.at(static_cast<std::size_t>(fault));
}

constexpr int kLocalSteps = 48;
constexpr int kHostSteps = 16;
// The fault must not come when the run is nearly over.
int last_strike(const Plan& plan) {
  return plan.start == Start::Hosts ? kHostSteps / 2 : kLocalSteps * 3 / 4;
}

bool needs_hosts(Fault fault) {
  switch (fault) {
    case Fault::KillHost:
    case Fault::StopHost:
    case Fault::Delay:
    case Fault::Loss:
    case Fault::Reorder:
    case Fault::Rate:
    case Fault::CablePulled:
    case Fault::CableCut:
      return true;
    case Fault::KillRank:
    case Fault::StopRank:
    case Fault::PauseRank:
    case Fault::KillLauncher:
    case Fault::PauseLauncher:
    case Fault::DiskFull:
    case Fault::DiskReadOnly:
    case Fault::DiskSlow:
    case Fault::CheckpointDamaged:
    case Fault::ClockJump:
    case Fault::Garbage:
    case Fault::Flood:
    case Fault::HalfOpen:
      return false;
  }
  return false;
}

// Who starts the ranks: any way that can have this fault.
Start start_of(Fault fault, Random& random) {
  if (needs_hosts(fault)) return Start::Hosts;
  if (fault == Fault::KillLauncher || fault == Fault::PauseLauncher)
    return random.chance(0.5) ? Start::Train : Start::Launch;
  if (random.chance(has_strangers(fault) ? 0.4 : 0.2)) return Start::Hosts;
  return random.chance(0.6) ? Start::Train : Start::Launch;
}

// A fault may strike while the ranks start and meet, if a start that has trained nothing can still tell of
// it.
bool may_strike_at_the_start(Fault fault) {
  return fault != Fault::CheckpointDamaged && fault != Fault::DiskFull && fault != Fault::DiskReadOnly;
}

void set_amount(Plan& plan, Random& random) {
  switch (plan.fault) {
    case Fault::PauseRank:
      plan.seconds = random.number(0.2, 2.5);
      break;
    case Fault::PauseLauncher:
      plan.seconds = random.number(0.2, 3);
      break;
    case Fault::Delay:
      plan.amount = random.number(5, 40);
      break;
    case Fault::Loss:
      plan.amount = random.number(0.2, 2);
      plan.by_other_program = random.chance(0.5);
      break;
    case Fault::Reorder:
      plan.amount = random.number(5, 30);
      break;
    case Fault::Rate:
      plan.amount = random.number(1, 20);
      plan.by_other_program = random.chance(0.5);
      break;
    case Fault::CablePulled:
      plan.seconds = 3;
      plan.by_other_program = random.chance(0.5);
      break;
    case Fault::CableCut:
      plan.by_other_program = random.chance(0.5);
      break;
    case Fault::DiskFull:
      plan.seconds = random.chance(0.3) ? random.number(0.1, 0.6) : 0;
      plan.amount = random.number(0, 300);
      break;
    case Fault::DiskSlow:
      plan.amount = random.number(1, 50);
      break;
    case Fault::CheckpointDamaged:
      plan.damage = static_cast<Damage>(random.whole(0, 3));
      plan.fallback = random.chance(0.7);
      break;
    case Fault::ClockJump:
      plan.amount = random.number(1, 86'400) * (random.chance(0.5) ? -1 : 1);
      break;
    case Fault::Flood:
    case Fault::Garbage:
      plan.seconds = random.number(0.5, 3);
      break;
    case Fault::HalfOpen:
      plan.amount = random.whole(50, 1100);
      break;
    case Fault::KillRank:
    case Fault::StopRank:
    case Fault::KillLauncher:
    case Fault::KillHost:
    case Fault::StopHost:
    case Fault::DiskReadOnly:
      break;
  }
}

// What is hit.
std::string subject_text(const Plan& plan) {
  switch (plan.fault) {
    case Fault::KillRank:
    case Fault::StopRank:
    case Fault::PauseRank:
    case Fault::ClockJump:
      return fmt::format("rank {}", plan.victim);
    case Fault::KillHost:
    case Fault::StopHost:
      return fmt::format("host {}", plan.victim);
    case Fault::KillLauncher:
    case Fault::PauseLauncher:
      return "the launcher";
    case Fault::Delay:
    case Fault::Loss:
    case Fault::Reorder:
    case Fault::Rate:
    case Fault::CablePulled:
    case Fault::CableCut:
      return "the cable";
    case Fault::DiskFull:
    case Fault::DiskReadOnly:
    case Fault::DiskSlow:
    case Fault::CheckpointDamaged:
      return "the disk";
    case Fault::Garbage:
    case Fault::Flood:
    case Fault::HalfOpen:
      return "every port";
  }
  return "";
}

std::string amount_text(const Plan& plan) {
  switch (plan.fault) {
    case Fault::Delay:
      return fmt::format(", {:.1f} ms", plan.amount);
    case Fault::Loss:
      return fmt::format(", {:.2f} % by {}", plan.amount,
                         plan.by_other_program ? "nft if installed" : "the relay");
    case Fault::Reorder:
      return fmt::format(", {:.1f} %", plan.amount);
    case Fault::Rate:
      return fmt::format(", {:.1f} Mbit/s by {}", plan.amount,
                         plan.by_other_program ? "tc if installed" : "the relay");
    case Fault::CablePulled:
    case Fault::CableCut:
      return plan.by_other_program ? ", without carrier" : ", silently";
    case Fault::DiskFull:
      return fmt::format(", {:.0f} KiB left", plan.amount);
    case Fault::DiskSlow:
      return fmt::format(", {:.1f} ms", plan.amount);
    case Fault::CheckpointDamaged: {
      constexpr std::array<const char*, 4> kDamages = {"a byte flipped", "a file cut off", "a file missing",
                                                       "a file emptied"};
      return fmt::format(", {}{}", kDamages.at(static_cast<std::size_t>(plan.damage)),
                         plan.fallback ? "" : ", no fallback");
    }
    case Fault::ClockJump:
      return fmt::format(", {:+.0f} s", plan.amount);
    case Fault::HalfOpen:
      return fmt::format(", {:.0f} connections a port", plan.amount);
    case Fault::KillRank:
    case Fault::StopRank:
    case Fault::PauseRank:
    case Fault::KillLauncher:
    case Fault::PauseLauncher:
    case Fault::KillHost:
    case Fault::StopHost:
    case Fault::DiskReadOnly:
    case Fault::Garbage:
    case Fault::Flood:
      return "";
  }
  return "";
}

}  // namespace

const std::vector<Fault>& all_faults() {
  static const std::vector<Fault> faults = [] {
    std::vector<Fault> list;
    for (const Row& row : kRows) list.push_back(row.fault);
    return list;
  }();
  return faults;
}

const char* name_of(Fault fault) { return row_of(fault).name; }
const char* meaning_of(Fault fault) { return row_of(fault).meaning; }

std::optional<Fault> fault_named(std::string_view name) {
  for (const Row& row : kRows)
    if (name == row.name) return row.fault;
  return std::nullopt;
}

Plan plan_of(Fault fault, std::uint64_t seed) {
  Random random(seed * 1000 + static_cast<std::uint64_t>(fault));
  Plan plan;
  plan.fault = fault;
  plan.seed = seed;
  plan.start = start_of(fault, random);
  plan.layout = random.chance(0.5) ? Layout::Pipeline : Layout::Replicas;
  plan.steps = plan.start == Start::Hosts ? kHostSteps : kLocalSteps;
  plan.victim = random.whole(0, 1);
  if (fault == Fault::KillRank && plan.start != Start::Hosts) plan.restarts = random.whole(0, 1);
  if (may_strike_at_the_start(fault) && random.chance(0.25)) {
    plan.strike_after = std::chrono::milliseconds(random.whole(0, 2500));
  } else {
    // Damage needs two checkpoints, of which one is left.
    const int first = fault == Fault::CheckpointDamaged ? 10 : 1;
    plan.strike_step = random.whole(first, std::max(first, last_strike(plan)));
  }
  set_amount(plan, random);
  return plan;
}

bool has_strangers(Fault fault) {
  return fault == Fault::Garbage || fault == Fault::Flood || fault == Fault::HalfOpen;
}

int longest_run() { return kLocalSteps; }

double timeout_s(const Plan& plan) { return plan.start == Start::Hosts ? 12 : 8; }

Expectation expectation_of(const Plan& plan) {
  // What a busy machine may add: LibTorch takes seconds to load, and survivors write a report.
  constexpr double kBusy_s = 8, kGrace_s = 3, kKill_s = 3;
  Expectation expected;
  const std::string victim = fmt::format("rank {}", plan.victim);
  const double until_silence = timeout_s(plan) + kGrace_s + kKill_s + kBusy_s;
  expected.deadline_s = until_silence;
  switch (plan.fault) {
    case Fault::KillRank:
    case Fault::KillHost:
      expected.culprits = {victim};
      expected.must_finish = plan.restarts > 0;
      expected.must_fail = plan.restarts == 0;
      // A death is told at once, except to a rank that had not yet met the dead one.
      if (!plan.strike_after) expected.deadline_s = kGrace_s + kKill_s + kBusy_s;
      if (plan.restarts > 0) expected.deadline_s += 60;  // and trains all steps
      expected.may_leave_temporary_files = plan.fault == Fault::KillHost;
      break;
    case Fault::StopRank:
    case Fault::StopHost:
      expected.culprits = {victim};
      expected.must_fail = true;
      break;
    case Fault::KillLauncher:
      expected.silent = true;
      expected.must_fail = true;
      expected.deadline_s = kGrace_s + kBusy_s;
      expected.may_leave_temporary_files = true;
      break;
    case Fault::CableCut:
      // Each side can only know that the other is silent, or that the network is; nobody names itself.
      expected.culprits = {"rank 0", "rank 1", "network", "unreachable"};
      expected.must_fail = true;
      break;
    case Fault::DiskFull:
      expected.one_names_for_all = true;
      expected.culprits = {"No space left on device"};
      expected.must_fail = plan.seconds == 0;
      expected.deadline_s = 60;  // training goes on to its last step
      break;
    case Fault::DiskReadOnly:
      expected.one_names_for_all = true;
      expected.culprits = {"Read-only file system"};
      expected.must_fail = true;
      expected.deadline_s = 60;
      break;
    case Fault::CheckpointDamaged:
      expected.one_names_for_all = true;
      expected.deadline_s = 60;
      expected.must_finish = plan.fallback;
      expected.must_fail = !plan.fallback;
      // The name of the damaged file is added by the trial, which chooses it.
      break;
    case Fault::PauseRank:
    case Fault::PauseLauncher:
    case Fault::Delay:
    case Fault::Loss:
    case Fault::Reorder:
    case Fault::Rate:
    case Fault::CablePulled:
    case Fault::DiskSlow:
    case Fault::ClockJump:
    case Fault::Garbage:
    case Fault::Flood:
    case Fault::HalfOpen:
      expected.must_finish = true;
      expected.deadline_s = 90;
      break;
  }
  return expected;
}

std::string to_text(const Plan& plan) {
  const std::string when = plan.strike_after
                               ? fmt::format("{} ms after the start", plan.strike_after->count())
                               : fmt::format("after step {}", plan.strike_step);
  constexpr std::array<const char*, 3> kStarts = {"penstock train", "penstock launch", "two hosts"};
  std::string text = fmt::format("{} of seed {}: {}, {}{}", name_of(plan.fault), plan.seed,
                                 subject_text(plan), when, amount_text(plan));
  if (plan.seconds > 0) text += fmt::format(", for {:.1f} s", plan.seconds);
  text += fmt::format("; {}, {}", kStarts.at(static_cast<std::size_t>(plan.start)),
                      plan.layout == Layout::Pipeline ? "pp 2" : "dp 2");
  if (plan.restarts > 0) text += ", 1 restart";
  return text;
}

}  // namespace penstock::chaos
