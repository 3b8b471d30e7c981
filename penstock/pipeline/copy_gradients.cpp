#include "penstock/pipeline/copy_gradients.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/errors.h"
#include "penstock/torch/distributed_type.h"

namespace penstock::pipeline {

CopyGradients::CopyGradients(const comm::World& world, const std::vector<int>& ranks, const schedule::StageMap& map, std::vector<PipelineStage> stages) {
  if (map.chains().size() < 2) return;
  const schedule::Chain& first = map.chains()[0];
  for (const schedule::Chain& chain : map.chains())
    if (chain.stages != first.stages || map.chains().size() != 2)
      throw ValueError(describe("chains of a schedule", fmt::format("{}, one of {} stages", map.chains().size(), chain.stages), fmt::format("one, or two of {} stages each", first.stages),
                                "use a schedule that runs the model once, or in both directions"));
  for (int part = 0; part < first.stages; ++part) {
    for (const PipelineStage& stage : stages) {
      const schedule::Chain& chain = map.chain_of(StageId{stage.index()});
      if (stage.index() - chain.first_stage != part) continue;
      std::vector<int> pair;
      for (const schedule::Chain& each : map.chains()) pair.push_back(ranks[static_cast<std::size_t>(map.rank_of(StageId{each.first_stage + part}))]);
      if (pair[0] == pair[1])
        throw ValueError(describe(fmt::format("copies of part {} of the model", part), fmt::format("both on rank {}", pair[0]), "two ranks", "use an even number of ranks"));
      std::sort(pair.begin(), pair.end());
      pairs_.push_back({stage, world.group_of(pair, {.purpose = "pipeline.copies", .timeout = {}})});
    }
  }
}

void CopyGradients::warm_up() {
  for (const Pair& pair : pairs_) {
    // Both kinds of tensors that `sum` adds: counts on the host, gradients on the device.
    pair.group.all_reduce(at::zeros({1}, at::kLong), comm::ReduceOp::Sum, {.label = "warm-up of copies", .timeout = {}}).wait();
    if (!pair.stage.device().is_cpu()) pair.group.all_reduce(at::zeros({1}, pair.stage.device()), comm::ReduceOp::Sum, {.label = "warm-up of copies", .timeout = {}}).wait();
  }
}

void CopyGradients::sum() {
  const at::NoGradGuard no_grad;
  for (const Pair& pair : pairs_) {
    const std::vector<at::Tensor> parameters = pair.stage.parameters();
    std::int64_t elements = 0;
    for (const at::Tensor& parameter : parameters) elements += parameter.numel();
    at::Tensor mine = at::empty({2}, at::kLong);
    mine.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(parameters.size());
    mine.data_ptr<std::int64_t>()[1] = elements;
    at::Tensor both = at::empty({2, 2}, at::kLong);
    pair.group.all_gather(both, mine, {.label = "parameters of copies", .timeout = {}}).wait();
    const auto* said = both.data_ptr<std::int64_t>();
    if (said[0] != said[2] || said[1] != said[3])
      throw PipeliningMetadataError(describe(fmt::format("parameters of the two copies of stage {}", pair.stage.index()), fmt::format("{} with {} elements", said[2], said[3]),
                                             fmt::format("{} with {} elements, as on the other rank", said[0], said[1]), "build both copies from the same part of the model"));
    at::Tensor mask = at::empty({static_cast<std::int64_t>(parameters.size())}, at::kLong);
    for (std::size_t i = 0; i < parameters.size(); ++i) mask.data_ptr<std::int64_t>()[i] = parameters[i].grad().defined() ? 1 : 0;
    pair.group.all_reduce(mask, comm::ReduceOp::Sum, {.label = "gradients of copies", .timeout = {}}).wait();
    const auto* holders = mask.data_ptr<std::int64_t>();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (holders[i] == 0) continue;
      at::Tensor& gradient = parameters[i].mutable_grad();
      gradient = gradient.defined() ? gradient.contiguous() : at::zeros_like(parameters[i], at::MemoryFormat::Contiguous);
      pair.group.all_reduce(local_if_distributed(gradient, kDetach), comm::ReduceOp::Sum, {.label = "gradient of copies", .timeout = {}}).wait();
    }
  }
}

}  // namespace penstock::pipeline
