#include "penstock/cli/tensor/captured_model.h"

#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <fstream>
#include <optional>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/printable.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/run/graph_call.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/graph/tools/pass_report.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/train/job/configured_activations.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/process_memory.h"

namespace penstock::cli {
namespace {

std::optional<at::ScalarType> dtype_of(const std::string& precision) {
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  return std::nullopt;
}

}  // namespace

CapturedModel capture_model(const train::TrainConfig& config, bool min_cut, CaptureFor purpose) {
  // Nothing is computed, but the parameters are allocated.
  train::require_memory(train::minimum_memory_of_capture(config), train::machine_memory_bytes());
  const std::shared_ptr<models::TrainableModel> trainable = train::configured_model(config);
  train::check_activation_policy(config, trainable->plan());
  const std::shared_ptr<models::ModelStage> model = trainable->make_stage(whole_model(trainable->plan()));
  const at::Device device = purpose == CaptureFor::Running && config.layout.device == "cuda"
                                ? at::Device(at::kCUDA, 0)
                                : at::Device(at::kCPU);
  if (device.is_cuda()) {
    if (!torch::cuda::is_available())
      throw ConfigError(describe("layout.device", "cuda, and no CUDA device", "a device that is there",
                                 "leave it out to run the kernels on the CPU"));
    model->to(device);
  }
  const graph::ModuleState state(*model);
  graph::Values inputs(state.tensors.begin(), state.tensors.end());
  const at::Tensor tokens =
      at::zeros({config.layout.microbatch_size, config.model.context}, at::dtype(at::kLong).device(device));
  inputs.emplace_back(tokens);
  inputs.emplace_back(at::zeros_like(tokens));
  graph::Convention convention{state.tensors.size(), state.names};
  convention.names.insert(convention.names.end(), {"tokens", "targets"});
  const graph::Function step = [&](const graph::Values& in) -> graph::Values {
    const at::Tensor x = in[state.tensors.size()].toTensor(),
                     targets = in[state.tensors.size() + 1].toTensor();
    const models::StageInputs given =
        trainable->inputs({.tokens = x, .targets = targets, .documents = at::Tensor()});
    at::Tensor output;
    {
      const AutocastScope scope(device.type(), dtype_of(config.training.precision));
      output = model->forward_with(x, given.keywords);
    }
    return {model->loss(output, targets, static_cast<double>(tokens.numel()))};
  };
  graph::AnalyzedCapture captured = graph::analyze_and_capture(step, inputs, {.convention = convention});
  graph::GraphFile file;
  file.meta = std::move(captured.meta);
  file.joint =
      captured.joint ? std::move(*captured.joint) : graph::capture_joint(step, inputs, file.meta, convention);
  file.joint.graph = graph::functionalize(std::move(file.joint.graph), file.joint.forward_outputs);
  graph::remove_dead_nodes(file.joint.graph);
  graph::SplitOptions split(min_cut ? graph::Partitioner::MinCut : graph::Partitioner::Default);
  const train::ModelActivations activations = train::activations_of_whole_model(config);
  split.activations = activations.options;
  graph::check_split(split);
  std::string passes;
  if (purpose != CaptureFor::Reading) {
    graph::PassedGraph passed = graph::with_passes(
        std::move(file.joint), graph::PassList(config.training.disable_passes, /*verify=*/true),
        {.static_inputs = state.tensors.size(), .partitioner = split.partitioner});
    file.joint = std::move(passed.joint);
    passes = std::move(passed.text);
  }
  CapturedModel made;
  try {
    made.halves = graph::split_graph(file.joint, split);
    file.saved = made.halves.saved;
  } catch (const ValueError& error) {
    if (activations.note.empty()) throw;
    throw ValueError(fmt::format("{} ({})", error.what(), activations.note));
  }
  file.signature = graph::make_signature(
      file.joint, file.meta,
      {.state = &state, .loss_index = 0, .hidden_outputs = 0, .in_spec = "(*, *)", .out_spec = "*"});
  if (purpose == CaptureFor::Running) made.inputs = graph::tensors_among(inputs);
  made.file = std::move(file);
  made.passes = std::move(passes);
  return made;
}

std::string title_of(const train::TrainConfig& config) {
  return fmt::format("model {}, one microbatch of {} x {} tokens", config.model.preset,
                     config.layout.microbatch_size, config.model.context);
}

void write_output(const std::string& path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.close();
  if (!out)
    throw ConfigError(describe("output file", path, "a file that can be written",
                               "check that the folder exists and is writable"));
}

void write_shown(const std::string& path, const std::string& text) {
  write_output(path, text);
  fmt::print("wrote {}\n", printable(path));
}

}  // namespace penstock::cli
