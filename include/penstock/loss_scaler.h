// Loss scaling for float16: gradients that would vanish in its range are made larger by a factor that finds its own size.
//
//   LossScaler scaler({.enabled = precision == fp16});
//   runtime.set_loss_scale(scaler.scale());                        // or scaler.scaled(loss).backward()
//   ... step of the pipeline ...
//   if (scaler.unscale(optimizer.parameters(), {.groups = {mesh.group("pp")}})) {
//     clip_grad_norm(...);
//     optimizer.step();
//   }
//   scaler.update();
//
// A step whose gradients are not all finite, on any rank, is skipped by all; the scale shrinks then, and grows after a number of good
// steps. Scales are powers of two by default, so that scaling rounds nothing.
//
// Disabled, it does nothing and costs nothing: scale() is 1, scaled() gives its argument, unscale() reads no gradient and says yes.
// Thread rule: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/group.h"
#include "penstock/optimizer.h"

namespace penstock::optim {

struct LossScalerOptions {
  bool enabled = true;
  double initial_scale = 65536;
  double growth_factor = 2;              // more than 1
  double backoff_factor = 0.5;           // between 0 and 1
  std::int64_t growth_interval = 2000;   // good steps in a row before it grows
  double min_scale = 1;                  // it shrinks no further
  double max_scale = 16777216;           // it grows no further
};

struct UnscaleOptions {
  std::vector<comm::Group> groups;  // of ranks with other parameters that must agree; this rank is in each
  // Where the ranks agree. Nothing: where the first parameter is; a rank without parameters must say it for NCCL.
  std::optional<at::Device> device;
};

// What a checkpoint keeps; the same on all ranks.
struct LossScalerState {
  double scale = 1;
  std::int64_t good_steps = 0;  // since the scale last changed
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;
};

class LossScaler {
 public:
  // Throws ValueError that names the option.
  explicit LossScaler(const LossScalerOptions& options = {});

  bool enabled() const { return options_.enabled; }
  double scale() const { return options_.enabled ? state_.scale : 1; }
  // The loss times the scale.
  at::Tensor scaled(const at::Tensor& loss) const;

  // [collective over the meshes and groups] Divides the gradients by the scale and tells whether all are finite on all ranks: if not,
  // they are of no use and the step must be left out. Waits for the device. Once between two updates: StateError otherwise.
  bool unscale(const std::vector<NamedParameter>& parameters, const UnscaleOptions& options = {});

  // The scale for the next step, by what unscale found. StateError without an unscale before.
  void update();

  LossScalerState state() const { return state_; }
  // Throws ValueError for a scale that is not positive and finite, or a negative count.
  void load_state(const LossScalerState& state);

 private:
  enum class Found { Nothing, Finite, NotFinite };
  LossScalerOptions options_;
  LossScalerState state_;
  Found found_ = Found::Nothing;
};

}  // namespace penstock::optim
