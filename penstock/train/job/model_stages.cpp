#include "penstock/train/job/model_stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/log.h"
#include "penstock/base/quote.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/pipeline/compiled/prepare_stage.h"
#include "penstock/schedule.h"
#include "penstock/stage_module.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/train/job/configured_activations.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/stage_copies.h"
#include "penstock/train/job/stage_scope.h"

namespace penstock::train {

namespace {

std::optional<at::ScalarType> autocast_dtype(const std::string& precision) {
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  return std::nullopt;
}

StageModule stage_module(const std::shared_ptr<models::ModelStage>& stage, int index, at::Device device,
                         std::optional<at::ScalarType> autocast) {
  return StageModule(
      [stage, index, device, autocast](at::Tensor x, Tree more) mutable {
        const StageScope place(index);
        const AutocastScope scope(device.type(), autocast);
        return stage->forward_with(x, more);
      },
      {stage});
}

const char* text_of(GraphSource source) {
  switch (source) {
    case GraphSource::Captured:
      return "captured";
    case GraphSource::Cache:
      return "cache";
    case GraphSource::Artifact:
      return "artifact";
  }
  return "captured";
}

// The same as a graph.
PreparableStage graph_of_stage(StageModule module, const std::shared_ptr<models::ModelStage>& stage,
                               int index, const TrainConfig& config, const schedule::Schedule& schedule,
                               const StageGraphs& graphs, std::function<void(const StageCapture&)> captured) {
  CompiledStageOptions options;
  options.compile.split_backward = has_weight_backwards(schedule);
  options.compile.cache = graphs.cache_of(index);
  options.compile.disable_passes = config.training.disable_passes;
  options.compile.compiler = graph_compiler_of(config);
  options.compile.compile_exact = config.training.compile_exact;
  options.compile.compile_check = config.training.compile_check;
  options.compile.activations = configured_activations(config);
  options.uses_rows = graphs.uses_rows;
  options.captured = std::move(captured);
  options.values_left = [stage] { return stage->values_left_by_forward(); };
  options.set_values_left = [stage](const Tree& values) { stage->set_values_left_by_forward(values); };
  return preparable_stage(std::move(module), std::move(options));
}

// Adds each graph to a list for observers.
std::function<void(const StageCapture&)> recorder(int stage,
                                                  std::shared_ptr<std::vector<CompiledForward>> compiled) {
  return [stage, compiled = std::move(compiled)](const StageCapture& capture) {
    compiled->push_back({.stage = stage,
                         .graph = static_cast<std::int64_t>(capture.graph),
                         .nodes = static_cast<std::int64_t>(capture.nodes),
                         .deferred = static_cast<std::int64_t>(capture.deferred),
                         .seconds = capture.seconds,
                         .reason = capture.reason,
                         .source = text_of(capture.source)});
    if (capture.graph > 1)
      log().warn("train: stage {} was {} again, as graph {} of one kind of call, in {:.2f} s: {}", stage,
                 capture.source == GraphSource::Captured ? "captured" : "loaded", capture.graph,
                 capture.seconds, capture.reason);
  };
}

// The first dim that no axis splits: experts may be divided into single ones, and their columns over
// tensor-parallel ranks.
Shard whole_dim(const at::Tensor& parameter) {
  for (std::int64_t dim = 0; dim < parameter.dim(); ++dim)
    if (std::none_of(placements_of(parameter).begin(), placements_of(parameter).end(),
                     [&](const Placement& placement) { return placement.splits(dim); }))
      return Shard{dim};
  return Shard{0};
}

// Divided experts are sharded over fewer ranks. Their gradients already have the terms of all ranks that send
// them rows: sums over the others are divided by the number of all data-parallel ranks, too.
void shard(models::ModelStage& stage, const RankLayout& layout) {
  ShardOptions options;
  if (layout.ep_size() > 1)
    options.shard_placement = [layout](const std::string&, const at::Tensor& parameter) {
      return is_divided_expert(parameter) ? ShardChoice(whole_dim(parameter), layout.expert_shard_mesh())
                                          : ShardChoice();
    };
  for (const auto& block : stage.blocks()) fully_shard(*block, layout.shard_mesh(), options);
  const std::shared_ptr<ShardState> state = fully_shard(stage, layout.shard_mesh(), options);
  if (layout.ep_size() > 1) state->set_gradient_divide_factor(layout.dp_size());
}

// Without sharding.
std::shared_ptr<models::ModelStage> make_module(const RankLayout& layout, const TrainConfig& config,
                                                const models::TrainableModel& model,
                                                const models::StagePart& part,
                                                const models::RecomputePlan& recompute, at::Device device) {
  std::shared_ptr<models::ModelStage> module = model.make_stage(part);
  module->to(device);
  if (config.layout.sequence_parallel) module->set_sequence_parallel();
  if (const auto mesh = layout.split_mesh()) module->parallelize(*mesh);
  if (layout.dp_size() > 1) module->set_replicas(layout.copies());
  module->set_initial_values(static_cast<std::uint64_t>(config.training.seed));
  module->set_recompute(recompute);
  return module;
}

// Each use of a tied weight is an autograd leaf of its own, also where one stage has both: each accumulates
// its gradient over the microbatches, and both are added at the end, so that the sum has the same bits in
// every layout. In a sharded stage they are one parameter, and autograd adds the gradients.
std::vector<ParameterUse> uses_of_shared(const models::ModelPlan& plan, models::ModelStage& stage,
                                         bool sharded) {
  std::vector<ParameterUse> uses;
  const auto add = [&](const std::string& name) {
    const auto named = stage.named_parameters();
    if (const at::Tensor* parameter = named.find(name))
      uses.push_back({name, stage.part().index, *parameter});
  };
  for (const std::string& name : plan.tied) {
    add(name);
    if (!stage.is_whole() || sharded) continue;
    if (const at::Tensor last = stage.separate_last_use(name); last.defined())
      uses.push_back({name, stage.part().index, last});
  }
  for (const models::SharedParameter& each : plan.shared) add(each.parameter.name);
  return uses;
}

std::vector<ParameterTie> ties_of(const models::ModelPlan& plan) {
  std::vector<ParameterTie> ties;
  for (const std::string& name : plan.tied) ties.push_back(penstock::tie({name}));
  for (const models::SharedParameter& each : plan.shared)
    ties.push_back(penstock::tie({each.parameter.name}));
  return ties;
}

}  // namespace

std::vector<models::StagePart> configured_parts(const TrainConfig& config, const models::ModelPlan& plan,
                                                int parts) {
  return models::partition_model(plan, parts, configured_partition(config));
}

void check_stages(const TrainConfig& config, const models::TrainableModel& model,
                  const schedule::Schedule& schedule) {
  check_copies(schedule.stages(), config.layout.schedule);
  if (config.layout.tp > 1) model.check_tensor_parallel(static_cast<int>(config.layout.tp));
  if (config.layout.sequence_parallel) model.check_sequence_parallel();
  if (config.layout.ep > 1) model.check_expert_parallel(static_cast<int>(config.layout.ep));
  configured_recompute(config, model, parts_of_model(schedule.stages()));
  check_activation_policy(config, model.plan());
}

ModelStages::ModelStages(const RankLayout& layout, const TrainConfig& config,
                         const schedule::Schedule& schedule, at::Device device, const StageGraphs& graphs)
    : model_(configured_model(config)),
      parts_(configured_parts(config, model_->plan(), parts_of_model(schedule.stages()))),
      indices_(schedule.stages().stages_of(layout.pp())) {
  const schedule::StageMap& map = schedule.stages();
  check_stages(config, *model_, schedule);
  const models::RecomputePlan recompute = configured_recompute(config, *model_, parts_of_model(map));
  for (const int index : indices_)
    modules_.push_back(make_module(layout, config, *model_,
                                   parts_[static_cast<std::size_t>(part_of_stage(map, index))], recompute,
                                   device));
  std::vector<ParameterUse> uses;
  for (const auto& module : modules_)
    for (ParameterUse& use : uses_of_shared(plan(), *module, layout.is_sharded()))
      uses.push_back(std::move(use));
  if (layout.is_sharded())
    for (const auto& module : modules_) shard(*module, layout);
  shared_.emplace(ties_of(plan()), uses,
                  SharedParameterOptions{.world = layout.world(), .ranks = layout.pipeline_ranks()});
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    StageModule forward =
        stage_module(modules_[i], indices_[i], device, autocast_dtype(config.training.precision));
    if (config.training.compile != "off")
      forward = graph_of_stage(std::move(forward), modules_[i], indices_[i], config, schedule, graphs,
                               recorder(indices_[i], compiled_))
                    .module;
    stages_.emplace_back(std::move(forward), indices_[i], map.stages(), device);
    for (const auto& entry : modules_[i]->named_parameters()) {
      if (shared_->is_further_use(entry.value())) continue;
      parameters_.push_back({entry.key(), entry.value()});
      if (train::is_second_copy(map, indices_[i])) second_copies_.insert(entry.value().unsafeGetTensorImpl());
    }
  }
  if (layout.dp_size() > 1 || map.chains().size() > 1)
    for (const std::size_t i : in_order_of_parts())
      trainers_.emplace(indices_[i], trainers_of(layout, map, indices_[i]));
}

