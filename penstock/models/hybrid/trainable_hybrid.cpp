#include "penstock/models/hybrid/trainable_hybrid.h"

#include "penstock/hybrid.h"

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
