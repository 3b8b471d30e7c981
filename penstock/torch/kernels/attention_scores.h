// The memory behaviour of this LibTorch's attention, for memory estimates.
#pragma once

namespace penstock {

// Returns whether attend() (fused_attention.h) materializes the scores of all queries and keys on the CPU:
// before LibTorch 2.0, which has no fused kernels.
bool attention_materializes_scores();

}  // namespace penstock
