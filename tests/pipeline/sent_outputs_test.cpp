// The output of a stage is freed once it has been sent, unless its own graph needs it, in every schedule: at
// the backward of a microbatch its memory is gone. The graph stays.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <map>
#include <vector>

#include "penstock/generators.h"
#include "penstock/pipeline.h"
#include "penstock/recompute.h"
#include "penstock/step_context.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace sent_outputs_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Adds to its input, so that no node saves the output.
struct AddedImpl : torch::nn::Module {
  explicit AddedImpl(bool recomputes) : recomputes(recomputes) {
    weight = register_parameter("weight", at::eye(test::kWidth) * 0.5);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto add = [w = weight](const std::vector<at::Tensor>& in) {
      return in[0] + at::linear(in[0], w).tanh().mm(w);
    };
    const at::Tensor y = recomputes ? recompute(add, {x}) : add({x});
    const auto context = StepContext::current();
    if (context->trial || !y.requires_grad()) return y;
    const std::int64_t microbatch = *context->microbatch;
    outputs.insert_or_assign(microbatch, y.storage().getWeakStorageImpl());
    y.register_hook([this, microbatch](const at::Tensor&) {
      ++backwards;
      alive += outputs.at(microbatch).expired() ? 0 : 1;
    });
    return y;
  }

  bool recomputes;
  at::Tensor weight;
  std::map<std::int64_t, WeakStorage> outputs;
  int backwards = 0, alive = 0;
};
TORCH_MODULE(Added);

void check_freed(ScheduleKind kind, bool recomputes) {
  SCOPED_TRACE(schedule::to_text(kind));
  constexpr int kMicrobatches = 6;
  comm::run_ranks(2, 30s, [&](comm::World& world) {
    const bool loops = kind == ScheduleKind::Interleaved1F1B || kind == ScheduleKind::LoopedBFS ||
                       kind == ScheduleKind::InterleavedZeroBubble;
    const int each = schedule::required_stages_per_rank(kind).value_or(loops ? 2 : 1), count = 2 * each;
    const schedule::Schedule whole = schedule::generate(
        kind, {.ranks = 2, .stages_per_rank = each, .microbatches = kMicrobatches, .group_size = {}});
    std::vector<Added> modules;
    std::vector<PipelineStage> stages;
    for (const int index : whole.stages().stages_of(world.rank())) {
      modules.emplace_back(recomputes);
      stages.emplace_back(StageModule(modules.back()), index, count, at::kCPU);
    }
    PipelineRuntime pipeline(stages, whole, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 2 * kMicrobatches);
    pipeline.step(batch.args, {}, batch.target);
    for (std::size_t i = 0; i < modules.size(); ++i) {
      const int stage = stages[i].index();
      EXPECT_EQ(modules[i]->backwards, kMicrobatches) << "stage " << stage;
      // The next stage on the same rank uses the output itself.
      const bool is_sent = stage + 1 < count && whole.stages().rank_of(stage + 1) != world.rank();
      EXPECT_TRUE(!is_sent || modules[i]->alive == 0) << "stage " << stage << ": " << modules[i]->alive;
    }
  });
}

TEST(SentOutputs, AreFreedInEverySchedule) {
  for (const ScheduleKind kind :
       {ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::Interleaved1F1B, ScheduleKind::LoopedBFS,
        ScheduleKind::InterleavedZeroBubble, ScheduleKind::ZB2P, ScheduleKind::ZBVZeroBubble,
        ScheduleKind::VHalf, ScheduleKind::VMin, ScheduleKind::DualPipeV})
    check_freed(kind, false);
}

// The part that runs again keeps its input, not its output.
TEST(SentOutputs, AreFreedWhereActivationsAreRecomputed) {
  for (const ScheduleKind kind :
       {ScheduleKind::OneFOneB, ScheduleKind::ZBVZeroBubble, ScheduleKind::DualPipeV})
    check_freed(kind, true);
}

}  // namespace sent_outputs_test
}  // namespace penstock
