// Measures time and memory of an embedding, a block and a head of the model on this machine, for one
// microbatch.
//
//   const PartMeasurements measured = measure_parts(config, device);
//   measured.block.forward                    // seconds
//   measured.block.kept                       // bytes that one microbatch keeps until its backward
//
// Runs real forwards and backwards of one block each, on the device, with the threads of a rank. Takes about
// a second: if all rows of a microbatch would take longer, one row is measured and the result multiplied.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "penstock/train_config.h"

namespace penstock::train {

struct PartMeasurement {
  double forward = 0, backward = 0;  // seconds
  std::int64_t kept = 0;             // bytes
};

struct PartMeasurements {
  PartMeasurement embed;
  PartMeasurement block;
  PartMeasurement head;              // with the last norm and the loss
  std::int64_t kept_by_stage = 0;    // bytes, besides its parts: masks, rotary turns
  std::int64_t border = 0;           // bytes of the activation between two stages
  std::int64_t measured_rows = 0;    // fewer than a microbatch has: the times are multiples
  int threads = 1;
};

// Of a rank that computes all of a block, whatever tp is. Throws ConfigError as the model does.
PartMeasurements measure_parts(const TrainConfig& config, at::Device device);

}  // namespace penstock::train
