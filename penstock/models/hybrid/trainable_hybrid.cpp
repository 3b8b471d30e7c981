#include "penstock/models/hybrid/trainable_hybrid.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/hybrid.h"
#include "penstock/models/blocks/attention_metadata.h"
#include "penstock/models/hybrid/hybrid_parallel.h"

namespace penstock::models {
namespace {

class TrainableHybrid : public TrainableModel {
 public:
  TrainableHybrid(const HybridOptions& options, double auxiliary_scale)
      : options_(options.resolved()), plan_(options_.plan()), auxiliary_scale_(auxiliary_scale) {}

  const ModelPlan& plan() const override { return plan_; }
  std::shared_ptr<ModelStage> make_stage(const StagePart& part) const override {
    auto stage = std::make_shared<HybridStageImpl>(options_, part);
    stage->set_auxiliary_scale(auxiliary_scale_);
    return stage;
  }
  void check_tensor_parallel(int ranks) const override { models::check_tensor_parallel(options_, ranks); }
  void check_sequence_parallel() const override {}
  void check_expert_parallel(int ranks) const override { models::check_expert_parallel(options_, ranks); }
  void check_recompute(const RecomputePlan&) const override {}
  std::optional<std::string> identity() const override { return std::string(); }
  // Only the first stage sees tokens, but every stage needs the documents that they begin.
  StageInputs inputs(const TokenBatch& batch) const override {
    HybridMetadata metadata = HybridMetadata::from_keywords(batch.metadata);
    if (batch.documents.defined()) metadata.documents = batch.documents;
    if (!metadata.documents.defined() && options_.bos_token > 0)
      metadata.documents = documents_from_bos(batch.tokens, options_.bos_token);
    if (options_.multi_token_depth > 0) {
      // The last stage predicts further tokens in its forward, where its parameters are gathered.
      metadata.tokens = batch.tokens;
      metadata.targets = batch.targets;
    }
    metadata.check(batch.tokens.size(0), batch.tokens.size(1));
    return {Tree::tuple({batch.tokens}), metadata.keywords(), Tree(batch.targets)};
  }

 private:
  HybridOptions options_;
  ModelPlan plan_;
  double auxiliary_scale_;
};

}  // namespace

std::shared_ptr<TrainableModel> trainable_hybrid(const HybridOptions& options, double auxiliary_scale) {
  return std::make_shared<TrainableHybrid>(options, auxiliary_scale);
}

}  // namespace penstock::models
