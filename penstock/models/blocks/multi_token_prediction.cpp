#include "penstock/models/blocks/multi_token_prediction.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/fused_math.h"

namespace penstock::models {
namespace {

void check_batch(const MultiTokenBatch& batch, const at::Tensor& hidden) {
  const at::IntArrayRef sizes = hidden.sizes().slice(0, 2);
  check_ids("MultiTokenPrediction: tokens", batch.tokens, sizes, "tokens");
  check_ids("MultiTokenPrediction: targets", batch.targets, sizes, "targets");
  if (batch.targets.scalar_type() != at::kLong)
    throw ValueError(describe("MultiTokenPrediction: targets", shown(batch.targets), "Long"));
  if (batch.documents.defined())
    check_ids("MultiTokenPrediction: documents", batch.documents, sizes, "one for each token");
}

// Targets [batch, length - d] of depth d; `ignored` where a token in between is of another document.
at::Tensor targets_at(const MultiTokenBatch& batch, std::int64_t d) {
  const std::int64_t length = batch.targets.size(1) - d;
  at::Tensor targets = batch.targets.narrow(1, d, length);
  // Every token in between, not only the last: a document's number may occur again.
  for (std::int64_t step = 1; batch.documents.defined() && step <= d; ++step) {
    const at::Tensor other = batch.documents.narrow(1, step, length).ne(batch.documents.narrow(1, 0, length));
    targets = targets.masked_fill(other, batch.ignored);
  }
  return targets;
}

// The mean over the targets that count, 0 if there are none; with a divisor the sum divided by it.
at::Tensor mean_loss(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored,
                     double divisor) {
  if (logits.dim() != 3 || logits.sizes().slice(0, 2) != targets.sizes())
    throw ValueError(describe("MultiTokenPrediction: logits of the head", shown(logits),
                              fmt::format("[{}, {}, vocabulary]", targets.size(0), targets.size(1))));
  const at::Tensor rows = logits.reshape({-1, logits.size(2)}), wanted = targets.reshape({-1});
  const auto mean = [&](const at::Tensor& sum) {
    return divisor > 0 ? sum.div(divisor) : sum.div(wanted.ne(ignored).sum().clamp_min(1));
  };
  if (!is_dtensor(logits)) return mean(cross_entropy_sum(rows, wanted, ignored));
  const ImplicitReplicationGuard same_targets;  // plain targets are the same on all ranks
  return mean(full_tensor(cross_entropy_sum(rows, wanted, ignored)));
}

}  // namespace

MultiTokenStepImpl::MultiTokenStepImpl(const NormOptions& options) : options_(options) { reset(); }

void MultiTokenStepImpl::reset() {
  hidden_norm = AnyNorm(options_);
  token_norm = AnyNorm(options_);
  register_module("hidden_norm", hidden_norm.module());
  register_module("token_norm", token_norm.module());
  project = register_module(
      "project", torch::nn::Linear(torch::nn::LinearOptions(2 * options_.width, options_.width).bias(false)));
}

void MultiTokenStepImpl::initialize(const std::string& name, const BlockInit& init) {
  hidden_norm.initialize(name + ".hidden_norm", init);
  token_norm.initialize(name + ".token_norm", init);
  fill_normal(project->weight, name + ".project.weight", init.seed, init.deviation);
}

at::Tensor MultiTokenStepImpl::forward(const at::Tensor& hidden, const at::Tensor& token) {
  const ModuleScope running(*this);
  const at::Tensor before = hidden_norm.forward(hidden), next = token_norm.forward(token);
  const at::Tensor both = at::cat({before, next.to(before.scalar_type())}, -1);
  const LocalRegion region(both, project->weight, Rows::BatchAndLength);
  return region.leave_sum(at::linear(cast_once(region.enter(both)), region.weight(project->weight)));
}

MultiTokenPredictionImpl::MultiTokenPredictionImpl(const MultiTokenOptions& options) : options_(options) {
  options_.check();
  reset();
}

void MultiTokenPredictionImpl::reset() {
  steps_ = register_module("steps", torch::nn::ModuleList());
  for (std::int64_t d = 1; d <= options_.depth; ++d) steps_->push_back(MultiTokenStep(options_.norm));
}

MultiTokenStepImpl& MultiTokenPredictionImpl::step(std::int64_t d) {
  return steps_->at<MultiTokenStepImpl>(static_cast<std::size_t>(d - 1));
}

void MultiTokenPredictionImpl::initialize(const std::string& name, const BlockInit& init) {
  for (std::int64_t d = 1; d <= options_.depth; ++d)
    step(d).initialize(fmt::format("{}.steps.{}", name, d - 1), init);
}

std::vector<NamedLoss> MultiTokenPredictionImpl::forward(const at::Tensor& hidden,
                                                         const MultiTokenBatch& batch,
                                                         const MultiTokenParts& parts) {
  const ModuleScope running(*this);
  check_hidden("MultiTokenPrediction: hidden states", hidden, options_.norm.width);
  check_batch(batch, hidden);
  const std::int64_t length = hidden.size(1);
  at::Tensor h = hidden, sum;
  std::vector<NamedLoss> losses{{kMultiTokenLoss, {}}};
  for (std::int64_t d = 1; d <= options_.depth && d < length; ++d) {
    const at::Tensor rows =
        step(d).forward(h.narrow(1, 0, length - d), parts.embed(batch.tokens.narrow(1, d, length - d)));
    BlockResult result = parts.block(d, rows);
    if (!result.hidden.defined() || result.hidden.sizes() != rows.sizes())
      throw ValueError(describe(fmt::format("MultiTokenPrediction: result of block {}", d),
                                shown(result.hidden), fmt::format("like its input, {}", shown(rows))));
    h = result.hidden;
    const at::Tensor loss = mean_loss(parts.head(h), targets_at(batch, d), batch.ignored, batch.divisor);
    sum = sum.defined() ? sum.add(loss) : loss;
    for (NamedLoss& each : result.losses) losses.push_back(std::move(each));
  }
  losses[0].value = sum.defined() ? sum.div(options_.depth)
                                  : at::zeros({}, hidden.options().dtype(wide_dtype(hidden.scalar_type())));
  return losses;
}

}  // namespace penstock::models
