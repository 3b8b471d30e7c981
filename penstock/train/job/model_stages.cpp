#include "penstock/train/job/model_stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/generators.h"
#include "penstock/schedule.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/stage_module.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/stage_scope.h"

namespace penstock::train {

namespace {

bool is_file(const std::string& schedule) {
  return schedule.find('/') != std::string::npos || schedule.ends_with(".csv");
}

schedule::Schedule schedule_from_file(const LayoutConfig& config) {
  std::ifstream file(config.schedule);
  std::stringstream text;
  text << file.rdbuf();
  if (!file)
    throw ConfigError(describe("layout.schedule", config.schedule,
                               "a file that can be read, or the name of a schedule",
                               "penstock schedule --help lists the names"));
  schedule::Schedule read = schedule::parse_schedule(text.str());
  const auto expect = [&](const char* field, std::int64_t found, std::int64_t wanted) {
    if (found != wanted)
      throw ConfigError(describe(fmt::format("{} of the schedule in {}", field, config.schedule),
                                 std::to_string(found), std::to_string(wanted),
                                 fmt::format("set layout.{} to {}", field, found)));
  };
  expect("pp", read.ranks(), config.pp);
  expect("virtual_stages", read.stages().stages() / read.ranks(), config.virtual_stages);
  expect("microbatches", read.microbatches(), config.microbatches);
  return read;
}

std::optional<at::ScalarType> autocast_dtype(const std::string& precision) {
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  return std::nullopt;
}

StageModule stage_module(const std::shared_ptr<models::ModelStage>& stage, at::Device device,
                         std::optional<at::ScalarType> autocast) {
  return StageModule(
      [stage, device, autocast](at::Tensor x, Tree more) mutable {
        const StageScope place(stage->part().index);
        const AutocastScope scope(device.type(), autocast);
        return stage->forward_with(x, more);
      },
      {stage});
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

}  // namespace

schedule::Schedule configured_schedule(const LayoutConfig& config) {
  if (is_file(config.schedule)) return schedule_from_file(config);
  return schedule::generate(schedule::schedule_kind(config.schedule),
                            {.ranks = static_cast<int>(config.pp),
                             .stages_per_rank = static_cast<int>(config.virtual_stages),
                             .microbatches = static_cast<int>(config.microbatches),
                             .group_size = {}});
}

std::vector<models::StagePart> configured_parts(const TrainConfig& config, const models::ModelPlan& plan,
                                                int stages) {
  return models::partition_model(
      plan, stages,
      {.balance = config.layout.partition == "cost" ? models::Balance::Cost : models::Balance::Count,
       .pattern = config.model.pattern,
       .costs = {}});
}

void check_stages(const TrainConfig& config, const models::TrainableModel& model,
                  const schedule::Schedule& schedule) {
  if (schedule.stages().chains().size() > 1)
    throw ConfigError(
        describe("layout.schedule", config.layout.schedule, "a schedule with one copy of the model",
                 "a bidirectional schedule needs two copies; choose DualPipeV, which needs one"));
  if (config.layout.tp > 1) model.check_tensor_parallel(static_cast<int>(config.layout.tp));
  if (config.layout.ep > 1) model.check_expert_parallel(static_cast<int>(config.layout.ep));
  configured_recompute(config, model, schedule.stages().stages());
  if (model.plan().tied.size() > 1)
    throw NotImplemented(
        fmt::format("the model ties {} parameters between its first and last stage; the trainer supports one",
                    model.plan().tied.size()));
  const std::vector<models::StagePart> parts =
      configured_parts(config, model.plan(), schedule.stages().stages());
  for (const models::SharedParameter& shared : model.plan().shared)
    if (const auto holders = models::stages_of_parameter(parts, model.plan(), shared.parameter.name);
        holders.size() > 1)
      throw ConfigError(describe(
          "layout.pp",
          fmt::format("{} stages, of which {} use {}", parts.size(), holders.size(), shared.parameter.name),
          "one stage that uses it, because the trainer does not sum its gradients over stages",
          "set layout.pp and layout.virtual_stages to 1, or for relations.weight model.relations to 0"));
}

ModelStages::ModelStages(const RankLayout& layout, const TrainConfig& config,
                         const schedule::Schedule& schedule, at::Device device)
    : model_(configured_model(config)),
      parts_(configured_parts(config, model_->plan(), schedule.stages().stages())) {
  const schedule::StageMap& map = schedule.stages();
  check_stages(config, *model_, schedule);
  const models::RecomputePlan recompute = configured_recompute(config, *model_, map.stages());
  for (const int index : map.stages_of(layout.pp())) {
    std::shared_ptr<models::ModelStage> module = model_->make_stage(parts_[static_cast<std::size_t>(index)]);
    module->to(device);
    if (const auto mesh = layout.split_mesh()) module->parallelize(*mesh);
    if (layout.dp_size() > 1) module->set_replicas(layout.copies());
    module->set_initial_values(static_cast<std::uint64_t>(config.training.seed));
    module->set_recompute(recompute);
    modules_.push_back(std::move(module));
  }
  if (!plan().tied.empty()) tie(layout, map);
  if (layout.is_sharded())
    for (const auto& module : modules_) shard(*module, layout);
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    stages_.emplace_back(stage_module(modules_[i], device, autocast_dtype(config.training.precision)),
                         parts_[static_cast<std::size_t>(map.stages_of(layout.pp())[i])].index, map.stages(),
                         device);
    for (const auto& entry : modules_[i]->named_parameters())
      if (!is_second_leaf(entry.value())) parameters_.push_back({entry.key(), entry.value()});
  }
}

// The two uses of the weight are two autograd leaves, which share memory if both are on this rank and are
// copies otherwise. Each accumulates its own gradient over the microbatches, and both are added at the end,
// so that the sum has the same bits in every layout.
void ModelStages::tie(const RankLayout& layout, const schedule::StageMap& map) {
  const std::string& name = plan().tied.front();
  models::ModelStage *first = nullptr, *last = nullptr;
  for (const auto& module : modules_) {
    if (module->part().has_embed()) first = module.get();
    if (module->part().has_head()) last = module.get();
  }
  if (first) tied_.embed = first->named_parameters()[name];
  if (first && last) {
    const bool sharded = layout.is_sharded();
    if (first == last) {
      if (sharded) return;  // one sharded parameter for both uses: autograd adds the gradients
      tied_.head = last->separate_last_use(name);
    } else if (!sharded) {
      last->named_parameters()[name].set_data(tied_.embed);
    }
    // Two sharded stages gather, free and reduce their own parameters: each has its own shard.
  }
  if (last && first != last) tied_.head = last->named_parameters()[name];
  const int first_rank = map.rank_of(0), last_rank = map.rank_of(map.stages() - 1);
  if (first_rank != last_rank && (first || last)) tied_.peer = first ? last_rank : first_rank;
}

std::vector<optim::NamedParameter> ModelStages::parameters_of(int stage) const {
  std::vector<optim::NamedParameter> result;
  for (const auto& module : modules_)
    if (module->part().index == stage)
      for (const auto& entry : module->named_parameters()) result.push_back({entry.key(), entry.value()});
  return result;
}

bool ModelStages::is_second_leaf(const at::Tensor& parameter) const {
  return tied_.embed.defined() && tied_.head.defined() && parameter.is_same(tied_.head);
}

bool ModelStages::is_tied(const at::Tensor& parameter) const {
  return (tied_.embed.defined() && parameter.is_same(tied_.embed)) ||
         (tied_.head.defined() && parameter.is_same(tied_.head));
}

bool ModelStages::counts(const optim::NamedParameter& parameter) const {
  return !(tied_.peer >= 0 && tied_.head.defined() && parameter.tensor.is_same(tied_.head));
}

void ModelStages::share_tied() {
  if (!tied_.embed.defined() || !tied_.head.defined() || !shard_of(tied_.head)) return;
  ensure_sharded({tied_.embed, tied_.head});
  const at::NoGradGuard no_grad;
  tied_.head.copy_(tied_.embed);
}

std::vector<models::StateBuffer> ModelStages::state_buffers() const {
  std::vector<models::StateBuffer> all;
  for (const auto& module : modules_)
    for (models::StateBuffer& buffer : module->state_buffers()) all.push_back(std::move(buffer));
  return all;
}

void ModelStages::after_step(const models::FinishedStep& step) {
  for (const auto& module : modules_) module->after_step(step);
}

at::Tensor ModelStages::loss(const at::Tensor& output, const at::Tensor& targets, double tokens) const {
  for (const auto& module : modules_)
    if (module->part().has_head()) return module->loss(output, targets, tokens);
  throw StateError("the loss is computed at the last stage, which is not on this rank");
}

void ModelStages::set_training(bool training) {
  for (const auto& module : modules_) module->train(training);
}

}  // namespace penstock::train
