#include "penstock/pipeline/runtime/pipe_info.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

constexpr std::size_t kMostQuoted = 200;

bool has_backward(const schedule::Schedule& schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank)
    for (const schedule::Slot slot : schedule.row(rank))
      for (const schedule::Action& action : slot)
        if (schedule::is_compute(action.kind()) && action.kind() != schedule::ActionKind::Forward)
          return true;
  return false;
}

}  // namespace

void check_pipe_info(const PipeInfo& info, const schedule::Schedule& schedule, bool has_loss) {
  const std::string quoted = info.description.size() <= kMostQuoted
                                 ? info.description
                                 : fmt::format("{}...", info.description.substr(0, kMostQuoted));
  const auto refuse = [&](const char* what, const std::string& actual, const std::string& expected,
                          const char* remedy) {
    throw ValueError(
        describe(fmt::format("{} of a pipeline, cut as '{}'", what, quoted), actual, expected, remedy));
  };
  const int parts = schedule.stages().chains().front().stages;
  if (info.stages != parts)
    refuse("stages", fmt::format("{} in the schedule", parts),
           fmt::format("{}, as the model was cut", info.stages),
           "generate the schedule for the number of stages of the model, or cut the model again");
  if (info.has_loss_and_backward && !has_loss)
    refuse("loss", "none", "one, because the model was cut for training", "pass a loss to the pipeline");
  if (info.has_loss_and_backward && !has_backward(schedule))
    refuse("schedule", "only forwards", "one with backwards, because the model was cut for training",
           "use a training schedule; evaluation is eval() of the same pipeline");
  if (!info.has_loss_and_backward && has_loss)
    refuse("loss", "one", "none, because the model was cut without loss and backward",
           "cut the model for training, or pass no loss and call eval()");
}

}  // namespace penstock
