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
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "penstock/comm/group.h"
#include "penstock/pipeline/pipeline_loss.h"
#include "penstock/pipeline/stage.h"
#include "penstock/schedule/placement.h"
#include "penstock/torch/stage_meta.h"

namespace penstock::pipeline {

// Of one stage and one kind of microbatch.
struct StagePlan {
  StageMeta meta;               // gradients only where the step has a backward
  std::size_t main_inputs = 0;  // those before the skip tensors
  std::size_t main_outputs = 0;
  bool announced_inputs = false;   // shapes travel ahead of each transfer
  bool announced_outputs = false;
};
// By stage index; stages of this rank that run the microbatch.
using MicrobatchPlan = std::map<int, StagePlan>;

struct StepDescription {
  bool has_backward = false;
  // One of each per microbatch; args and targets are None where this rank has no first or last stage.
  std::vector<Tree> args, kwargs, targets;
  std::size_t microbatches() const { return args.size(); }
};

class StagePlanner {
 public:
  // `control` is null-like in a pipeline of one rank. `ranks` are the global ranks of the pipeline, in its order.
  StagePlanner(std::vector<PipelineStage> stages, schedule::StageMap map, std::vector<SkipTensor> skips, PipelineLoss loss,
               comm::Group control, std::vector<int> ranks, int own);

  // One plan per microbatch. Collective over the pipeline. Throws PipeliningMetadataError, on every rank, for ranks that do
  // different things.
  std::vector<std::shared_ptr<const MicrobatchPlan>> agree(const StepDescription& step);

  // Trial runs made so far, for tests and reports.
  int trials() const { return trials_; }
  // Whether the last negotiation was static.
  bool is_static() const { return static_; }

 private:
  struct Negotiation;
  std::uint64_t hash_of(const StepDescription& step, std::size_t microbatch) const;
  std::vector<std::vector<std::int64_t>> gather(const std::vector<std::int64_t>& row);
  std::shared_ptr<const MicrobatchPlan> negotiate(const StepDescription& step, std::size_t microbatch);

  std::vector<PipelineStage> stages_;  // of this rank, ascending
  schedule::StageMap map_;
  std::vector<SkipTensor> skips_;
  PipelineLoss loss_;
  comm::Group control_;
  std::vector<int> ranks_;
  int own_;
  bool static_ = false;
  int trials_ = 0;
  std::unordered_map<std::uint64_t, std::vector<std::shared_ptr<const MicrobatchPlan>>> steps_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const MicrobatchPlan>> plans_;
};

}  // namespace penstock::pipeline
