#include "penstock/train/job/stage_graphs.h"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/errors.h"
#include "penstock/graph_compiler.h"
#include "penstock/train/config/compiled_fields.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/job/stage_copies.h"

namespace penstock::train {
namespace {

// Of the built-in models only dropout depends on the rows of a rank; nothing is known about others.
bool depends_on_rows(const TrainConfig& config) {
  const std::string type = configured_type(config.model);
  return config.model.dropout > 0 || (type != "transformer" && type != "hybrid");
}

// "stage 0 on pp 0: blocks 0 to 1; stage 1 on pp 1: blocks 2 to 3"
std::string parts_text(const TrainConfig& config, const schedule::Schedule& schedule,
                       const models::ModelPlan& plan) {
  const schedule::StageMap& map = schedule.stages();
  const std::vector<models::StagePart> parts = configured_parts(config, plan, parts_of_model(map));
  std::string text;
  for (int stage = 0; stage < map.stages(); ++stage) {
    const models::StagePart& part = parts[static_cast<std::size_t>(part_of_stage(map, stage))];
    text += fmt::format("{}stage {} on pp {}: ", text.empty() ? "" : "; ", stage, map.rank_of(stage));
    text += part.blocks() == 0 ? std::string("no blocks")
                               : fmt::format("blocks {} to {}", part.first_block, part.end_block - 1);
  }
  return text;
}

}  // namespace

std::string graph_compiler_of(const TrainConfig& config) {
  return std::string(config.training.compile == "fused" ? graph::kFusedCompiler : graph::kExecutorCompiler);
}

std::string StageGraphs::name_of(int stage) const { return fmt::format("stage {}{}", stage, place); }

graph::CacheOptions StageGraphs::cache_of(int stage) const {
  graph::CacheOptions cache;
  cache.name = name_of(stage);
  if (!identity.empty()) cache.identity = fmt::format("{}\n{}", cache.name, identity);
  cache.artifact = artifact;
  cache.longest_wait = longest_wait;
  return cache;
}

bool replicas_have_own_graphs(const TrainConfig& config) {
  return config.layout.dp > 1 && (depends_on_rows(config) || config.layout.tp > 1);
}

std::vector<graph::ArtifactField> artifact_configuration(const TrainConfig& config,
                                                         const schedule::Schedule& schedule,
                                                         const models::TrainableModel& model) {
  const std::optional<std::string> own = model.identity();
  if (!own)
    throw ConfigError(describe(
        "training.artifact", fmt::format("model.type = \"{}\", a model without identity", config.model.type),
        "a model that says what decides its graphs",
        "override TrainableModel::identity, or leave training.artifact out"));
  std::vector<graph::ArtifactField> fields;
  for (auto& [name, value] : compiled_fields(config)) fields.push_back({name, value});
  // Of two schedules from files, one may split it.
  fields.push_back({"backward", has_weight_backwards(schedule) ? "in two graphs" : "as one graph"});
  fields.push_back({"model", *own});
  fields.push_back({"stages", parts_text(config, schedule, model.plan())});
  return fields;
}

StageGraphs stage_graphs_of(const RankLayout& layout, const TrainConfig& config,
                            const schedule::Schedule& schedule, const models::TrainableModel& model,
                            std::shared_ptr<graph::Artifact> artifact) {
  StageGraphs graphs;
  graphs.artifact = std::move(artifact);
  graphs.uses_rows = depends_on_rows(config);
  // A stage looks up its graph when its first microbatch has arrived: the waits of all stages add up for the
  // last one, whose receive has the world's timeout.
  graphs.longest_wait = layout.world().group().timeout() / (3 * schedule.stages().stages());
  if (replicas_have_own_graphs(config)) graphs.place += fmt::format(", dp rank {}", layout.dp());
  if (layout.tp_size() > 1) graphs.place += fmt::format(", tp rank {}", layout.tp());
  const std::optional<std::string> own = model.identity();
  if (!own) return graphs;
  for (const auto& [name, value] : compiled_fields(config))
    graphs.identity += fmt::format("{} = {}\n", name, value);
  graphs.identity += fmt::format("model: {}\nstages: {}\n", *own, parts_text(config, schedule, model.plan()));
  // Layout and place determine the names of groups in graphs, except where the ranks are threads. Those of
  // tensor-parallel ranks are stored by their axis; a transformer has no others.
  if (layout.dp_size() > 1 && configured_type(config.model) != "transformer")
    graphs.identity += fmt::format("replicas: {}\n", layout.copies().name());
  return graphs;
}

std::shared_ptr<graph::Artifact> open_artifact(const TrainConfig& config, const schedule::Schedule& schedule,
                                               const models::TrainableModel& model, at::Device device) {
  return graph::Artifact::open(config.training.artifact, artifact_configuration(config, schedule, model),
                               {.device = device.str(), .compiler = graph_compiler_of(config)});
}

StageGraphs open_stage_graphs(const RankLayout& layout, const TrainConfig& config,
                              const schedule::Schedule& schedule, at::Device device) {
  if (config.training.compile == "off") return {};
  const std::shared_ptr<models::TrainableModel> model = configured_model(config);
  StageGraphs graphs = stage_graphs_of(layout, config, schedule, *model, nullptr);
  if (config.training.artifact.empty()) return graphs;
  checkpoint::WorldAgreement(layout.world()).agree("open the artifact of the stages", [&] {
    graphs.artifact = open_artifact(config, schedule, *model, device);
    for (const int stage : schedule.stages().stages_of(layout.pp()))
      graphs.artifact->verify(graphs.name_of(stage));
  });
  return graphs;
}

}  // namespace penstock::train
