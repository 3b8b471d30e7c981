#include "penstock/pipeline/runtime/step_recording.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

// Each recording holds the memory of a whole step. With more kinds of arguments than this, recording is not
// worthwhile.
constexpr std::size_t kMostKinds = 8;

at::Device one_cuda_device(const std::vector<PipelineStage>& stages) {
  for (const PipelineStage& stage : stages)
    if (!stage.device().is_cuda() || stage.device() != stages.front().device())
      throw ValueError(describe("device of " + to_text(stage) + ", for recorded steps", stage.device().str(),
                                "one CUDA device for all stages",
                                "put the stages there, or turn PipelineOptions::device_graph off"));
  return at::empty({0}, stages.front().device()).device();  // with its index
}

std::vector<at::Tensor> once(const std::vector<PipelineStage>& stages,
                             std::vector<at::Tensor> (StageModule::*tensors)() const) {
  std::vector<at::Tensor> found;
  std::unordered_set<const c10::TensorImpl*> known;
  for (const PipelineStage& stage : stages)
    for (const at::Tensor& tensor : (stage.module().*tensors)())
      if (known.insert(tensor.unsafeGetTensorImpl()).second) found.push_back(tensor);
  return found;
}

[[noreturn]] void refuse(const std::string& path, const std::string& actual, const char* expected,
                         const char* remedy) {
  throw ValueError(describe(path + " of a recorded step", actual, expected, remedy));
}

// The key of a recording: everything about the arguments that the recording fixes.
std::string kind_text(const FlatTree& arguments, at::Device device, double constants) {
  std::string text = fmt::format("{} {}", constants, arguments.spec.to_string());
  for (std::size_t i = 0; i < arguments.leaves.size(); ++i) {
    const Tree& leaf = arguments.leaves[i];
    const auto path = [&] { return arguments.spec.leaf_paths("arguments")[i]; };
    if (leaf.kind() == Tree::Kind::Object)
      refuse(path(), leaf.to_string(), "a tensor, number, text or None",
             "keep objects in the module, or turn PipelineOptions::device_graph off");
    if (!leaf.is_tensor()) {
      text += fmt::format(" {}", leaf.to_string());
      continue;
    }
    const at::Tensor& tensor = leaf.tensor();
    if (tensor.device() != device)
      refuse(path(), "a tensor on " + tensor.device().str(), "one on the device of the stages",
             "move it there before the step");
    if (tensor.requires_grad())
      refuse(path(), "a tensor that requires gradients", "one that does not",
             "detach it, or turn PipelineOptions::device_graph off");
    text += fmt::format(" {}[{}]/{}", static_cast<int>(tensor.scalar_type()), fmt::join(tensor.sizes(), ","),
                        fmt::join(tensor.strides(), ","));
  }
  return text;
}

}  // namespace

StepRecording::StepRecording(const std::vector<PipelineStage>& stages, Step step)
    : device_(one_cuda_device(stages)),
      parameters_(once(stages, &StageModule::parameters)),
      buffers_(once(stages, &StageModule::buffers)),
      step_(std::move(step)) {}

StepResult StepRecording::step(const Tree& args, const Tree& kwargs, const Tree& target, double constants) {
  replayed_ = false;
  const Tree arguments = Tree::tuple({args, kwargs, target});
  Kind& kind = kind_of(arguments, constants);
  if (kind.recorded) return replay(kind, tensors_of(arguments));
  try {
    if (!kind.graph) {
      kind.graph = std::make_unique<DeviceGraph>(device_);
      StepResult result;
      kind.graph->warm_up([&] { result = step_(args, kwargs, target); });
      return result;
    }
    record(kind, arguments);
  } catch (...) {
    kinds_.clear();
    throw;
  }
  return replay(kind, tensors_of(arguments));
}

std::vector<std::pair<const void*, bool>> StepRecording::model_state() const {
  std::vector<std::pair<const void*, bool>> state;
  for (const auto* tensors : {&parameters_, &buffers_})
    for (const at::Tensor& tensor : *tensors)
      state.emplace_back(tensor.unsafeGetTensorImpl()->data(), tensor.requires_grad());
  return state;
}

StepRecording::Kind& StepRecording::kind_of(const Tree& arguments, double constants) {
  const std::string text = kind_text(flatten_tree(arguments), device_, constants);
  auto state = model_state();
  auto at = kinds_.find(text);
  if (at != kinds_.end() && at->second.state != state) {
    kinds_.erase(at);
    at = kinds_.end();
  }
  if (at == kinds_.end()) {
    if (kinds_.size() == kMostKinds)
      kinds_.erase(std::min_element(kinds_.begin(), kinds_.end(), [](const auto& a, const auto& b) {
        return a.second.last_use < b.second.last_use;
      }));
    at = kinds_.emplace(text, Kind{}).first;
    at->second.state = std::move(state);
  }
  at->second.last_use = ++uses_;
  return at->second;
}

void StepRecording::record(Kind& kind, const Tree& arguments) {
  const Tree own =
      map_tree_tensors(arguments, [](const at::Tensor& tensor) { return tensor.detach().clone(); });
  kind.inputs = tensors_of(own);
  std::vector<at::Tensor> before;
  for (at::Tensor& parameter : parameters_) {
    before.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  const auto put_back = [&] {
    for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = before[i];
  };
  try {
    kind.graph->record([&] {
      const StepResult result = step_(own[0], own[1], own[2]);
      kind.output = result.output;
      if (!result.losses.empty()) kind.losses = at::stack(result.losses);
    });
  } catch (const std::exception& error) {
    put_back();
    std::throw_with_nested(StateError(describe(
        "recording of a step", error.what(), "modules and a loss that only enqueue work on the device",
        "find what reads a value back or waits, or turn PipelineOptions::device_graph off")));
  }
  for (const at::Tensor& parameter : parameters_) kind.gradients.push_back(parameter.grad());
  put_back();
  kind.recorded = true;
}

StepResult StepRecording::replay(Kind& kind, const std::vector<at::Tensor>& inputs) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < inputs.size(); ++i) kind.inputs[i].copy_(inputs[i]);
  // The earlier gradients, to which the replay adds. If .grad() is the recording's own memory, it is copied
  // first.
  std::vector<at::Tensor> earlier, added;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& now = parameters_[i].grad();
    if (!now.defined() || !kind.gradients[i].defined()) continue;
    if (now.is_alias_of(kind.gradients[i])) {
      earlier.push_back(kind.gradients[i]);
      added.push_back(now.clone());
    } else {
      earlier.push_back(now);
      added.push_back(kind.gradients[i]);
    }
  }
  kind.graph->replay();
  if (!earlier.empty()) at::_foreach_add_(earlier, added);
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (kind.gradients[i].defined() && !parameters_[i].grad().defined())
      parameters_[i].mutable_grad() = kind.gradients[i];
  replayed_ = true;
  StepResult result;
  if (kind.output)
    result.output = map_tree_tensors(*kind.output, [](const at::Tensor& tensor) { return tensor.clone(); });
  if (kind.losses.defined()) result.losses = kind.losses.clone().unbind();
  return result;
}

}  // namespace penstock
