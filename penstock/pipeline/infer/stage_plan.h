// The agreement of all ranks of a pipeline about the tensors of one microbatch, and how they reach it.
//
// Every step begins with one small exchange. Each rank sends whether it runs backward, its number of
// microbatches, whether its stages can do without a trial run (the vote), and a hash (plan_key.h) of
// everything that its stages' outputs may depend on: the records of the arguments, keyword arguments and
// targets of its microbatches, and the state of its modules. Ranks that contradict each other fail together,
// before anything is sent. For a combination not seen before, the stages negotiate: in stage order, each
// tells the next one what it will send; then, in reverse order, each tells the previous one which gradients
// it will send back. Results are cached, so that a step with known shapes costs one exchange, and batches of
// any shape, including uneven ones, work the first time.
//
// The pipeline is static if all stages vote for it: their examples are then trusted and only compared between
// neighbours. Otherwise every stage makes a trial run.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "penstock/group.h"
#include "penstock/pipeline/contract/stage_meta.h"
#include "penstock/stage.h"
#include "penstock/stage_module.h"
#include "penstock/stage_placement.h"

namespace penstock {

// The plan for one stage and one kind of microbatch.
struct StagePlan {
  StageMeta meta;               // gradients only if the step has a backward
  std::size_t main_inputs = 0;  // without the skip tensors, which follow
  std::size_t main_outputs = 0;
  // By tensor: whether its shape may change each time. All tensors of a channel (the neighbour's, or one skip
  // connection) agree.
  std::vector<bool> varying_inputs, varying_outputs;
  // Whether some stage of the pipeline validates: every transfer is then compared with the plan.
  bool checked = false;

  // Return whether the record of the tensor is sent ahead of each transfer. The gradient of an announced
  // tensor is announced as well.
  bool announces_input(std::size_t i) const { return checked || varies_input(i); }
  bool announces_output(std::size_t i) const { return checked || varies_output(i); }
  bool varies_input(std::size_t i) const { return i < varying_inputs.size() && varying_inputs[i]; }
  bool varies_output(std::size_t i) const { return i < varying_outputs.size() && varying_outputs[i]; }
};
// By stage index; only stages of this rank that run the microbatch.
using MicrobatchPlan = std::map<int, StagePlan>;

struct StepDescription {
  bool has_backward = false;
  // Why this rank cannot run the step, found before any communication; null if it can. If set, the other
  // fields are ignored.
  std::exception_ptr refusal = nullptr;
  // One entry per microbatch; args and targets are None if this rank has no first or last stage.
  std::vector<Tree> args, kwargs, targets;
  std::size_t microbatches() const { return args.size(); }
};

// Thrown for a step that ended on all ranks of the pipeline before any of its data was sent: the pipeline
// stays usable. `error` is this rank's own error, or a ValueError that names the rank that refused and quotes
// its error.
struct StepRefusal {
  std::exception_ptr error;
};

class StagePlanner {
 public:
  // `control` is an empty group in a pipeline of one rank. `ranks` are the global ranks of the pipeline, in
  // pipeline order.
  StagePlanner(std::vector<PipelineStage> stages, schedule::StageMap map, std::vector<SkipTensor> skips,
               PipelineLoss loss, comm::Group control, std::vector<int> ranks, int own);

  // Returns one plan per microbatch. Collective over the pipeline. Throws StepRefusal on every rank if one of
  // them has a refusal, or if ranks do different things (PipeliningMetadataError); any other exception leaves
  // other ranks waiting.
  std::vector<std::shared_ptr<const MicrobatchPlan>> agree(const StepDescription& step);

  // Number of trial runs so far, for tests and reports.
  int trials() const { return trials_; }
  // Returns whether the last negotiation was static.
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
  bool validates_;        // a stage of this rank validates
  bool checked_ = false;  // a stage of the pipeline validates
  int trials_ = 0;
  std::unordered_map<std::uint64_t, std::vector<std::shared_ptr<const MicrobatchPlan>>> steps_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const MicrobatchPlan>> plans_;
};

}  // namespace penstock
