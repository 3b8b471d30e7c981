#include "penstock/models/hybrid/trainable_hybrid.h"

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
  void check_expert_parallel(int ranks) const override { models::check_expert_parallel(options_, ranks); }
  // Only the first stage sees tokens, but every stage needs the documents that they begin.
  StageInputs inputs(const TokenBatch& batch) const override {
    TokenBatch whole = batch;
    if (!whole.documents.defined() && options_.bos_token > 0)
      whole.documents = documents_from_bos(batch.tokens, options_.bos_token);
    return TrainableModel::inputs(whole);
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
