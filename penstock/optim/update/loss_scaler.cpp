#include "penstock/gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/optim/update/rank_reduction.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock::optim {
namespace {

void require(bool good, const char* field, double actual, const char* expected, const char* remedy) {
  if (!good)
    throw ValueError(
        describe(fmt::format("LossScaler: {}", field), fmt::format("{}", actual), expected, remedy));
}

// Multiplies by the inverse scale and sets `found` to 1 if an element is not finite. `list` is of one dtype
// and device.
void unscale_list(const std::vector<at::Tensor>& list, double inverse, at::Tensor& found) {
  if (list[0].is_cuda()) {
    at::Tensor here = at::zeros({1}, list[0].options().dtype(at::kFloat));
    at::_amp_foreach_non_finite_check_and_unscale_(list, here, at::full({1}, inverse, here.options()));
    found = at::maximum(found, here.to(found.device()));
    return;
  }
  at::_foreach_mul_(list, inverse);
  for (const at::Tensor& tensor : list)
    if (!at::isfinite(tensor).all().item<bool>()) {
      found.fill_(1);
      return;
    }
}

}  // namespace

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  require(options.min_scale > 0 && std::isfinite(options.min_scale), "min_scale", options.min_scale,
          "a positive number", "1 is common");
  require(options.max_scale >= options.min_scale && std::isfinite(options.max_scale), "max_scale",
          options.max_scale, "min_scale or more", "2^24 is common");
  require(options.initial_scale >= options.min_scale && options.initial_scale <= options.max_scale,
          "initial_scale", options.initial_scale, "min_scale to max_scale", "65536 is common");
  require(options.growth_factor > 1 && std::isfinite(options.growth_factor), "growth_factor",
          options.growth_factor, "more than 1", "2 is common");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
          "between 0 and 1", "0.5 is common");
  require(options.growth_interval > 0, "growth_interval", static_cast<double>(options.growth_interval),
          "1 or more", "2000 is common");
  if (options.enabled) state_.scale = options.initial_scale;
}

at::Tensor LossScaler::scaled(const at::Tensor& loss) const {
  return options_.enabled ? loss * state_.scale : loss;
}

bool LossScaler::unscale(const std::vector<NamedParameter>& parameters, const UnscaleOptions& options) {
  if (!options_.enabled) return true;
  if (found_ != Found::Nothing)
    throw StateError("LossScaler: unscale was called twice for one step; call update() after each step");
  const at::NoGradGuard no_grad;
  const std::vector<NamedParameter> own = without_ties(parameters);
  settle_gradients(own);
  std::vector<std::vector<at::Tensor>> lists;
  for (const NamedParameter& parameter : own) {
    const at::Tensor gradient = parameter.tensor.grad();
    if (!gradient.defined()) continue;
    const at::Tensor local = local_if_distributed(gradient, kDetach);
    if (local.numel() == 0) continue;
    auto list = std::find_if(lists.begin(), lists.end(), [&](const auto& other) {
      return other[0].device() == local.device() && other[0].scalar_type() == local.scalar_type();
    });
    if (list == lists.end()) list = lists.insert(lists.end(), std::vector<at::Tensor>());
    list->push_back(local);
  }
  const at::Device device = options.device ? *options.device
                            : own.empty()  ? at::Device(at::kCPU)
                                           : own[0].tensor.device();
  at::Tensor found = at::zeros({1}, at::TensorOptions(device).dtype(at::kFloat));
  for (const auto& list : lists) unscale_list(list, 1 / state_.scale, found);
  RankReduction(own, options.groups).all_reduce(found, comm::ReduceOp::Max);
  const bool finite = found.item<float>() == 0;
  found_ = finite ? Found::Finite : Found::NotFinite;
  return finite;
}

void LossScaler::update() {
  if (!options_.enabled) return;
  if (found_ == Found::Nothing)
    throw StateError("LossScaler: update without unscale; call unscale() on the gradients of the step first");
  if (found_ == Found::NotFinite) {
    state_ = {.scale = std::max(state_.scale * options_.backoff_factor, options_.min_scale), .good_steps = 0};
  } else if (++state_.good_steps >= options_.growth_interval) {
    state_ = {.scale = std::min(state_.scale * options_.growth_factor, options_.max_scale), .good_steps = 0};
  }
  found_ = Found::Nothing;
}

void LossScaler::load_state(const LossScalerState& state) {
  require(state.scale > 0 && std::isfinite(state.scale), "state: scale", state.scale, "a positive number",
          "the record is damaged; use another checkpoint");
  require(state.good_steps >= 0, "state: good_steps", static_cast<double>(state.good_steps), "0 or more",
          "the record is damaged; use another checkpoint");
  if (!options_.enabled) return;
  state_ = state;
  found_ = Found::Nothing;
}

}  // namespace penstock::optim