SingleStage make_single_stage(const RankLayout& layout, const TrainConfig& config,
                              const schedule::Schedule& schedule, const models::TrainableModel& model,
                              int stage, at::Device device, const StageGraphs& graphs,
                              std::function<void(const StageCapture& capture)> captured) {
  const schedule::StageMap& map = schedule.stages();
  const int parts = parts_of_model(map);
  std::shared_ptr<models::ModelStage> module = make_module(
      layout, config, model,
      configured_parts(config, model.plan(), parts)[static_cast<std::size_t>(part_of_stage(map, stage))],
      configured_recompute(config, model, parts), device);
  const std::vector<ParameterUse> uses = uses_of_shared(model.plan(), *module, layout.is_sharded());
  if (layout.is_sharded()) shard(*module, layout);
  // Both uses in one stage share memory, which its graph depends on. Other stages are not there.
  std::optional<SharedParameters> shared;
  if (module->is_whole())
    shared.emplace(ties_of(model.plan()), uses,
                   SharedParameterOptions{.world = layout.world(), .ranks = layout.pipeline_ranks()});
  PreparableStage compiled =
      graph_of_stage(stage_module(module, stage, device, autocast_dtype(config.training.precision)), module,
                     stage, config, schedule, graphs, std::move(captured));
  return {.module = module,
          .shared = std::move(shared),
          .stage = PipelineStage(std::move(compiled.module), stage, map.stages(), device),
          .prepare = std::move(compiled.prepare)};
}

