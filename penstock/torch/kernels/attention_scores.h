// What attention of this LibTorch holds in memory, for those who estimate it.
#pragma once

namespace penstock {

// Whether attend() (fused_attention.h) makes the scores of all queries and keys on the CPU: without fused kernels, before 2.0.
bool attention_makes_scores();

}  // namespace penstock
