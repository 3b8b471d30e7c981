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
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/group.h"
#include "penstock/optimizer.h"

namespace penstock::optim {

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
  // be skipped. Calls settle_gradients first (clip_gradients.h). Waits for the device. Throws StateError if
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
