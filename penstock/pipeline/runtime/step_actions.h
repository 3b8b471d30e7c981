// Implements the instructions of a program: forwards and backwards on the stages of this rank, transfers over
// the groups of the pipeline.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "penstock/pipeline/contract/stage_meta.h"
#include "penstock/pipeline/infer/stage_plan.h"
#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/runtime/border_codec.h"
#include "penstock/pipeline/runtime/channel_groups.h"
#include "penstock/pipeline/runtime/overlap_streams.h"
#include "penstock/pipeline/runtime/overlapped_halves.h"
#include "penstock/pipeline/runtime/stage_runner.h"
#include "penstock/pipeline/runtime/transfer_log.h"

namespace penstock {

// How units of several actions run.
struct UnitOptions {
  bool any = false;  // the program has such units: on CUDA, forward and backward run on two streams
  // One computes while the other waits for an exchange with other ranks (overlapped_halves.h).
  bool overlap_exchanges = false;
};

class TorchStepActions final : public StepActions {
 public:
  TorchStepActions(std::vector<StageRunner>& runners, const ChannelGroups& groups,
                   std::vector<SkipTensor> skips, UnitOptions units, BorderOptions borders = {});

  // Prepares the next step. `reduce` is called where the schedule completes the gradients of a stage.
  void begin(const StepDescription& step, const std::vector<std::shared_ptr<const MicrobatchPlan>>& plans,
             StepContext context, std::function<void(int stage)> reduce);
  // Releases everything a step left, including an aborted one.
  void clear();
  // Highest number of microbatches in flight, summed over this rank's stages.
  int peak_live() const { return peak_live_; }
  // What was sent in the step.
  BorderReport border_report() const { return codec_.report(); }
  // Number of overlapped units of the step whose forward and backward ran on two streams.
  int units_on_two_streams() const { return units_on_two_streams_; }
  // Number of exchanges of the step during which the other half of their unit computed.
  int overlapped_exchanges() const {
    return halves_ ? halves_->overlapped_exchanges() - earlier_exchanges_ : 0;
  }

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
    std::vector<at::Tensor> tensors;  // undefined where no gradient is sent
    OptionalTensorMetas announced;    // empty if the channel is not announced
    // Where BorderCodec changes what is sent: the message, and the record of the tensor; otherwise undefined.
    std::vector<std::pair<at::Tensor, TensorMeta>> messages;
    std::vector<comm::Work> works;
    at::Tensor announcement;
    bool started = false;  // its receives are posted
  };
  // What a channel carries for a microbatch, according to the plan of its receiver or its sender.
  struct Agreed {
    const StagePlan* plan = nullptr;
    bool forward = true;
    bool outputs = true;  // outputs of the stage, or their gradients; else its inputs, or their gradients
    Span span;
    bool announced = false;  // and not empty
    // The record of a tensor of the span; null if no gradient is sent.
    const TensorMeta* meta(std::size_t i) const;
    // Whether its shape may change each time.
    bool varies(std::size_t i) const {
      return outputs ? plan->varies_output(span.first + i) : plan->varies_input(span.first + i);
    }
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
  struct UnitParts;
  // Forwards and backwards as two halves.
  void run_halves(UnitParts& parts);
  // Returns the stream on which an action of a unit runs; for a forward, chooses it.
  std::optional<c10::Stream> stream_for(const schedule::Action& action,
                                        const std::optional<c10::Stream>& of_backward);
  void start_receive(Arrival& arrival, const Instruction& instruction, const Channel& channel,
                     int microbatch);
  void receive(Arrival& arrival, at::Tensor tensor, const Channel& channel, int tag,
               const std::string& label);
  void reap();
  // Frees the output that a gradient which has arrived belongs to.
  void free_answered(const Channel& gradient, int microbatch);
  void count_live();

  std::vector<StageRunner>& runners_;
  const ChannelGroups& groups_;
  std::vector<SkipTensor> skips_;
  BorderCodec codec_;
  std::map<int, StageRunner*> by_stage_;

  const StepDescription* step_ = nullptr;
  std::vector<std::shared_ptr<const MicrobatchPlan>> plans_;
  StepContext context_;
  std::function<void(int)> reduce_;
  std::map<std::pair<int, int>, Arrival> arrivals_;   // by channel and microbatch
  std::map<int, std::deque<int>> waiting_for_sizes_;  // by channel: announced microbatches
  std::deque<comm::Work> sends_;
  // Sends of outputs, by sending and receiving stage, skip connection and microbatch, until their gradients
  // arrive.
  std::map<std::tuple<int, int, int, int>, std::vector<comm::Work>> unanswered_;
  int peak_live_ = 0;
  std::optional<OverlapStreams> streams_;
  int units_on_two_streams_ = 0;
  std::unique_ptr<OverlappedHalves> halves_;  // null: the members of a unit take turns block by block
  int earlier_exchanges_ = 0;                 // overlapped ones before this step
  std::vector<UnitPiece> pieces_;             // of the last unit; on CUDA the times of enqueueing the work
  TransferLog transfer_log_;
};

}  // namespace penstock
