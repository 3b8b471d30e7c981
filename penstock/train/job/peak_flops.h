// What this machine could compute at best: the peak that MFU is a share of.
//
// A data sheet has numbers for GPUs and none for the cores a process happens to share, so the peak is measured: large matrix products, the
// best rate of some tenths of a second, on all ranks at the same time, so that ranks that share cores share the peak too.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "penstock/world.h"

namespace penstock::train {

// FLOP/s of square products on this rank with the threads that it has. `precision` is training.precision; where a processor multiplies
// bf16 or fp16 slower than fp32, that is what is measured.
double product_flops(at::Device device, const std::string& precision, double seconds = 0.15);

// [collective] The sum over all ranks, which measure together.
double peak_flops(const comm::World& world, at::Device device, const std::string& precision);

}  // namespace penstock::train
