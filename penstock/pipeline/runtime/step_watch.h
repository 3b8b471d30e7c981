// Makes a stalled step visible: a thread per pipeline that tells the other ranks where this one is, and asks them when a wait has
// failed.
//
// While all is well it looks at the progress of the step four times a second and leaves a word in the store of the world every
// `report_after`. A rank that stays in one place for longer than that renews its word every second. When a wait ends with an
// error, `roll_call` leaves the last word of this rank and collects those of the others. All traffic with the store is on the
// thread, so that a store which does not answer never holds up the rank itself: every call here ends within its limit.
//
// A module that hangs is told by this thread; a process that is stopped says nothing more, and that is told by the age of its word.
// Thread rule: start, roll_call and last_word belong to the thread of the pipeline.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/world.h"
#include "penstock/pipeline/report/stall_report.h"

namespace penstock::pipeline {

class StepWatch {
 public:
  struct Options {
    comm::World world;
    std::vector<int> ranks;             // global ranks of the pipeline, in its order
    std::chrono::milliseconds timeout;  // of the waits of a step
    // Where this rank is; nothing while that is changing. Called on the thread of the watch, never after the watch has ended.
    std::function<std::optional<RankPlace>()> look;
  };
  explicit StepWatch(Options options);
  // Waits for the thread, a moment at most.
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  // How long a rank may stay in one place before it counts as stalled: a third of the time-out, at most 10 s.
  static std::chrono::milliseconds report_after(std::chrono::milliseconds timeout);

  // Starts the thread; again: nothing.
  void start();

  // The places of all ranks, in the order of the pipeline. `own` becomes the last word of this rank. Waits for ranks whose word is
  // old, kRollCallTime at most; `lost`, a rank that is known to be gone, is not waited for.
  static constexpr std::chrono::milliseconds kRollCallTime{1500};
  std::vector<RankPlace> roll_call(const RankPlace& own, std::optional<int> lost);

  // Leaves `own` as the last word. The rank that hosts the store waits a moment for the others to read it.
  void last_word(const RankPlace& own);

 private:
  struct State;
  std::vector<RankPlace> ask(const RankPlace& own, std::optional<int> lost, bool wait_for_others, std::chrono::milliseconds limit);
  std::shared_ptr<State> state_;  // shared with the thread, which may be in the store when the watch goes
  struct Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace penstock::pipeline
