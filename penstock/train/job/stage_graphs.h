// Where the stages of a rank get their graphs from (training.compile = graph or fused): from the artifact
// that training.artifact names, else from the cache folder (PENSTOCK_CACHE), else by capturing them.
//
//   const StageGraphs graphs = open_stage_graphs(layout, config, schedule, device);    // all ranks
//   options.compile.cache = graphs.cache_of(stage);
//
// docs/compile_cache.md describes both.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "penstock/compile_artifact.h"
#include "penstock/compile_options.h"
#include "penstock/schedule.h"
#include "penstock/train/job/layout.h"
#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

struct StageGraphs {
  std::shared_ptr<graph::Artifact> artifact;  // null: the cache folder, or captured
  // Of the graphs of this rank, but for the number of the stage; empty: unknown, whole calls are not kept.
  std::string identity;
  std::string place;      // of this rank in names of graphs: ", tp rank 1"
  bool uses_rows = true;  // CompiledStageOptions::uses_rows
  std::chrono::milliseconds longest_wait = std::chrono::minutes(5);  // CacheOptions::longest_wait

  graph::CacheOptions cache_of(int stage) const;
  // The name of the graphs of a stage in artifacts: "stage 2, tp rank 1".
  std::string name_of(int stage) const;
};

// The name of the compiler of the stages' graphs (graph_compiler.h).
std::string graph_compiler_of(const TrainConfig& config);

// Whether data-parallel ranks have graphs of their own: those of dropout name the rows of a rank, those of
// tensor-parallel ranks their groups.
bool replicas_have_own_graphs(const TrainConfig& config);

// The fields of an artifact: the settings that decide what the graphs compute, the model's own identity and
// its parts. Throws ConfigError for a model without identity.
std::vector<graph::ArtifactField> artifact_configuration(const TrainConfig& config,
                                                         const schedule::Schedule& schedule,
                                                         const models::TrainableModel& model);

// Without communication: the graphs of a rank, with an artifact that is being written, or null.
StageGraphs stage_graphs_of(const RankLayout& layout, const TrainConfig& config,
                            const schedule::Schedule& schedule, const models::TrainableModel& model,
                            std::shared_ptr<graph::Artifact> artifact);

// Opens the artifact of a configuration. Throws ConfigError if there is none, or if it is damaged or stale.
std::shared_ptr<graph::Artifact> open_artifact(const TrainConfig& config, const schedule::Schedule& schedule,
                                               const models::TrainableModel& model, at::Device device);

// [collective over the world] Throws ConfigError on every rank if the artifact cannot be used on one of them.
StageGraphs open_stage_graphs(const RankLayout& layout, const TrainConfig& config,
                              const schedule::Schedule& schedule, at::Device device);

}  // namespace penstock::train
