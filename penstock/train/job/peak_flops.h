// Measures the peak performance of this machine, the denominator of MFU.
//
// Data sheets have numbers for GPUs but not for the cores that a process shares, so the peak is measured:
// large matrix products, the best rate within some tenths of a second, on all ranks at the same time, so that
// ranks that share cores also share the peak.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "penstock/world.h"

namespace penstock::train {

// FLOP/s of square matrix products on this rank with its current threads. `precision` is training.precision;
// it is measured even if the processor multiplies bf16 or fp16 slower than fp32.
double product_flops(at::Device device, const std::string& precision, double seconds = 0.15);

// [collective] The sum over all ranks, which measure at the same time.
double peak_flops(const comm::World& world, at::Device device, const std::string& precision);

}  // namespace penstock::train
