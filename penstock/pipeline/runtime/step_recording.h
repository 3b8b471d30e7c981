// Training steps of a pipeline on one CUDA device, recorded and replayed: what PipelineOptions::device_graph turns on.
//
//   StepRecording recording(stages, [&](args, kwargs, target) { return run_by_the_host(...); });
//   result = recording.step(args, kwargs, target);        // the host's, recorded, or replayed, as fits
//
// One recording for each kind of arguments: structure, shapes, strides, dtypes and plain values. Beside it must be as they were: the
// addresses of parameters and buffers, and which parameters require gradients; else it is made anew.
//
// Gradients. A recording writes those of one step, beginning from none. After a replay they are where .grad() shows them if it was
// undefined, and are added to it otherwise, so that steps accumulate as they do without a recording.
// Thread rule: that of the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/stage.h"
#include "penstock/pipeline/runtime/step_result.h"
#include "penstock/torch/compat/device_graph.h"

namespace penstock::pipeline {

class StepRecording {
 public:
  using Step = std::function<StepResult(const Tree& args, const Tree& kwargs, const Tree& target)>;

  // ValueError for stages on other devices than one CUDA device.
  StepRecording(const std::vector<PipelineStage>& stages, Step step);

  // Throws ValueError for arguments that cannot be put into a recording: tensors that are elsewhere or require gradients, objects.
  // `constants` is what else the host puts into the step: another value is another recording.
  StepResult step(const Tree& args, const Tree& kwargs, const Tree& target, double constants);

  bool last_was_replayed() const { return replayed_; }
  void forget() { kinds_.clear(); }

 private:
  struct Kind {
    std::unique_ptr<DeviceGraph> graph;  // null: seen, but not yet run
    bool recorded = false;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> gradients;  // of parameters_, undefined where the step has none
    std::optional<Tree> output;
    at::Tensor losses;
    std::vector<std::pair<const void*, bool>> state;  // of the model's tensors: where, and whether with gradients
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

}  // namespace penstock::pipeline
