// What the runtime knows of a stage beyond its public side: examples as records, meshes, conversions at its
// borders.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "penstock/dtensor/tensor/mesh_cache.h"
#include "penstock/pipeline/contract/stage_meta.h"
#include "penstock/stage.h"

namespace penstock {

struct StageState {
  StageModule module;
  int index;
  int count;
  at::Device device;
  StageOptions options;
  StageMeta examples;  // unset where there are none
  MeshCache meshes;
};

StageState& state_of(const PipelineStage& stage);

// Returns whether this stage alone would need a trial run. A pipeline is static only if no stage does.
bool needs_trial(const PipelineStage& stage, bool has_backward);

// Returns StageOptions::validate, or its default.
bool validates(const PipelineStage& stage);

// Returns what a stage sends, given what its module returned: a tensor counts as a tuple of one, a list as a
// tuple. Throws PipeliningMetadataError for anything that is not a tensor.
std::vector<at::Tensor> stage_outputs(const Tree& result, int stage);

// Returns what a stage computes with, given the local part that arrived and the agreed record: a distributed
// tensor is assembled on the stage's mesh, a plain one is the local part itself. Nothing is compared between
// ranks; no graph leads to the local part. Throws PipeliningMetadataError for a local part that requires grad
// and for an unknown mesh.
at::Tensor tensor_from_local(const PipelineStage& stage, const at::Tensor& local, const TensorMeta& meta);

}  // namespace penstock
