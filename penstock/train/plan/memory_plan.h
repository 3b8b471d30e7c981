// Predicts how much memory each rank of a configuration needs, from the plan alone.
//
//   // by pipeline rank
//   const std::vector<RankMemory> memory = plan_memory(config, plan, schedule, parts, simulation, kept);
//
// Included: parameters, gradients, optimizer state (float32, even if the computation is not), gathered
// parameters in the order in which the schedule gathers and frees stages, and what microbatches keep for
// their backward and between stages (live_activations.h). Not included: LibTorch itself, temporary memory of
// kernels, reduction buffers, batches.
// Expert-parallel ranks divide the experts, tensor-parallel ranks split every tensor except norms;
// activations are not divided by them.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/model_plan.h"
#include "penstock/schedule.h"
#include "penstock/simulator.h"
#include "penstock/train/plan/live_activations.h"
#include "penstock/train_config.h"

namespace penstock::train {

// Bytes of a rank.
struct RankMemory {
  std::int64_t parameters = 0;  // with sharding: the shards
  std::int64_t gathered = 0;    // peak of the unsharded parameters that the schedule has gathered
  std::int64_t gradients = 0;   // unsharded gradients, and the copies that replicas exchange
  std::int64_t optimizer = 0;
  std::int64_t activations = 0;  // peak
  int live = 0;                  // peak number of (stage, microbatch) pairs
  std::int64_t total() const { return parameters + gathered + gradients + optimizer + activations; }
};

std::vector<RankMemory> plan_memory(const TrainConfig& config, const models::ModelPlan& plan,
                                    const schedule::Schedule& schedule,
                                    const std::vector<models::StagePart>& parts,
                                    const plan::Simulation& simulation, const KeptActivations& kept);

}  // namespace penstock::train
