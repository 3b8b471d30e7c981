// Finds where NaN or infinity first appeared, for the error message of a run that stops because of them.
//
//   // the same on every rank
//   std::optional<NonFiniteOrigin> place = earliest(world, bad_parameter(layout, model));
//   if (!place) {
//     OperatorWatch watch(layout, model);
//     watch.begin_run(0);
//     {
//       const ModeGuard guard(watch);
//       pipeline.eval(args, kwargs, target);                                              // every rank
//     }
//     place = earliest(world, watch.found());
//   }
//   if (!place) place = earliest(world, bad_gradient(layout, model));
//
// An operator is reported if its result contains NaN or an infinity that its inputs do not explain. Minus
// infinities that are written on purpose (attention masks: fill, masked_fill, where) are accepted, but a NaN
// that results only from them is reported. Bad values received from another stage are attributed to that
// stage: the origin is the finding of any rank that comes earliest in the pipeline.
//
// The functions wait for the device. Thread safety: one thread; a watch sees the operators of the thread that
// has entered it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "penstock/mode.h"
#include "penstock/optimizer.h"
#include "penstock/train/job/layout.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/world.h"

namespace penstock::train {

struct NonFiniteOrigin {
  // Position in a step: run of the schedule, microbatch, stage, and the order within the stage.
  std::int64_t run = 0, microbatch = 0, stage = 0, order = 0;
  std::string what;  // message text

  bool is_before(const NonFiniteOrigin& other) const;
};

// Returns the first parameter, in model order, whose values on this rank are not all finite.
std::optional<NonFiniteOrigin> bad_parameter(const RankLayout& layout, const ModelStages& model);
// The same for gradients.
std::optional<NonFiniteOrigin> bad_gradient(const RankLayout& layout, const ModelStages& model);

// [collective over the world] Returns the earliest finding of all ranks, on every rank; std::nullopt if no
// rank has one.
std::optional<NonFiniteOrigin> earliest(const comm::World& world, const std::optional<NonFiniteOrigin>& own);

// Checks the result of every operator during the microbatches of a step, except in trial runs.
class OperatorWatch final : public Mode {
 public:
  OperatorWatch(const RankLayout& layout, const ModelStages& model);

  // Assigns the following forwards to this run of the schedule, of `runs` in the step.
  void begin_run(std::int64_t run, std::int64_t runs = 1);
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;

  // The earliest finding by microbatch and stage, over all runs.
  const std::optional<NonFiniteOrigin>& found() const { return found_; }

 private:
  struct Seen {          // in a tensor
    bool bad = false;    // NaN or plus infinity
    bool minus = false;  // minus infinity
  };
  static Seen look(const at::Tensor& tensor);
  // Returns the name of the parameter that the tensor is or is a view of; empty if none.
  std::string parameter_name(const at::Tensor& tensor) const;
  void enter(std::int64_t microbatch, std::int64_t stage);
  std::string place_text(const std::string& own_parameter) const;

  std::map<const void*, std::string> parameters_;  // by address of their memory
  std::string replica_;                            // ", replica 1"; empty if there is only one
  int stages_;                                     // of the schedule; as a stage: the loss
  std::int64_t run_ = 0, runs_ = 1;
  std::int64_t microbatch_ = -1, stage_ = -1, order_ = 0;
  std::string last_parameter_;  // last one used by an operator in this forward
  std::optional<NonFiniteOrigin> found_;
};

}  // namespace penstock::train
