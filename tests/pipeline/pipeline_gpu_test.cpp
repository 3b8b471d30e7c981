// Pipelines on a GPU: all stages on one rank, every schedule that allows it, equal to a plain loop on the same device.
#include <gtest/gtest.h>

#include "penstock/pipeline/schedules.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Block;

constexpr int kMicrobatches = 6;

TEST(PipelineOnAGpu, EverySchedule) {
  const at::Device device(at::kCUDA, 0);
  for (const ScheduleKind kind : schedule::all_schedule_kinds()) {
    if (kind == ScheduleKind::DualPipe) continue;  // needs two ranks
    SCOPED_TRACE(schedule::to_text(kind));
    const int stages = schedule::required_stages_per_rank(kind).value_or(3);
    comm::run_ranks(1, 60s, [&](comm::World& world) {
      std::vector<Block> blocks, copies;
      std::vector<PipelineStage> all;
      for (int i = 0; i < stages; ++i) {
        blocks.emplace_back(i);
        copies.emplace_back(i);
        blocks.back()->to(device);
        copies.back()->to(device);
        all.emplace_back(StageModule(blocks.back()), i, stages, device);
      }
      PipelineRuntime pipeline(all, schedule::generate(kind, {.ranks = 1, .stages_per_rank = stages, .microbatches = kMicrobatches, .group_size = {}}), test::square_loss(), {world});
      const test::Batch batch = test::plain_batch(0, 2 * kMicrobatches + 1);
      const at::Tensor x = batch.args[0].tensor().to(device), target = batch.target.tensor().to(device);
      const StepResult result = pipeline.step(Tree::tuple({x}), {}, target);
      const StepResult evaluated = pipeline.eval(Tree::tuple({x}), {}, target);
      const std::vector<Tree> xs = split_tree(x, kMicrobatches), targets = split_tree(target, kMicrobatches);
      for (std::size_t m = 0; m < xs.size(); ++m) {
        at::Tensor y = xs[m].tensor();
        for (Block& copy : copies) y = copy->forward(y);
        const at::Tensor loss = test::square_loss()(y, targets[m]);
        EXPECT_TRUE(at::allclose(result.losses[m], loss, 1e-5, 1e-6));
        EXPECT_TRUE(at::allclose(evaluated.losses[m], loss, 1e-5, 1e-6));
        loss.backward();
      }
      for (int i = 0; i < stages; ++i) {
        const auto ours = blocks[static_cast<std::size_t>(i)]->parameters(), plain = copies[static_cast<std::size_t>(i)]->parameters();
        for (std::size_t k = 0; k < ours.size(); ++k) EXPECT_TRUE(at::allclose(ours[k].grad(), plain[k].grad() / kMicrobatches, 1e-4, 1e-6)) << "stage " << i << ", parameter " << k;
      }
      EXPECT_TRUE(result.output->tensor().is_cuda());
    });
  }
}

}  // namespace
}  // namespace penstock