std::vector<std::size_t> ModelStages::in_order_of_parts() const {
  std::vector<std::size_t> order(modules_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return modules_[a]->part().index < modules_[b]->part().index;
  });
  return order;
}

std::vector<optim::NamedParameter> ModelStages::parameters_of(int stage) const {
  std::vector<optim::NamedParameter> result;
  for (std::size_t i = 0; i < modules_.size(); ++i)
    if (indices_[i] == stage)
      for (const auto& entry : modules_[i]->named_parameters())
        result.push_back({entry.key(), entry.value()});
  return result;
}

bool ModelStages::is_second_copy(const optim::NamedParameter& parameter) const {
  return second_copies_.contains(parameter.tensor.unsafeGetTensorImpl());
}

bool ModelStages::counts(const optim::NamedParameter& parameter) const {
  return shared_->is_shared(parameter.tensor) ? shared_->counts(parameter.tensor)
                                              : !is_second_copy(parameter);
}

std::vector<models::StagePart> ModelStages::own_parts() const {
  std::vector<models::StagePart> parts;
  for (const auto& module : modules_) parts.push_back(module->part());
  return parts;
}

std::vector<models::StateBuffer> ModelStages::state_buffers() const {
  std::vector<models::StateBuffer> all;
  for (const auto& module : modules_)
    for (models::StateBuffer& buffer : module->state_buffers()) all.push_back(std::move(buffer));
  return all;
}

// The two ranks that hold copies of two parts meet in the order of the parts.
void ModelStages::after_step(bool updated) {
  for (const std::size_t i : in_order_of_parts()) {
    models::FinishedStep step{.updated = updated};
    if (const auto found = trainers_.find(indices_[i]); found != trainers_.end())
      step.data_parallel = found->second;
    modules_[i]->after_step(step);
  }
}

std::vector<at::Tensor> ModelStages::take_auxiliary_losses() {
  const std::vector<models::AuxiliaryTerm>& terms = plan().auxiliary;
  std::vector<at::Tensor> sums(terms.size());
  for (const auto& module : modules_)
    for (const models::AuxiliaryLoss& loss : module->take_auxiliary_losses()) {
      const auto found = std::find_if(terms.begin(), terms.end(), [&](const models::AuxiliaryTerm& term) {
        return term.name == loss.name;
      });
      if (found == terms.end())
        throw StateError(describe(fmt::format("auxiliary loss of stage {}", module->part().index),
                                  quote(loss.name), "one of ModelPlan::auxiliary", "list it there"));
      at::Tensor& sum = sums[static_cast<std::size_t>(found - terms.begin())];
      sum = sum.defined() ? sum + loss.value : loss.value;
    }
  return sums;
}

at::Tensor ModelStages::loss(const at::Tensor& output, const at::Tensor& targets, double tokens) const {
  for (const auto& module : modules_)
    if (module->part().has_head()) return module->loss(output, targets, tokens);
  throw StateError("the loss is computed at the last stage, which is not on this rank");
}

std::vector<CompiledForward> ModelStages::take_compiled() { return std::exchange(*compiled_, {}); }

void ModelStages::set_training(bool training) {
  for (const auto& module : modules_) module->train(training);
}

}  // namespace penstock::train
