// What a plan holds for: everything that can change which tensors a stage sends and receives, as a hash.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/base/hash.h"
#include "penstock/stage.h"

namespace penstock::pipeline {

// Structure, records of tensors (not their values), and plain values: an integer may be a size.
void add_arguments(HashBuilder& hash, const Tree& tree);

// Of the stages' modules: train or eval mode, and dtype, shape, requires_grad and placements of parameters and buffers. Of this thread: autocast,
// default dtype and InferenceMode. All may change between steps.
std::uint64_t state_key(const std::vector<PipelineStage>& stages);

}  // namespace penstock::pipeline
