// Gradients of a list of parameters, before they are used.
#pragma once

#include <string>
#include <vector>

#include "penstock/optim/update/parameters.h"

namespace penstock::optim {

// [collective over the meshes of the parameters] Brings the gradient of every distributed parameter to the parameter's placements,
// which is where a sum over the ranks ends that backward left as terms (Partial). The terms along one axis of a mesh go in one
// collective. Gradients are replaced where they lay otherwise; nothing happens where they lie alike, so calling it again costs
// nothing. clip_grad_norm, LossScaler::unscale and Optimizer::step do it themselves.
// A gradient of a distributed parameter exists on all ranks of its mesh or on none: operators on distributed tensors run on all of them.
// Ranks that differ in it are a StateError where the host need not wait to see it (float32 and float64 on the CPU).
// Throws TypeError for a plain gradient of a distributed parameter and the reverse, NotImplemented for a sparse one.
void settle_gradients(const std::vector<NamedParameter>& parameters);

// Names of the parameters whose gradient on this rank holds NaN or an infinity. Waits for the device.
std::vector<std::string> non_finite_gradients(const std::vector<NamedParameter>& parameters);

}  // namespace penstock::optim
