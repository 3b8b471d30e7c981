// What all ranks of a pipeline have agreed on about the tensors of one microbatch, and how they come to agree.
//
// Every step begins with one small exchange: each rank says whether it runs backward, how many microbatches it has, whether its
// stages would do without a trial run (the vote), and everything that its stages' outputs may depend on: what the arguments, keyword
// arguments and targets of its microbatches are like, and in what state its modules are (a hash, plan_key.h). Ranks that contradict each other fail together, before anything is sent. Where a combination has not been seen
// before, the stages negotiate: each one tells the next what it will send, in the order of the stages, then each tells the one before
// which gradients it will send back. What was negotiated is kept, so that a step with known shapes costs one exchange and batches of
// any shape, uneven ones too, work from their first time on.
//
// The pipeline is static when all stages vote for it: examples are then taken at their word and only compared between neighbours. Else
// every stage makes a trial run.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "penstock/group.h"
#include "penstock/pipeline/stage/pipeline_loss.h"
#include "penstock/stage.h"
#include "penstock/stage_placement.h"
#include "penstock/pipeline/contract/stage_meta.h"

namespace penstock::pipeline {

// Of one stage and one kind of microbatch.
struct StagePlan {
  StageMeta meta;               // gradients only where the step has a backward
  std::size_t main_inputs = 0;  // those before the skip tensors
  std::size_t main_outputs = 0;
  // By tensor: its shape may be another one each time. All tensors of a channel (the neighbour's, or one skip connection) agree.
  std::vector<bool> varying_inputs, varying_outputs;
  // Some stage of the pipeline validates: every transfer is compared with what was agreed on.
  bool checked = false;

  // Whether what is sent is told ahead of each transfer, tensor by tensor. Its gradient is announced where the tensor is.
  bool announces_input(std::size_t i) const { return checked || varies_input(i); }
  bool announces_output(std::size_t i) const { return checked || varies_output(i); }
  bool varies_input(std::size_t i) const { return i < varying_inputs.size() && varying_inputs[i]; }
  bool varies_output(std::size_t i) const { return i < varying_outputs.size() && varying_outputs[i]; }
};
// By stage index; stages of this rank that run the microbatch.
using MicrobatchPlan = std::map<int, StagePlan>;

struct StepDescription {
  bool has_backward = false;
  // Why this rank cannot run the step, found before it talked to anybody; null where it can. The rest counts for nothing then.
  std::exception_ptr refusal = nullptr;
  // One of each per microbatch; args and targets are None where this rank has no first or last stage.
  std::vector<Tree> args, kwargs, targets;
  std::size_t microbatches() const { return args.size(); }
};

// A step that ended before any of its data was sent, on all ranks of the pipeline alike: the pipeline can go on. `error` is this
// rank's own, or a ValueError that names the rank that refused and quotes it.
struct StepRefusal {
  std::exception_ptr error;
};

class StagePlanner {
 public:
  // `control` is null-like in a pipeline of one rank. `ranks` are the global ranks of the pipeline, in its order.
  StagePlanner(std::vector<PipelineStage> stages, schedule::StageMap map, std::vector<SkipTensor> skips, PipelineLoss loss,
               comm::Group control, std::vector<int> ranks, int own);

  // One plan per microbatch. Collective over the pipeline. Throws StepRefusal, on every rank, where one of them has a refusal or ranks
  // do different things (PipeliningMetadataError); any other exception leaves other ranks waiting.
  std::vector<std::shared_ptr<const MicrobatchPlan>> agree(const StepDescription& step);

  // Trial runs made so far, for tests and reports.
  int trials() const { return trials_; }
  // Whether the last negotiation was static.
  bool is_static() const { return static_; }

 private:
  struct Negotiation;
  std::uint64_t hash_of(const StepDescription& step, std::size_t microbatch) const;
  std::vector<std::vector<std::int64_t>> gather(const std::vector<std::int64_t>& row);
  [[noreturn]] void refuse(const std::vector<std::vector<std::int64_t>>& rows, const std::exception_ptr& own);
  std::shared_ptr<const MicrobatchPlan> negotiate(const StepDescription& step, std::size_t microbatch);

  std::vector<PipelineStage> stages_;  // of this rank, ascending
  schedule::StageMap map_;
  std::vector<SkipTensor> skips_;
  PipelineLoss loss_;
  comm::Group control_;
  std::vector<int> ranks_;
  int own_;
  bool static_ = false;
  bool validates_;        // a stage of this rank does
  bool checked_ = false;  // one of the pipeline does
  int trials_ = 0;
  std::unordered_map<std::uint64_t, std::vector<std::shared_ptr<const MicrobatchPlan>>> steps_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const MicrobatchPlan>> plans_;
};

}  // namespace penstock::pipeline
