#include "penstock/train/job/configured_activations.h"

#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/saving/activation_policy.h"

namespace penstock::train {

graph::ActivationOptions configured_activations(const TrainConfig& config) {
  return {.budget = config.training.activation_budget,
          .policy = config.training.activation_policy,
          .part_of_model = true};
}

void check_activation_policy(const TrainConfig& config, const models::ModelPlan& plan) {
  const graph::ActivationPolicy policy =
      graph::parse_activation_policy(config.training.activation_policy, "training.activation_policy");
  if (policy.empty()) return;
  std::vector<std::string> modules;
  for (const models::ParameterShape& parameter : models::parameter_shapes(plan)) {
    const std::size_t dot = parameter.name.rfind('.');
    modules.push_back(dot == std::string::npos ? std::string() : parameter.name.substr(0, dot));
  }
  if (const std::string unmatched = policy.unmatched(modules, "training.activation_policy");
      !unmatched.empty())
    throw ConfigError(unmatched);
}

}  // namespace penstock::train
