// The key of a plan: a hash of everything that can change which tensors a stage sends and receives.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/base/hash.h"
#include "penstock/stage.h"

namespace penstock {

// Adds the structure, the records of tensors (not their values), and plain values: an integer may be a size.
void add_arguments(HashBuilder& hash, const Tree& tree);

// Hashes the state of the stages' modules (train or eval mode; dtype, shape, requires_grad and placements of
// parameters and buffers) and of this thread (autocast, default dtype and InferenceMode). All of it may
// change between steps.
std::uint64_t state_key(const std::vector<PipelineStage>& stages);

}  // namespace penstock
