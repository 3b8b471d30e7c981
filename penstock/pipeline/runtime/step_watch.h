// Makes a stalled step visible: a thread per pipeline that posts where this rank is, and collects where the
// others are after a wait has failed.
//
// During normal operation the thread looks at the progress of the step four times a second and posts a status
// in the store of the world every `report_after`. A rank that stays in one place for longer than that renews
// its status every second. When a wait ends with an error, `roll_call` posts the last status of this rank and
// collects those of the others. All access to the store is on the thread, so that a store which does not
// answer never blocks the rank itself: every call here ends within its time limit.
//
// A module that hangs is reported by this thread; a process that is stopped posts nothing more, which shows
// in the age of its status.
// Thread safety: start, roll_call and post_last_place are called on the thread of the pipeline.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/pipeline/report/stall_report.h"
#include "penstock/world.h"

namespace penstock {

class StepWatch {
 public:
  struct Options {
    comm::World world;
    std::vector<int> ranks;             // global ranks of the pipeline, in pipeline order
    std::chrono::milliseconds timeout;  // of the waits of a step
    // Returns where this rank is; std::nullopt while that is changing. Called on the watch's thread, never
    // after the watch has ended.
    std::function<std::optional<RankPlace>()> look;
  };
  explicit StepWatch(Options options);
  // Waits for the thread, for half a second at most.
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  // How long a rank may stay in one place before it counts as stalled: a third of the time-out, at most 10 s.
  static std::chrono::milliseconds report_after(std::chrono::milliseconds timeout);

  // Starts the thread; does nothing if it runs already.
  void start();

  // Returns the places of all ranks, in pipeline order. `own` becomes the last status of this rank. Waits at
  // most kRollCallTime for ranks whose status is old; does not wait for `lost`, a rank that is known to be
  // gone.
  static constexpr std::chrono::milliseconds kRollCallTime{1500};
  std::vector<RankPlace> roll_call(const RankPlace& own, std::optional<int> lost);

  // Posts `own` as the last status. The rank that hosts the store waits briefly for the others to read it.
  void post_last_place(const RankPlace& own);

 private:
  struct State;
  std::vector<RankPlace> ask(const RankPlace& own, std::optional<int> lost, bool wait_for_others,
                             std::chrono::milliseconds limit);
  std::shared_ptr<State> state_;  // shared with the thread, which may outlive the watch
  struct Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace penstock
