// Measures time and memory of an embedding, a block of each kind and a head of the model on this machine, for
// one microbatch.
//
//   const PartMeasurements measured = measure_parts(config, *model, device);
//   measured.blocks.at("attention").forward   // seconds
//   measured.blocks.at("attention").kept      // bytes that one microbatch keeps until its backward
//
// Runs real forwards and backwards of one block each, on the device, with the threads of a rank. Takes about
// a second: if all rows of a microbatch would take longer, one row is measured and the result multiplied; if
// one row would take seconds, as in models for GPUs on a CPU, shorter rows are measured: times are
// extrapolated on a line, without the square of attention; bytes as a + b * tokens + c * tokens^2, beyond
// 1,024 tokens, where attention keeps no pairs, without the last term.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <string>

#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

struct PartMeasurement {
  double forward = 0, backward = 0;  // seconds
  std::int64_t kept = 0;             // bytes
};

struct PartMeasurements {
  PartMeasurement embed;
  std::map<std::string, PartMeasurement> blocks;  // by kind (BlockPlan)
  PartMeasurement head;                           // with the last norm and the loss
  std::int64_t kept_by_stage = 0;    // bytes per stage besides its parts: masks, rotary embedding
  std::int64_t border = 0;           // bytes of the activation between two stages
  std::int64_t measured_rows = 0;    // if fewer than in a microbatch, times are extrapolated
  std::int64_t measured_tokens = 0;  // of a row; if fewer than the context, of some parts, the same
  int threads = 1;
};

// For a rank that computes whole blocks, regardless of tp. Throws ConfigError like the model.
PartMeasurements measure_parts(const TrainConfig& config, const models::TrainableModel& model,
                               at::Device device);

}  // namespace penstock::train
