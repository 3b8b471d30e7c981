// What the instructions of a program mean: forwards and backwards on the stages of this rank, transfers over the groups of the pipeline.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "penstock/pipeline/channel_groups.h"
#include "penstock/pipeline/executor.h"
#include "penstock/pipeline/stage_plan.h"
#include "penstock/pipeline/stage_runner.h"

namespace penstock::pipeline {

class TorchStepActions final : public StepActions {
 public:
  TorchStepActions(std::vector<StageRunner>& runners, const ChannelGroups& groups, std::vector<SkipTensor> skips);

  // Of the step that follows. `reduce` is called where the schedule finishes the gradients of a stage.
  void begin(const StepDescription& step, const std::vector<std::shared_ptr<const MicrobatchPlan>>& plans, StepContext context,
             std::function<void(int stage)> reduce);
  // Lets go of what a step left, one that was given up too.
  void clear();
  // Highest number of microbatches in flight on this rank's stages together.
  int peak_live() const { return peak_live_; }

  void compute(std::span<const Instruction> unit) override;
  void post(const Instruction& instruction, const Channel& channel) override;
  void await(const Instruction& instruction, const Channel& channel) override;
  void send(const Instruction& instruction, const Channel& channel) override;
  void pass(const Instruction& instruction, const Channel& channel) override;
  void stage_wide(const Instruction& instruction) override;
  void finish() override;

 private:
  // Which tensors of a stage's inputs (or outputs) a channel carries.
  struct Span {
    std::size_t first = 0;
    std::size_t count = 0;
  };
  struct Arrival {
    std::vector<at::Tensor> tensors;  // undefined where no gradient comes
    std::vector<comm::Work> works;
    at::Tensor announcement;
  };

  StageRunner& runner(int stage);
  const StagePlan& plan(int stage, int microbatch) const;
  Span received_by(const Channel& channel, const StagePlan& plan) const;
  Span sent_by(const Channel& channel, const StagePlan& plan) const;
  std::size_t skip_ordinal(int skip, int stage, bool from) const;
  StepContext context_of(const schedule::Action& action) const;
  void run_alone(const schedule::Action& action);
  void start_receive(Arrival& arrival, const Channel& channel, int microbatch, const std::string& label);
  at::Tensor buffer(const TensorMeta& meta, const PipelineStage& stage, const std::vector<std::int64_t>* sizes) const;
  void receive(Arrival& arrival, at::Tensor tensor, const Channel& channel, int tag, const std::string& label);
  void reap();
  void count_live();

  std::vector<StageRunner>& runners_;
  const ChannelGroups& groups_;
  std::vector<SkipTensor> skips_;
  std::map<int, StageRunner*> by_stage_;

  const StepDescription* step_ = nullptr;
  std::vector<std::shared_ptr<const MicrobatchPlan>> plans_;
  StepContext context_;
  std::function<void(int)> reduce_;
  std::map<std::pair<int, int>, Arrival> arrivals_;         // by channel and microbatch
  std::map<int, std::deque<int>> waiting_for_sizes_;        // by channel: microbatches whose receive cannot be posted yet
  std::deque<comm::Work> sends_;
  int peak_live_ = 0;
};

}  // namespace penstock::pipeline
