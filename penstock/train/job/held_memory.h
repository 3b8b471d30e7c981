// Bytes that a rank of a training run holds at one moment, by what they are for. Activations are not in it: nobody has a list of them;
// they are what is live beyond this (measure_memory.h).
#pragma once

#include <cstdint>

#include "penstock/optimizer.h"

namespace penstock::train {

class ReplicaGradientSync;
class ModelStages;

struct HeldMemory {
  std::int64_t parameters = 0;  // with sharding: the shards, with their padding
  std::int64_t gathered = 0;    // whole parameters and buffers of gathers
  std::int64_t gathered_peak = 0;  // the most of them since reset_gathered_peaks()
  std::int64_t gradients = 0;   // whole ones, reduced shards, and copies that replicas exchange
  std::int64_t optimizer = 0;
  std::int64_t pooled = 0;      // memory that sharded modules keep for gathers and reductions, used now or not

  // All of it, each byte once: gathered parameters and reduced shards lie in pooled memory where there is some.
  std::int64_t in_memory = 0;
};

// No communication. Local parts of distributed tensors count.
HeldMemory held_memory(const ModelStages& model, const optim::Optimizer& optimizer, const ReplicaGradientSync& sync);

// Of the sharded modules of this rank. Nothing before their first use.
void reset_gathered_peaks(const ModelStages& model);

}  // namespace penstock::train
