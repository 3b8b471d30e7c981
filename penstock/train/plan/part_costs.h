// Measures time and memory of an embedding, a block of each kind and a head of the model on this machine, for
// one microbatch.
//
//   const PartMeasurements measured = measure_parts(config, *model, device, recompute, /*splits=*/true);
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
#include <optional>
#include <string>

#include "penstock/recompute_plan.h"
#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

struct PartMeasurement {
  double forward = 0, backward = 0;  // seconds
  // Bytes between forward and backward, without the input, which counts as a border, and without the output.
  std::int64_t kept = 0;
  // Bytes between the halves of a split backward; nothing if it was not measured.
  std::optional<std::int64_t> kept_for_weights = {};
};

struct PartMeasurements {
  PartMeasurement embed;
  std::map<std::string, PartMeasurement> blocks;      // by kind (BlockPlan)
  std::map<std::string, PartMeasurement> recomputed;  // the same, of kinds of which blocks are recomputed
  PartMeasurement head;                               // with the last norm and the loss
  // The same with recomputation of the blocks of multi-token prediction, if it is chosen.
  std::optional<PartMeasurement> recomputed_head;
  // Bytes that the blocks of a kind keep once per stage, part of `kept` of each: masks, rotary embedding.
  std::map<std::string, std::int64_t> shared;
  std::int64_t border = 0;           // bytes of the activation between two stages
  std::int64_t measured_rows = 0;    // if fewer than in a microbatch, times are extrapolated
  std::int64_t measured_tokens = 0;  // of a row; if fewer than the context, of some parts, the same
  int threads = 1;
};

// For a rank that computes whole blocks, regardless of tp. `recompute`: the kinds of blocks that it chooses
// are measured both ways. `splits`: the schedule splits backwards. Throws ConfigError like the model.
PartMeasurements measure_parts(const TrainConfig& config, const models::TrainableModel& model,
                               at::Device device, const models::RecomputePlan& recompute, bool splits);

}  // namespace penstock::train
