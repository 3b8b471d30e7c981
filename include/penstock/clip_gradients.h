// Clipping by the norm of all gradients of a model, wherever its parameters are.
//
//   const ClipResult clipped = clip_grad_norm(optimizer.parameters(), 1.0, {.groups = {mesh.group("pp")}, .non_finite = NonFinite::Skip});
//   if (!clipped.skipped) optimizer.step();
//
// What counts: local parts of distributed parameters along the axes that split them, plain parameters, and the parameters of
// other ranks through the groups given. A tensor that is listed twice counts once. Of copies on several ranks of a group all but one
// must be marked by `counts`. Replicas (data parallel) need no group: they hold equal gradients.
//
// One all-reduce of two numbers along each axis that splits something and each group; a group that holds the ranks of an axis
// stands for it, so one group of all ranks makes it one all-reduce. Every rank gets the same bits and so scales alike. On the CPU
// squares are added in float64.
//
// Thread rule: as for collectives. The host does not wait for the device unless the policy or the caller asks.
#pragma once

#include <string>
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "penstock/group.h"
#include "penstock/optimizer.h"

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

// What happens when the norm is NaN or infinite. Gradients stay as they are in any case.
enum class NonFinite {
  Leave,  // nothing: the caller may ask finite() later
  Skip,   // `skipped` is set, on all ranks alike
  Throw   // StateError on all ranks, with the names of bad gradients on the ranks that have them
};

struct ClipOptions {
  double order = 2;                  // or infinity: the largest size of an element
  std::vector<comm::Group> groups;   // of ranks with other parameters; this rank is in each
  // False for a copy that another rank of the groups counts. Nothing: all count. It is scaled in any case.
  std::function<bool(const NamedParameter&)> counts;
  NonFinite non_finite = NonFinite::Leave;
  // Where the norm is worked out. Nothing: where the first parameter is; a rank without parameters must say it for NCCL.
  std::optional<at::Device> device;
};

struct ClipResult {
  at::Tensor norm;       // before clipping, float64, without dims, on the device
  bool skipped = false;  // only with NonFinite::Skip

  // These wait for the device.
  double value() const;
  bool finite() const;
};

// [collective over the meshes and groups] Scales the gradients by min(1, max_norm / (norm + 1e-6)). With an infinite max_norm it only
// measures. Gradients are settled first (gradients.h); parameters without one do not count. Throws ValueError for a max_norm that is not
// positive, another order, and a group that this rank is not in.
ClipResult clip_grad_norm(const std::vector<NamedParameter>& parameters, double max_norm, const ClipOptions& options = {});

}  // namespace penstock::optim
