#include "penstock/language_model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/torch/kernels/fused_math.h"

namespace penstock::models {

at::Tensor token_loss_sum(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored) {
  if (logits.dim() < 2 ||
      logits.sizes().slice(0, static_cast<std::size_t>(logits.dim()) - 1) != targets.sizes())
    throw ValueError(describe(
        "token_loss: logits and targets",
        fmt::format("[{}] and [{}]", fmt::join(logits.sizes(), ", "), fmt::join(targets.sizes(), ", ")),
        "[..., vocabulary] and [...]"));
  if (targets.scalar_type() != at::kLong)
    throw ValueError(describe("token_loss: targets", c10::toString(targets.scalar_type()), "Long"));
  const at::Tensor rows = logits.reshape({-1, logits.size(-1)}), wanted = targets.reshape({-1});
  if (!is_dtensor(logits)) return cross_entropy_sum(rows, wanted, ignored);
  const ImplicitReplicationGuard same_targets;  // plain targets are the same on all ranks
  return full_tensor(cross_entropy_sum(rows, wanted, ignored));
}

at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& targets, double tokens,
                      std::int64_t ignored) {
  if (!(tokens > 0))
    throw ValueError(describe("token_loss: tokens", fmt::format("{}", tokens),
                              "the positive number of targets to divide by",
                              "skip batches in which all targets are ignored"));
  return token_loss_sum(logits, targets, ignored).div(tokens);
}

at::Tensor counted_targets(const at::Tensor& targets, std::int64_t ignored) {
  return targets.ne(ignored).sum();
}

}  // namespace penstock::models
