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
#include "penstock/models/transformer/trainable_transformer.h"
#include "penstock/trainer.h"

namespace penstock::train {
namespace {

std::shared_ptr<models::TrainableModel> make_transformer(const TrainConfig& config) {
  return models::trainable_transformer(transformer_options(config.model));
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
  Models() { factories_.emplace("transformer", make_transformer); }

  mutable std::mutex mutex_;
  std::map<std::string, ModelFactory> factories_;
};

}  // namespace

models::TransformerOptions transformer_options(const ModelConfig& config) {
  return models::TransformerOptions{.vocabulary = config.vocabulary,
                                    .width = config.width,
                                    .layers = config.layers,
                                    .heads = config.heads,
                                    .key_value_heads = config.key_value_heads,
                                    .feed_width = config.feed_width,
                                    .context = config.context,
                                    .rope_theta = config.rope_theta,
                                    .norm_epsilon = config.norm_epsilon,
                                    .tie_head = config.tie_head,
                                    .dropout = config.dropout}
      .resolved();
}

std::shared_ptr<models::TrainableModel> configured_model(const TrainConfig& config) {
  const std::string& type = config.model.type;
  std::shared_ptr<models::TrainableModel> model =
      Models::all().find(type == "auto" ? "transformer" : type)(config);
  if (!model) throw StateError(fmt::format("register_model(\"{}\"): the function returned no model", type));
  return model;
}

void register_model(const std::string& name, ModelFactory factory) {
  Models::all().add(name, std::move(factory));
}

}  // namespace penstock::train
