// Gradient clipping by the norm of all gradients of a model, wherever its parameters are.
//
//   optim::ClipOptions options;
//   options.groups = {mesh.group("pp")};          // other pipeline stages have other parameters
//   options.non_finite = optim::NonFinite::Skip;
//   optim::ClipResult clipped = optim::clip_grad_norm(optimizer.parameters(), 1.0, options);
//   if (!clipped.skipped) optimizer.step();
//
// The norm is that of all parameters: plain ones, all parts of distributed ones, and those of other ranks in
// ClipOptions::groups. A tensor that is listed twice counts once. If several ranks of a group have copies of
// a parameter, ClipOptions::counts must return true on exactly one of them. Data-parallel replicas need no
// group: they have equal gradients.
//
// Communication: one all-reduce of one or two numbers for each group and each mesh axis that splits a
// parameter. A group that contains the ranks of an axis replaces it, so one group of all ranks results in one
// all-reduce. Every rank gets the same bits and therefore scales its gradients by the same factor. On the
// CPU, squares are summed in float64.
//
// Thread safety: as for collectives. The host does not wait for the device unless NonFinite::Skip,
// NonFinite::Throw or the caller requires it.
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
// the placements of the parameter. This completes the sums over ranks that backward left as Partial; those
// along one mesh axis and of one dtype are sent in one collective. Gradients that already have the placements
// are unchanged, so calling it again costs nothing. Parameters that fully_shard has gathered are sharded
// again first. clip_grad_norm, LossScaler::unscale and Optimizer::step call this function themselves.
//
// A gradient of a distributed parameter exists on all ranks of its mesh or on none, because operators on
// distributed tensors run on all of them. Ranks that differ in this cause a StateError where the host can
// detect it without waiting (float32 and float64 on the CPU). Throws TypeError for a plain gradient of a
// distributed parameter and the reverse, ValueError for a gradient on a different mesh, NotImplemented for a
// sparse gradient.
void settle_gradients(const std::vector<NamedParameter>& parameters);

// Returns the names of the parameters whose gradient on this rank contains NaN or infinity. Waits for the
// device.
std::vector<std::string> non_finite_gradients(const std::vector<NamedParameter>& parameters);

// What clip_grad_norm does if the norm is NaN or infinite. Gradients are not scaled in any case.
enum class NonFinite {
  Leave,  // nothing; ClipResult::finite() tells
  Skip,   // sets ClipResult::skipped, on all ranks
  Throw   // throws StateError on all ranks; on ranks with such gradients it names them
};

// Options of clip_grad_norm.
struct ClipOptions {
  double order = 2;                 // order of the norm: 2, or infinity for the largest absolute value
  std::vector<comm::Group> groups;  // groups of ranks that have different parameters; each contains this rank
  // Returns false for a copy that another rank of the groups counts; it is scaled like the others. Empty: all
  // count.
  std::function<bool(const NamedParameter&)> counts;
  NonFinite non_finite = NonFinite::Leave;  // what to do if the norm is NaN or infinite
  // Device that the norm is computed on. Default: that of the first parameter, or the CPU without parameters;
  // a rank without parameters must set it for NCCL.
  std::optional<at::Device> device;
};

// What clip_grad_norm returns.
struct ClipResult {
  at::Tensor norm;       // norm before clipping: float64, no dims, on the device
  bool skipped = false;  // true only with NonFinite::Skip, if the norm is NaN or infinite

  // Returns the norm. Waits for the device.
  double value() const;
  // Returns whether the norm is finite. Waits for the device.
  bool finite() const;
};

// [collective over the meshes of the parameters and the groups] Scales the gradients by min(1, max_norm /
// (norm + 1e-6)); with an infinite `max_norm` it only computes the norm. Calls settle_gradients first.
// Parameters without a gradient do not count. Throws ValueError for a `max_norm` that is not positive, an
// order other than 2 and infinity, and a group that does not contain this rank; NotImplemented for parameters
// on meshes whose axes overlap in part; StateError with NonFinite::Throw.
ClipResult clip_grad_norm(const std::vector<NamedParameter>& parameters, double max_norm, const ClipOptions& options = {});

}  // namespace penstock::optim
