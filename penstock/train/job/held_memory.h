// Memory that a rank of a training run holds at one moment, by category. Activations are not included,
// because there is no list of them; they are the live memory beyond these categories (measure_memory.h).
#pragma once

#include <cstdint>

#include "penstock/optimizer.h"

namespace penstock::train {

class ReplicaGradientSync;
class ModelStages;

struct HeldMemory {
  std::int64_t parameters = 0;     // with sharding: the shards, including padding
  std::int64_t gathered = 0;       // unsharded parameters and gather buffers
  std::int64_t gathered_peak = 0;  // peak since reset_gathered_peaks()
  std::int64_t gradients = 0;      // unsharded gradients, reduced shards, and copies that replicas exchange
  std::int64_t optimizer = 0;
  std::int64_t pooled = 0;  // memory that sharded modules keep for gathers and reductions, in use or not

  // Total with each byte counted once: gathered parameters and reduced shards are in pooled memory if there
  // is any.
  std::int64_t in_memory = 0;
};

// No communication. Distributed tensors count with their local part.
HeldMemory held_memory(const ModelStages& model, const optim::Optimizer& optimizer,
                       const ReplicaGradientSync& sync);

// Resets the peaks of this rank's sharded modules. Does nothing before their first use.
void reset_gathered_peaks(const ModelStages& model);

}  // namespace penstock::train
