// A training job that is saved after every step and continues in another layout: each step, and the
// parameters at the end, are those of one process that was never interrupted.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace moving_job_test {

using namespace penstock::test;

// Whatever a checkpoint could have to move: parameters of several stages, experts of several ranks, biases of
// routers that are not trained, moments of the optimizer.
const Options kEverything =
    with(hybrid_blocks(),
         {"--router_z_weight", "0.1",     "--router_bias_rate",    "0.002", "--depth_layers",      "1,2",
          "--relations",       "3",       "--multi_token_depth",   "1",     "--multi_token_block", "E",
          "--data.structure",  "cpp",     "--structure_embedding", "true",  "--tie_head",          "true",
          "--decay",           "constant"});

struct Place {
  Layout layout;
  Options options = {};
};

TEST(MovingJob, EveryStepInAnotherLayout) {
  const std::vector<Place> places{
      {{.name = "pp4", .pp = 4}},
      {{.name = "DualPipe", .pp = 2, .virtual_stages = 2, .schedule = "DualPipe"}},
      {{.name = "pp2 shard2", .pp = 2, .dp = 2, .microbatch_size = 1}, {"--shard", "2"}},
      {{.name = "ep2", .dp = 2, .microbatch_size = 1}, {"--ep", "2"}},
      {{.name = "tp2", .tp = 2}},
      {{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"}, {"--recompute", "block"}},
      {{.name = "pp2 tp2", .pp = 2, .tp = 2}},
      {{.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV"},
       {"--recompute", "experts"}},
      {{.name = "shard2 ep2", .dp = 2, .microbatch_size = 1}, {"--shard", "2", "--ep", "2"}},
      {{.name = "VHalf", .pp = 2, .virtual_stages = 2, .schedule = "VHalf"}},
  };
  const int count = static_cast<int>(places.size());
  TrainedJob one = train_job({.name = "one"}, kEverything, {.steps = count, .keeps = {.parameters = true}});
  std::vector<ScratchFolder> folders(places.size());
  TrainedJob moved;
  for (int step = 1; step <= count; ++step) {
    const auto i = static_cast<std::size_t>(step - 1);
    SCOPED_TRACE(places[i].layout.name);
    TrainedJob next = train_job(places[i].layout, with(kEverything, places[i].options),
                                {.steps = step,
                                 .from = step == 1 ? nullptr : &folders[i - 1],
                                 .to = &folders[i],
                                 .keeps = {.parameters = step == count}});
    ASSERT_EQ(next.steps.size(), 1u);
    const StepOutcome &ours = next.steps[0], &theirs = one.steps[i];
    ASSERT_EQ(ours.auxiliary.size(), theirs.auxiliary.size());
    for (std::size_t term = 0; term < theirs.auxiliary.size(); ++term)
      EXPECT_NEAR(ours.auxiliary[term].value, theirs.auxiliary[term].value,
                  1e-4 * theirs.auxiliary[term].value)
          << theirs.auxiliary[term].name;
    next.steps.insert(next.steps.begin(), moved.steps.begin(), moved.steps.end());
    moved = std::move(next);
  }
  expect_near_steps(moved, one, 1e-4, 1e-3);
  // AdamW divides a gradient by its size. Those of relations are near zero: rounding is a visible part of an
  // update.
  const auto relations = [](TrainedJob& job) {
    NamedTensors found;
    found.insert(job.parameters.extract("relations.weight"));
    return found;
  };
  expect_near_tensors(relations(moved), relations(one), 2e-2);
  expect_near_tensors(moved.parameters, one.parameters, 5e-3);
  EXPECT_EQ(one.buffers.size(), 3u);
  expect_equal_tensors(moved.buffers, one.buffers);
}

}  // namespace moving_job_test
}  // namespace penstock::train
