#include "penstock/gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/optim/update/rank_reduction.h"
#include "penstock/torch/kernels/fused_steps.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock::optim {
namespace {

// One list per device, as kernels require.
std::vector<std::vector<at::Tensor>> by_device(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> lists;
  for (const at::Tensor& tensor : tensors) {
    auto list = std::find_if(lists.begin(), lists.end(),
                             [&](const auto& other) { return other[0].device() == tensor.device(); });
    if (list == lists.end()) list = lists.insert(lists.end(), std::vector<at::Tensor>());
    list->push_back(tensor);
  }
  return lists;
}

// The largest absolute value of an element, float64; NaN if there is one.
at::Tensor largest(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> sizes;
  for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.abs().max().to(at::kDouble));
  return at::stack(sizes).max();
}

// The norm over all ranks, of what each rank counts.
at::Tensor norm_over(const RankReduction& ranks, const std::vector<at::Tensor>& counted, bool by_size,
                     at::Device device) {
  at::Tensor total = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
  for (const auto& list : by_device(counted)) {
    const at::Tensor term = (by_size ? largest(list) : sum_of_squares(list)).to(device);
    total = by_size ? at::maximum(total, term) : total + term;
  }
  if (!by_size) {
    ranks.all_reduce(total, comm::ReduceOp::Sum);
    return total.sqrt();
  }
  // Not every backend keeps NaN in a maximum, so it is sent beside the value.
  const at::Tensor lost = total.isnan();
  const at::Tensor both = at::stack({total.masked_fill(lost, 0.0), lost.to(at::kDouble)});
  ranks.all_reduce(both, comm::ReduceOp::Max);
  return both[0].masked_fill(both[1].gt(0), std::numeric_limits<double>::quiet_NaN());
}

[[noreturn]] void throw_not_finite(const std::vector<NamedParameter>& parameters, double norm) {
  std::vector<std::string> names = non_finite_gradients(parameters);
  const std::size_t more = names.size() > 8 ? names.size() - 8 : 0;
  names.resize(names.size() - more);
  const std::string where = names.empty() ? "on another rank"
                                          : fmt::format("in the gradients of {}{}", fmt::join(names, ", "),
                                                        more ? fmt::format(" and {} more", more) : "");
  throw StateError(
      describe("norm of the gradients", fmt::format("{}, {}", norm, where), "a finite number",
               "lower the learning rate, check the data of this step, or skip such steps (NonFinite::Skip)"));
}

}  // namespace

double ClipResult::value() const { return norm.item<double>(); }
bool ClipResult::finite() const { return std::isfinite(value()); }

ClipResult clip_grad_norm(const std::vector<NamedParameter>& parameters, double max_norm,
                          const ClipOptions& options) {
  if (!(max_norm > 0))
    throw ValueError(describe("clip_grad_norm: max_norm", fmt::format("{}", max_norm), "a positive number",
                              "infinity computes the norm without clipping"));
  const bool by_size = std::isinf(options.order) && options.order > 0;
  if (options.order != 2 && !by_size)
    throw ValueError(describe("clip_grad_norm: order", fmt::format("{}", options.order), "2 or infinity",
                              "2 is the usual one"));
  const at::NoGradGuard no_grad;
  const std::vector<NamedParameter> own = without_ties(parameters);
  settle_gradients(own);
  const RankReduction ranks(own, options.groups);
  std::vector<at::Tensor> gradients, counted;
  for (const NamedParameter& parameter : own) {
    const at::Tensor gradient = parameter.tensor.grad();
    if (!gradient.defined()) continue;
    const at::Tensor local = local_if_distributed(gradient, kDetach);
    if (local.numel() == 0) continue;
    gradients.push_back(local);
    if ((!options.counts || options.counts(parameter)) && ranks.counts_here(parameter.tensor))
      counted.push_back(local);
  }
  const at::Device device = options.device ? *options.device
                            : own.empty()  ? at::Device(at::kCPU)
                                           : own[0].tensor.device();
  ClipResult result{.norm = norm_over(ranks, counted, by_size, device)};
  if (options.non_finite != NonFinite::Leave && !result.finite()) {
    if (options.non_finite == NonFinite::Throw) throw_not_finite(own, result.value());
    result.skipped = true;
    return result;
  }
  if (std::isinf(max_norm)) return result;
  if (device.is_cpu()) {
    // Once training is stable most gradients need no scaling, and are then not even read.
    const double coefficient = max_norm / (result.value() + 1e-6);
    if (result.finite() && coefficient < 1 && !gradients.empty()) at::_foreach_mul_(gradients, coefficient);
    return result;
  }
  const at::Tensor one = at::ones_like(result.norm);
  const at::Tensor coefficient =
      at::where(result.norm.isfinite(), (max_norm / (result.norm + 1e-6)).clamp_max(1.0), one).to(at::kFloat);
  for (const auto& list : by_device(gradients)) scale_(list, coefficient.to(list[0].device()));
  return result;
}

}  // namespace penstock::optim
