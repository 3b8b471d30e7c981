// Products of bfloat16 on the CPU that compute.
//
// LibTorch 1.13 hands them to oneDNN on every Arm processor that has the instructions; its oneDNN has kernels only for those that also have SVE,
// and throws "could not create a primitive descriptor iterator" elsewhere.
#pragma once

namespace penstock {

// Tries one, once in a process. Where it throws, oneDNN is switched off for the process, with a warning: LibTorch's own kernels compute then.
// Call it before anything that must give the same bits later. Any thread.
void ensure_cpu_bfloat16();

}  // namespace penstock
