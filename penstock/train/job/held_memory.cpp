#include "penstock/train/job/held_memory.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>

#include "penstock/fully_shard.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/torch/tree/distributed_type.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/job/replica_gradient_sync.h"

namespace penstock::train {

namespace {

std::int64_t local_bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::int64_t>(local_if_distributed(tensor, kDetach).nbytes()) : 0;
}

// Sharded parameters of this rank.
std::set<ShardGroup*> groups_of(const ModelStages& model) {
  std::set<ShardGroup*> groups;
  for (const optim::NamedParameter& parameter : model.parameters())
    if (const auto info = shard_of(parameter.tensor)) groups.insert(info->group);
  return groups;
}

}  // namespace

void reset_gathered_peaks(const ModelStages& model) {
  for (ShardGroup* group : groups_of(model))
    if (group->has_context()) group->context().reset_peak();
}

HeldMemory held_memory(const ModelStages& model, const optim::Optimizer& optimizer,
                       const ReplicaGradientSync& sync) {
  HeldMemory held;
  std::int64_t reduced = 0;
  for (const optim::NamedParameter& parameter : model.parameters()) {
    if (shard_of(parameter.tensor)) {
      reduced += local_bytes(parameter.tensor.grad());
    } else {
      held.parameters += local_bytes(parameter.tensor);
      held.gradients += local_bytes(parameter.tensor.grad());
    }
  }
  // Further uses of shared parameters have their own gradients; their shards, if any, belong to their groups.
  for (const at::Tensor& use : model.shared().further_uses())
    (shard_of(use) ? reduced : held.gradients) += local_bytes(use.grad());
  held.gradients += sync.buffer_bytes();
  std::map<ShardContext*, std::int64_t> by_context;  // gathered now
  for (ShardGroup* group : groups_of(model)) {
    const ShardGroup::Memory memory = group->memory();
    held.parameters += memory.shards;
    held.gathered += memory.gathered;
    held.gradients += memory.gradients;
    if (group->has_context()) by_context[&group->context()] += memory.gathered;
  }
  held.gathered_peak = held.gathered;
  for (const auto& [context, now] : by_context) {
    held.pooled += static_cast<std::int64_t>(context->pool().held_bytes());
    held.gathered_peak = std::max(held.gathered_peak, held.gathered - now + context->peak_gathered_bytes());
  }
  for (const optim::NamedTensor& entry : optimizer.state().tensors)
    held.optimizer += local_bytes(entry.tensor);
  held.in_memory = held.parameters + held.gradients + held.optimizer +
                   (held.pooled > 0 ? held.pooled : held.gathered + reduced);
  held.gradients += reduced;
  return held;
}

}  // namespace penstock::train
