#include "penstock/train/job/configured_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/models/transformer/trainable_transformer.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/trainer.h"

namespace penstock::train {
namespace {

std::shared_ptr<models::TrainableModel> make_transformer(const TrainConfig& config) {
  return models::trainable_transformer(transformer_options(config.model));
}

std::shared_ptr<models::TrainableModel> make_hybrid(const TrainConfig& config) {
  return models::trainable_hybrid(hybrid_options(config.model),
                                  1.0 / static_cast<double>(config.training.accumulation));
}

// Models by name. Registered at the start of a program, read by the threads of its ranks.
class Models {
 public:
  static Models& all() {
    static Models models;
    return models;
  }

  void add(const std::string& name, ModelFactory factory) {
    const std::lock_guard lock(mutex_);
    if (name.empty() || name == "auto" || !factories_.emplace(name, std::move(factory)).second)
      throw ValueError(describe("register_model", fmt::format("\"{}\"", name), "a name that is not in use",
                                "choose another name"));
  }

  ModelFactory find(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto found = factories_.find(name);
    if (found != factories_.end()) return found->second;
    std::vector<std::string> names{"auto"};
    for (const auto& [known, factory] : factories_) names.push_back(known);
    throw ConfigError(describe("model.type", quote(name), fmt::format("one of {}", fmt::join(names, ", ")),
                               "a program can add its own with register_model()"));
  }

 private:
  Models() : factories_{{"transformer", make_transformer}, {"hybrid", make_hybrid}} {}

  mutable std::mutex mutex_;
  std::map<std::string, ModelFactory> factories_;
};

}  // namespace

std::shared_ptr<models::TrainableModel> configured_model(const TrainConfig& config) {
  const std::string type = configured_type(config.model);
  std::shared_ptr<models::TrainableModel> model = Models::all().find(type)(config);
  if (!model) throw StateError(fmt::format("register_model(\"{}\"): the function returned no model", type));
  return model;
}

models::RecomputePlan configured_recompute(const TrainConfig& config, const models::TrainableModel& model,
                                           int stages) {
  const TrainingConfig& training = config.training;
  models::RecomputePlan plan = models::parse_recompute(training.recompute, model.plan());
  plan.stages = training.recompute_stages;
  plan.microbatches = training.recompute_microbatches;
  models::check_recompute(plan, stages, config.layout.microbatches);
  model.check_recompute(plan);
  return plan;
}

void register_model(const std::string& name, ModelFactory factory) {
  Models::all().add(name, std::move(factory));
}

}  // namespace penstock::train
