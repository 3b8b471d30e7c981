// What the instructions of a program mean: forwards and backwards on the stages of this rank, transfers over the groups of the pipeline.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "penstock/pipeline/runtime/channel_groups.h"
#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/runtime/overlap_streams.h"
#include "penstock/pipeline/infer/stage_plan.h"
#include "penstock/pipeline/runtime/stage_runner.h"
#include "penstock/pipeline/runtime/transfer_log.h"

namespace penstock::pipeline {

class TorchStepActions final : public StepActions {
 public:
  // `overlaps`: the program has units of several actions. On CUDA their halves then run on two streams.
  TorchStepActions(std::vector<StageRunner>& runners, const ChannelGroups& groups, std::vector<SkipTensor> skips, bool overlaps);

  // Of the step that follows. `reduce` is called where the schedule finishes the gradients of a stage.
  void begin(const StepDescription& step, const std::vector<std::shared_ptr<const MicrobatchPlan>>& plans, StepContext context,
             std::function<void(int stage)> reduce);
  // Lets go of what a step left, one that was given up too.
  void clear();
  // Highest number of microbatches in flight on this rank's stages together.
  int peak_live() const { return peak_live_; }
  // Overlapped units of the step whose forward and backward ran on two streams.
  int units_on_two_streams() const { return units_on_two_streams_; }

  void compute(std::span<const Instruction> unit) override;
  std::vector<UnitPiece> pieces() const override { return pieces_; }
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
    OptionalTensorMetas announced;    // empty where the channel is not announced
    std::vector<comm::Work> works;
    at::Tensor announcement;
    bool started = false;             // its receives are posted
  };
  // What a channel carries of a microbatch, as its receiver or its sender has agreed to.
  struct Agreed {
    const StagePlan* plan = nullptr;
    bool forward = true;
    bool outputs = true;     // of the stage, or their gradients; else its inputs, or theirs
    Span span;
    bool announced = false;  // and not empty
    // Of a tensor of the span; null where no gradient comes.
    const TensorMeta* meta(std::size_t i) const;
    // Its shape may be another one each time.
    bool varies(std::size_t i) const { return outputs ? plan->varies_output(span.first + i) : plan->varies_input(span.first + i); }
    bool needs_grad(std::size_t i) const { return forward && requires_grad(*meta(i)); }
  };

  StageRunner& runner(int stage);
  const StagePlan& plan(int stage, int microbatch) const;
  Span received_by(const Channel& channel, const StagePlan& plan) const;
  Span sent_by(const Channel& channel, const StagePlan& plan) const;
  Agreed agreed_by(const Channel& channel, int microbatch, bool sends) const;
  std::size_t skip_ordinal(int skip, int stage, bool from) const;
  StepContext context_of(const schedule::Action& action) const;
  void run_alone(const schedule::Action& action);
  void run_action(const schedule::Action& action);
  void run_unit(std::span<const Instruction> unit);
  template <class Body>
  void timed_piece(int member, const Body& body);
  // The stream on which an action of a unit runs, chosen now if it is a forward.
  std::optional<c10::Stream> stream_for(const schedule::Action& action, const std::optional<c10::Stream>& of_backward);
  void start_receive(Arrival& arrival, const Instruction& instruction, const Channel& channel, int microbatch);
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
  std::map<int, std::deque<int>> waiting_for_sizes_;        // by channel: microbatches that are announced and not yet received
  std::deque<comm::Work> sends_;
  int peak_live_ = 0;
  std::optional<OverlapStreams> streams_;
  int units_on_two_streams_ = 0;
  std::vector<UnitPiece> pieces_;  // of the last unit; on CUDA the times in which the host gave the work away
  TransferLog transfer_log_;
};

}  // namespace penstock::pipeline
