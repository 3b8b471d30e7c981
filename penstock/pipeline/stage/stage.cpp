#include "penstock/stage.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/pipeline/contract/record_checks.h"
#include "penstock/pipeline/stage/stage_state.h"

namespace penstock {

namespace {

void harvest(MeshCache& meshes, const std::optional<std::vector<at::Tensor>>& tensors) {
  if (tensors) meshes.harvest(*tensors);
}

void check_examples(int stage, const StageMeta& meta) {
  const auto check = [&](StageSide side, const std::optional<TensorMetas>& tensors,
                         const std::optional<OptionalTensorMetas>& gradients) {
    if (gradients && !tensors)
      throw ValueError(describe(fmt::format("examples of stage {}", stage),
                                side == StageSide::Input ? "only input_grads" : "only output_grads",
                                "gradients together with their tensors",
                                side == StageSide::Input ? "pass input_args too" : "pass output_args too"));
    if (tensors && gradients) check_gradient_contract(stage, side, *tensors, *gradients);
  };
  check(StageSide::Input, meta.inputs, meta.input_grads);
  check(StageSide::Output, meta.outputs, meta.output_grads);
}

}  // namespace

PipelineStage::PipelineStage(StageModule module, int index, int count, at::Device device,
                             StageOptions options) {
  if (count < 1 || index < 0 || index >= count)
    throw ValueError(describe("stage index", fmt::format("{} of {}", index, count),
                              "an index from 0 to one less than the number of stages",
                              "number the stages of the whole pipeline from 0, over all ranks"));
  state_ = std::make_shared<StageState>(
      StageState{std::move(module), index, count, device, std::move(options), {}, {}});
  const StageOptions& given = state_->options;
  StageMeta& meta = state_->examples;
  meta.inputs = metas_of(given.input_args);
  meta.outputs = metas_of(given.output_args);
  meta.input_grads = optional_metas_of(given.input_grads);
  meta.output_grads = optional_metas_of(given.output_grads);
  check_examples(index, meta);
  for (const auto* tensors : {&given.input_args, &given.output_args, &given.input_grads, &given.output_grads})
    harvest(state_->meshes, *tensors);
  state_->meshes.harvest(state_->module.parameters());
}

int PipelineStage::index() const { return state_->index; }
int PipelineStage::count() const { return state_->count; }
at::Device PipelineStage::device() const { return state_->device; }
const StageModule& PipelineStage::module() const { return state_->module; }
const StageOptions& PipelineStage::options() const { return state_->options; }

StageState& state_of(const PipelineStage& stage) { return *stage.state_; }

bool needs_trial(const PipelineStage& stage, bool has_backward) {
  const StageMeta& meta = state_of(stage).examples;
  if (!meta.complete_for_forward()) return true;
  if (!meta.has_distributed() || !has_backward) return false;
  return !meta.input_grads || !meta.output_grads;
}

bool validates(const PipelineStage& stage) {
  return stage.options().validate.value_or(debug_level() == DebugLevel::Detail);
}

std::string to_text(const PipelineStage& stage) {
  return fmt::format("stage {} of {}", stage.index(), stage.count());
}

std::vector<at::Tensor> stage_outputs(const Tree& result, int stage) {
  const auto refuse = [&](const std::string& what) {
    throw PipeliningMetadataError(describe(
        fmt::format("output of stage {}", stage), what,
        "a tensor, or a tuple or list of tensors, because it is sent to the next stage",
        "return only tensors, and pass other values as keyword arguments on the rank that needs them"));
  };
  std::vector<at::Tensor> tensors;
  const auto add = [&](const Tree& entry, const std::string& place) {
    if (!entry.is_tensor()) refuse(fmt::format("{}{}", entry.to_string(), place));
    tensors.push_back(entry.tensor());
  };
  if (result.kind() == Tree::Kind::Tuple || result.kind() == Tree::Kind::List) {
    for (std::size_t i = 0; i < result.size(); ++i) add(result[i], fmt::format(" at [{}]", i));
  } else {
    add(result, "");
  }
  if (tensors.empty()) refuse("nothing");
  return tensors;
}

at::Tensor tensor_from_local(const PipelineStage& stage, const at::Tensor& local, const TensorMeta& meta) {
  const auto* record = std::get_if<DistributedRecord>(&meta);
  if (record == nullptr) return local;
  if (local.requires_grad())
    throw PipeliningMetadataError(describe(
        fmt::format("a local part that arrived at stage {}", stage.index()), "it requires grad",
        "none: only the whole tensor does", "report this: received buffers are never part of a graph"));
  const at::NoGradGuard no_grad;
  FromLocalOptions options;
  options.shape = record->global_shape();
  options.stride = record->global_stride();
  options.check = false;
  return from_local(local, state_of(stage).meshes.get(record->mesh_key(), stage.options().find_mesh),
                    record->placements(), options);
}

}  // namespace penstock
