// `penstock` with models that cannot be trained, as a program of a user could register them: model.type is
// the name of what is wrong. Ranks find it when they build the model or run the first step.
//
//   penstock-invalid-models train --model.type=tie-of-two-shapes --pp=2 ...
#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/cli/common/program.h"
#include "penstock/errors.h"
#include "penstock/hybrid_metadata.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/trainable_model.h"
#include "penstock/trainer.h"

namespace penstock {
namespace {

// What is wrong with a model; members that are not set change nothing.
struct ModelFault {
  std::function<void(models::ModelPlan&)> plan = {};
  std::function<void(models::ModelStage&)> stage = {};  // of the stages after the first
  std::function<at::Tensor(const at::Tensor&)> relations = {};
};

// The hybrid model, with relations between equal tokens.
class FaultyModel : public models::TrainableModel {
 public:
  FaultyModel(const train::TrainConfig& config, ModelFault fault)
      : model_(models::trainable_hybrid(train::hybrid_options(config.model))),
        plan_(model_->plan()),
        fault_(std::move(fault)) {
    if (fault_.plan) fault_.plan(plan_);
  }
  const models::ModelPlan& plan() const override { return plan_; }
  std::shared_ptr<models::ModelStage> make_stage(const models::StagePart& part) const override {
    std::shared_ptr<models::ModelStage> stage = model_->make_stage(part);
    if (fault_.stage && part.index > 0) fault_.stage(*stage);
    return stage;
  }
  models::StageInputs inputs(const models::TokenBatch& batch) const override {
    models::TokenBatch whole = batch;
    at::Tensor same = batch.tokens.unsqueeze(1).eq(batch.tokens.unsqueeze(2));
    same = at::stack({same, same.logical_not()}, 1);
    if (fault_.relations) same = fault_.relations(same);
    whole.metadata = models::HybridMetadata{.relations = same}.keywords();
    return model_->inputs(whole);
  }

 private:
  std::shared_ptr<models::TrainableModel> model_;
  models::ModelPlan plan_;
  ModelFault fault_;
};

void add(const std::string& name, const ModelFault& fault) {
  train::register_model(name, [fault](const train::TrainConfig& config) {
    return std::make_shared<FaultyModel>(config, fault);
  });
}

at::Tensor* find_relations(models::ModelStage& stage,
                           torch::OrderedDict<std::string, at::Tensor>& parameters) {
  parameters = stage.named_parameters();
  return parameters.find("relations.weight");
}

void add_all() {
  add("tie-of-two-shapes", {.stage = [](models::ModelStage& stage) {
        torch::OrderedDict<std::string, at::Tensor> parameters;
        if (at::Tensor* table = find_relations(stage, parameters)) table->set_data(at::zeros({5, 3}));
      }});
  add("tie-of-a-frozen-copy", {.stage = [](models::ModelStage& stage) {
        torch::OrderedDict<std::string, at::Tensor> parameters;
        if (at::Tensor* table = find_relations(stage, parameters)) table->set_requires_grad(false);
      }});
  add("unknown-tie", {.plan = [](models::ModelPlan& plan) { plan.tied.push_back("embed.wieght"); }});
  add("metadata-of-another-batch", {.relations = [](const at::Tensor& relations) {
        return at::cat({relations, relations.narrow(0, 0, 1)});
      }});
  add("metadata-of-another-length",
      {.relations = [](const at::Tensor& relations) { return relations.narrow(3, 0, 7); }});
  add("metadata-of-another-dtype", {.relations = [](const at::Tensor& relations) {
        return at::complex(relations.to(at::kFloat), relations.to(at::kFloat));
      }});
  add("refused-by-one-stage", {.stage = [](models::ModelStage&) {
        throw ConfigError(describe("model.width", "16", "another one, at the stages after the first"));
      }});
}

}  // namespace
}  // namespace penstock

int main(int argc, char** argv) {
  penstock::add_all();
  return penstock::cli::run_tensor_program(argc, argv);
}
