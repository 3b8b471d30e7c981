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

#include <ATen/core/Tensor.h>
#include <cstdint>
#include <string>

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
ClipResult clip_grad_norm(const std::vector<NamedParameter>& parameters, double max_norm,
                          const ClipOptions& options = {});

// ---- loss scaling ----
//
// Dynamic loss scaling for float16: the loss is multiplied by a scale, so that small gradients do not
// underflow.
//
//   optim::LossScaler scaler({.initial_scale = 1024});
//   scaler.scaled(model->forward(x).sub(y).square().mean()).backward();
//   // or, in a pipeline: pipeline.set_loss_scale(scaler.scale());
//   if (scaler.unscale(optimizer.parameters())) {
//     optim::clip_grad_norm(optimizer.parameters(), 1.0);
//     optimizer.step();
//   }
//   scaler.update();
//
// A step whose gradients are not all finite on all ranks is skipped by all of them, and the scale shrinks. It
// grows after a number of good steps. With the default factors scales are powers of two, so that scaling does
// not round.
//
// A disabled scaler has no effect: scale() is 1, scaled() returns its argument, unscale() returns true
// without reading the gradients, update() and load_state() change nothing.
//
// Thread safety: one thread at a time.

// Options of LossScaler.
struct LossScalerOptions {
  bool enabled = true;                  // false: the scaler has no effect
  double initial_scale = 65536;         // from min_scale to max_scale
  double growth_factor = 2;             // more than 1
  double backoff_factor = 0.5;          // between 0 and 1
  std::int64_t growth_interval = 2000;  // consecutive good steps before the scale grows
  double min_scale = 1;                 // lower limit of the scale, positive
  double max_scale = 16777216;          // upper limit of the scale
};

// Options of LossScaler::unscale.
struct UnscaleOptions {
  std::vector<comm::Group> groups;  // groups of ranks that have different parameters; each contains this rank
  // Device that the ranks agree on. Default: that of the first parameter, or the CPU without parameters; a
  // rank without parameters must set it for NCCL.
  std::optional<at::Device> device;
};

// What a checkpoint stores; the same on all ranks.
struct LossScalerState {
  double scale = 1;             // the current scale
  std::int64_t good_steps = 0;  // consecutive good steps since the scale was last adjusted
  // Compares all members.
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;
};

// Finds a scale for the loss. One scaler is used for all parameters of the model.
class LossScaler {
 public:
  // Throws ValueError that names the bad option.
  explicit LossScaler(const LossScalerOptions& options = {});

  // Returns LossScalerOptions::enabled.
  bool enabled() const { return options_.enabled; }
  // Returns the scale of the current step; 1 if disabled.
  double scale() const { return options_.enabled ? state_.scale : 1; }
  // Returns the loss multiplied by the scale.
  at::Tensor scaled(const at::Tensor& loss) const;

  // [collective over the meshes of the parameters and the groups] Divides the gradients by the scale and
  // returns whether all of them are finite on all ranks. If not, the gradients are unusable and the step must
  // be skipped. Calls settle_gradients first (gradients.h). Waits for the device. Throws StateError if
  // called twice without update(), ValueError for a group that does not contain this rank, NotImplemented for
  // parameters on meshes whose axes overlap in part.
  bool unscale(const std::vector<NamedParameter>& parameters, const UnscaleOptions& options = {});

  // Sets the scale of the next step, depending on what unscale() returned. Throws StateError if unscale() was
  // not called.
  void update();

  // Returns what a checkpoint stores.
  LossScalerState state() const { return state_; }
  // Restores a state. Throws ValueError for a scale that is not positive and finite, or a negative count.
  void load_state(const LossScalerState& state);

 private:
  enum class Found { Nothing, Finite, NotFinite };
  LossScalerOptions options_;
  LossScalerState state_;
  Found found_ = Found::Nothing;
};

}  // namespace penstock::optim
