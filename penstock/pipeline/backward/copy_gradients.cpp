#include "penstock/pipeline/backward/copy_gradients.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/comm/group/agreement.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/layout_text.h"
#include "penstock/errors.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock {

namespace {

// The form in which a rank has a gradient; the sum of two such numbers tells what the two ranks have.
constexpr std::int64_t kNothing = 0, kAsParameter = 1,
                       kOtherwise = 4;  // placed differently from the parameter, as terms of a sum

std::int64_t holding(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return kNothing;
  return is_dtensor(gradient) && is_dtensor(parameter) && placements_of(gradient) != placements_of(parameter)
             ? kOtherwise
             : kAsParameter;
}

}  // namespace

CopyGradients::CopyGradients(const comm::World& world, const std::vector<int>& ranks,
                             const schedule::StageMap& map, std::vector<PipelineStage> stages) {
  if (map.chains().size() < 2) return;
  const schedule::Chain& first = map.chains()[0];
  for (const schedule::Chain& chain : map.chains())
    if (chain.stages != first.stages || map.chains().size() != 2)
      throw ValueError(describe("chains of a schedule",
                                fmt::format("{}, one of {} stages", map.chains().size(), chain.stages),
                                fmt::format("one, or two of {} stages each", first.stages),
                                "use a schedule that runs the model once, or in both directions"));
  for (int part = 0; part < first.stages; ++part) {
    for (const PipelineStage& stage : stages) {
      const schedule::Chain& chain = map.chain_of(stage.index());
      if (stage.index() - chain.first_stage != part) continue;
      std::vector<int> pair;
      for (const schedule::Chain& each : map.chains())
        pair.push_back(ranks[static_cast<std::size_t>(map.rank_of(each.first_stage + part))]);
      const int lower_stage = first.first_stage + part;
      if (pair[0] == pair[1])
        throw ValueError(describe(fmt::format("copies of part {} of the model", part),
                                  fmt::format("both on rank {}", pair[0]), "two ranks",
                                  "use an even number of ranks"));
      std::sort(pair.begin(), pair.end());
      pairs_.push_back(
          {stage, lower_stage, world.group_of(pair, {.purpose = "pipeline.copies", .timeout = {}})});
    }
  }
}

void CopyGradients::warm_up() {
  for (const Pair& pair : pairs_) {
    // Both kinds of tensors that `sum` reduces: counts on the host, gradients on the device.
    pair.group
        .all_reduce(at::zeros({1}, at::kLong), comm::ReduceOp::Sum,
                    {.label = "warm-up of copies", .timeout = {}})
        .wait();
    if (!pair.stage.device().is_cpu())
      pair.group
          .all_reduce(at::zeros({1}, pair.stage.device()), comm::ReduceOp::Sum,
                      {.label = "warm-up of copies", .timeout = {}})
          .wait();
  }
}

void CopyGradients::sum() {
  const at::NoGradGuard no_grad;
  for (const Pair& pair : pairs_) {
    const std::vector<at::Tensor> parameters = pair.stage.parameters();
    // Checked in every step, because a layout may change on one of the ranks: tensors of equal size would be
    // added silently.
    std::vector<std::string> lines;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      lines.push_back(layout_text(fmt::format("parameter {}", i), parameters[i]));
    try {
      comm::require_agreement(
          pair.group,
          fmt::format("parameters of the copies of one part of the model, stage {} and its copy",
                      pair.lower_stage),
          lines, "build both copies from the same part of the model, with the same parameters frozen");
    } catch (const ValueError& error) {
      throw PipeliningMetadataError(error.what());
    }
    at::Tensor mask = at::empty({static_cast<std::int64_t>(parameters.size())}, at::kLong);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      mask.data_ptr<std::int64_t>()[i] = holding(parameters[i]);
    pair.group.all_reduce(mask, comm::ReduceOp::Sum, {.label = "gradients of copies", .timeout = {}}).wait();
    const auto* holders = mask.data_ptr<std::int64_t>();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (holders[i] == 0) continue;
      at::Tensor& gradient = parameters[i].mutable_grad();
      if (!gradient.defined()) gradient = at::zeros_like(parameters[i], at::MemoryFormat::Contiguous);
      // Local parts can be added if both have the same placement; otherwise both are redistributed like their
      // parameter.
      const bool alike = holders[i] == 2 * kAsParameter || holders[i] == 2 * kOtherwise;
      if (!alike && holding(parameters[i]) == kOtherwise)
        gradient = redistribute(gradient, placements_of(parameters[i]));
      gradient = gradient.contiguous();
      pair.group
          .all_reduce(local_if_distributed(gradient, kDetach), comm::ReduceOp::Sum,
                      {.label = "gradient of copies", .timeout = {}})
          .wait();
    }
  }
}

}  // namespace penstock
