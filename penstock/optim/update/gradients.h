// Gradients of a list of parameters, before they are used.
#pragma once

#include <string>
#include <vector>

#include "penstock/optim/update/parameters.h"

namespace penstock::optim {

// [collective over the meshes of the parameters] Redistributes the gradient of every distributed parameter to
// the parameter's placements; this completes the sums over ranks that backward left as terms (Partial). The
// terms along one mesh axis are sent in one collective. Gradients with other placements are replaced; those
// with the parameter's placements are left alone, so calling it again costs nothing. clip_grad_norm,
// LossScaler::unscale and Optimizer::step call it themselves.
// A gradient of a distributed parameter exists on all ranks of its mesh or on none, because operators on
// distributed tensors run on all of them. Ranks that differ in this cause a StateError where the host can
// detect it without waiting (float32 and float64 on the CPU).
// Throws TypeError for a plain gradient of a distributed parameter and the reverse, NotImplemented for a
// sparse one.
void settle_gradients(const std::vector<NamedParameter>& parameters);

// Returns the names of the parameters whose gradient on this rank contains NaN or infinity. Waits for the
// device.
std::vector<std::string> non_finite_gradients(const std::vector<NamedParameter>& parameters);

}  // namespace penstock::optim
