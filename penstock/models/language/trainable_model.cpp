#include "penstock/trainable_model.h"

#include <fmt/format.h>

#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/language_model.h"
#include "penstock/mode.h"
#include "penstock/models/plan/element_count.h"

namespace penstock::models {

at::Tensor ModelStage::loss(const at::Tensor& output, const at::Tensor& targets, double tokens) {
  return token_loss(output, targets, tokens);
}

void ModelStage::parallelize(const comm::MeshGroups&) {
  throw NotImplemented(
      "this model cannot be split over ranks; set layout.tp and layout.ep to 1, or override "
      "ModelStage::parallelize()");
}

void ModelStage::set_sequence_parallel() {
  throw NotImplemented(
      "this model cannot divide hidden states over tensor-parallel ranks; set layout.sequence_parallel to "
      "false, or override ModelStage::set_sequence_parallel()");
}

void ModelStage::set_recompute(const RecomputePlan& plan) {
  if (plan.any())
    throw NotImplemented(
        "this model recomputes no activations; set training.recompute to none, or override "
        "ModelStage::set_recompute()");
}

void ModelStage::set_values_left_by_forward(const Tree&) {}

void ModelStage::after_step(const FinishedStep&) {}
void ModelStage::set_replicas(const comm::Group&) {}

at::Tensor ModelStage::separate_last_use(const std::string&) { return {}; }

std::unique_ptr<StageCache> ModelStage::make_cache(std::int64_t) const { return nullptr; }

at::Tensor ModelStage::forward_cached(const at::Tensor&, StageCache&) {
  throw NotImplemented("this model has no cache for generation; use forward_with()");
}

at::Tensor ModelStage::forward_cached_with(const at::Tensor& x, StageCache& cache, const Tree& keywords) {
  if (!keywords.is_none())
    throw NotImplemented("this model takes no keyword arguments with a cache; generate without the cache");
  return forward_cached(x, cache);
}

namespace {

std::vector<ParameterShape> shapes_of(const ModelStage& stage) {
  std::vector<ParameterShape> shapes;
  for (const auto& item : stage.named_parameters())
    shapes.push_back({item.key(), item.value().sizes().vec()});
  return shapes;
}

double product_flops(const std::vector<ParameterShape>& parameters) {
  double flops = 0;
  for (const ParameterShape& parameter : parameters)
    if (parameter.shape.size() > 1) flops += 2 * static_cast<double>(element_count(parameter));
  return flops;
}

}  // namespace

ModelPlan plan_from_stages(ModelPlan sizes, std::int64_t blocks, const std::string& kind,
                           const MakeStage& make_stage) {
  FakeMode fake;
  const ModeGuard guard(fake);
  ModelPlan plan = std::move(sizes);
  // Of three stages: only the embedding, only one block, only the head.
  plan.embed = shapes_of(*make_stage({.index = 0, .count = 3, .first_block = 0, .end_block = 0}));
  for (std::int64_t i = 0; i < blocks; ++i) {
    BlockPlan block{.kind = kind};
    block.parameters = shapes_of(*make_stage({.index = 1, .count = 3, .first_block = i, .end_block = i + 1}));
    block.flops_per_token = product_flops(block.parameters);
    plan.blocks.push_back(std::move(block));
  }
  plan.head = shapes_of(*make_stage({.index = 2, .count = 3, .first_block = blocks, .end_block = blocks}));
  plan.head_flops_per_token = product_flops(plan.head);
  return plan;
}

void TrainableModel::check_tensor_parallel(int ranks) const {
  if (ranks > 1)
    throw ConfigError(describe("layout.tp", fmt::format("{}", ranks),
                               "1, because this model cannot be split over tensor-parallel ranks",
                               "use layout.dp or layout.pp instead"));
}

void TrainableModel::check_sequence_parallel() const {
  throw ConfigError(describe("layout.sequence_parallel", "true",
                             "false, because this model cannot divide hidden states over ranks",
                             "leave it out, or override check_sequence_parallel() and "
                             "ModelStage::set_sequence_parallel() of the model"));
}

void TrainableModel::check_expert_parallel(int ranks) const {
  if (ranks > 1)
    throw ConfigError(describe("layout.ep", fmt::format("{}", ranks),
                               "1, because this model has no experts that could be divided",
                               "use layout.dp or layout.shard alone"));
}

void TrainableModel::check_recompute(const RecomputePlan& plan) const {
  if (plan.any())
    throw ConfigError(describe("training.recompute", "blocks of a model that recomputes none", "none",
                               "override check_recompute() and ModelStage::set_recompute() of the model"));
}

StageInputs TrainableModel::inputs(const TokenBatch& batch) const {
  if (!batch.metadata.is_none() && batch.metadata.kind() != Tree::Kind::Dict)
    throw ValueError(describe("TokenBatch: metadata", batch.metadata.to_string(), "a dict, or None"));
  std::vector<Tree::Item> keywords;
  if (batch.documents.defined()) keywords.emplace_back("documents", batch.documents);
  for (const std::string& name : batch.metadata.keys())
    if (name != "documents" || !batch.documents.defined()) keywords.emplace_back(name, batch.metadata[name]);
  return {Tree::tuple({batch.tokens}), keywords.empty() ? Tree() : Tree::dict(std::move(keywords)),
          Tree(batch.targets)};
}

}  // namespace penstock::models
