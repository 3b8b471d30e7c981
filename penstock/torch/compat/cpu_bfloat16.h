// Makes bfloat16 matrix products work on the CPU.
//
// LibTorch 1.13 dispatches them to oneDNN on every Arm processor with bfloat16 instructions, but its oneDNN
// only has kernels for processors that also have SVE; on the others it throws "could not create a primitive
// descriptor iterator".
#pragma once

namespace penstock {

// Tries a bfloat16 product, once per process. If it throws, disables oneDNN for the process and logs a
// warning; LibTorch's own kernels are used instead. Call this before any computation whose bits must be
// reproducible later. Thread safety: any thread.
void ensure_cpu_bfloat16();

}  // namespace penstock
