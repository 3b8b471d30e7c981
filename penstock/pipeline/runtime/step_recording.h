// Records and replays the training steps of a pipeline on one CUDA device, for PipelineOptions::device_graph.
//
//   StepRecording recording(stages, [&](args, kwargs, target) { return run_on_host(...); });
//   result = recording.step(args, kwargs, target);        // runs on the host, records, or replays
//
// There is one recording for each kind of arguments: structure, shapes, strides, dtypes and plain values. It
// remains valid as long as the addresses of parameters and buffers, and which parameters require gradients,
// do not change; otherwise it is made again.
//
// Gradients. A recording computes those of one step, starting from none. After a replay, .grad() refers to
// them if it was undefined; otherwise they are added to it, so that steps accumulate as they do without a
// recording.
// Thread safety: that of the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/pipeline.h"
#include "penstock/stage.h"
#include "penstock/torch/compat/device_graph.h"

namespace penstock {

class StepRecording {
 public:
  using Step = std::function<StepResult(const Tree& args, const Tree& kwargs, const Tree& target)>;

  // Throws ValueError if the stages are not all on one CUDA device.
  StepRecording(const std::vector<PipelineStage>& stages, Step step);

  // Throws ValueError for arguments that cannot be recorded: tensors on other devices, tensors that require
  // gradients, objects. `constants` is any other host value used by the step: another value gets another
  // recording.
  StepResult step(const Tree& args, const Tree& kwargs, const Tree& target, double constants);

  bool last_was_replayed() const { return replayed_; }
  void forget() { kinds_.clear(); }

 private:
  struct Kind {
    std::unique_ptr<DeviceGraph> graph;  // null: not run yet
    bool recorded = false;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> gradients;  // of parameters_, undefined where the step computes none
    std::optional<Tree> output;
    at::Tensor losses;
    std::vector<std::pair<const void*, bool>> state;  // of the model's tensors: address, requires_grad
    std::uint64_t last_use = 0;
  };

  std::vector<std::pair<const void*, bool>> model_state() const;
  Kind& kind_of(const Tree& arguments, double constants);
  void record(Kind& kind, const Tree& arguments);
  StepResult replay(Kind& kind, const std::vector<at::Tensor>& inputs);

  at::Device device_;
  std::vector<at::Tensor> parameters_, buffers_;
  Step step_;
  std::map<std::string, Kind> kinds_;
  std::uint64_t uses_ = 0;
  bool replayed_ = false;
};

}  // namespace penstock
