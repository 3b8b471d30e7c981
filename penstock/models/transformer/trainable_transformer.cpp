#include "penstock/models/transformer/trainable_transformer.h"

#include "penstock/models/transformer/parallel_plan.h"
#include "penstock/transformer.h"

namespace penstock::models {
namespace {

class TrainableTransformer : public TrainableModel {
 public:
  explicit TrainableTransformer(const TransformerOptions& options)
      : options_(options.resolved()), plan_(options_.plan()) {}

  const ModelPlan& plan() const override { return plan_; }
  std::shared_ptr<ModelStage> make_stage(const StagePart& part) const override {
    return std::make_shared<TransformerStageImpl>(options_, part);
  }
  void check_tensor_parallel(int ranks) const override { models::check_tensor_parallel(options_, ranks); }
  void check_sequence_parallel() const override {}
  void check_recompute(const RecomputePlan&) const override {}
  std::optional<std::string> identity() const override { return std::string(); }

 private:
  TransformerOptions options_;
  ModelPlan plan_;
};

}  // namespace

std::shared_ptr<TrainableModel> trainable_transformer(const TransformerOptions& options) {
  return std::make_shared<TrainableTransformer>(options);
}

}  // namespace penstock::models
