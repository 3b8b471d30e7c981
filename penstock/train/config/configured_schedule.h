// The pipeline schedule that a configuration names.
//
//   const schedule::Schedule schedule = configured_schedule(config.layout);
#pragma once

#include "penstock/schedule.h"
#include "penstock/train_config.h"

namespace penstock::train {

// Returns the configured schedule: generated from its kind, or read from a CSV file. Throws ConfigError for a
// file that cannot be read or does not match pp, virtual_stages and microbatches.
schedule::Schedule configured_schedule(const LayoutConfig& config);

// Whether a schedule computes the gradients of weights separately (W).
bool has_weight_backwards(const schedule::Schedule& schedule);

}  // namespace penstock::train
