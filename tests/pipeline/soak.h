// Steps with random schedules over the same parameters, each compared with one process. For worlds of threads
// and of processes.
#pragma once

#include <fmt/format.h>

#include <map>
#include <memory>
#include <random>
#include <string>

#include "penstock/pipeline.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock::test {

// Returns what went wrong, or "". Every rank draws the same numbers.
inline std::string soak(comm::World& world, int steps, unsigned seed) {
  std::mt19937 random(seed);
  const auto kinds = schedule::all_schedule_kinds();
  std::map<int, std::unique_ptr<PipelineRuntime>> pipelines;  // by kind, created on first use
  std::map<int, std::vector<PipelineStage>> stages_of;
  for (int step = 0; step < steps; ++step) {
    const int which = static_cast<int>(random() % kinds.size());
    const auto kind = kinds[static_cast<std::size_t>(which)];
    const int per_rank = schedule::required_stages_per_rank(kind).value_or(2);
    const int count = per_rank * world.size(), microbatches = 2 * world.size();
    const int parts = kind == schedule::ScheduleKind::DualPipe ? world.size() : count;
    const int rows = microbatches + static_cast<int>(random() % 7);
    const bool evaluate = random() % 5 == 0;
    const std::string where = fmt::format("step {}, {}, {} rows{}", step, schedule::to_text(kind), rows,
                                          evaluate ? ", evaluation" : "");
    if (!pipelines.contains(which)) {
      const schedule::Schedule order = schedule::generate(kind, {.ranks = world.size(),
                                                                 .stages_per_rank = per_rank,
                                                                 .microbatches = microbatches,
                                                                 .group_size = {}});
      for (const int index : order.stages().stages_of(world.rank()))
        stages_of[which].emplace_back(two_blocks(index % parts), index, count, at::kCPU);
      pipelines[which] =
          std::make_unique<PipelineRuntime>(stages_of[which], order, square_loss(), PipelineOptions{world});
    }
    PipelineRuntime& pipeline = *pipelines[which];
    for (const PipelineStage& stage : stages_of[which])
      for (const at::Tensor& parameter : stage.parameters()) parameter.mutable_grad() = at::Tensor();
    const Batch batch = plain_batch(step, rows);
    const StepResult result =
        evaluate ? pipeline.eval(batch.args, {}, batch.target) : pipeline.step(batch.args, {}, batch.target);

    std::vector<StageModule> model;
    for (int i = 0; i < parts; ++i) model.push_back(two_blocks(i));
    const std::vector<Tree> xs = split_tree(batch.args[0], microbatches),
                            targets = split_tree(batch.target, microbatches);
    std::vector<at::Tensor> losses;
    for (std::size_t m = 0; m < xs.size(); ++m) {
      Tree value = Tree::tuple({xs[m]});
      for (const StageModule& part : model) value = Tree::tuple({part.forward(value, {})});
      const at::Tensor loss = square_loss()(value[0], targets[m]);
      losses.push_back(loss.detach());
      if (!evaluate) (loss / microbatches).backward();
    }
    if (!result.losses.empty()) {
      // In a bidirectional pipeline the two halves of the microbatches end on two ranks.
      const std::size_t first =
          result.losses.size() < losses.size() && world.rank() == 0 ? losses.size() / 2 : 0;
      for (std::size_t i = 0; i < result.losses.size(); ++i)
        if (!result.losses[i].equal(losses[first + i])) return where + ": loss differs";
    }
    for (const PipelineStage& stage : stages_of[which]) {
      const auto parameters = stage.parameters(),
                 wanted = model[static_cast<std::size_t>(stage.index() % parts)].parameters();
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (evaluate ? parameters[i].grad().defined()
                     : !at::allclose(parameters[i].grad(), wanted[i].grad(), 1e-4, 1e-6))
          return fmt::format("{}: gradient {} of stage {} differs", where, i, stage.index());
      }
    }
  }
  return "";
}

}  // namespace penstock::test
