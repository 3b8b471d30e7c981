#include "penstock/train/job/configured_activations.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/graph/saving/activation_budget.h"
#include "penstock/graph/saving/activation_policy.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/job/stage_copies.h"

namespace penstock::train {

graph::ActivationOptions configured_activations(const TrainConfig& config) {
  return {.budget = config.training.activation_budget,
          .policy = config.training.activation_policy,
          .part_of_model = true};
}

ModelActivations activations_of_whole_model(const TrainConfig& config) {
  ModelActivations whole{.options = configured_activations(config), .note = {}};
  const graph::ActivationBudget budget =
      graph::parse_activation_budget(config.training.activation_budget, "training.activation_budget");
  if (!budget.bytes) return whole;
  const int stages = parts_of_model(configured_schedule(config.layout).stages());
  if (stages == 1) return whole;
  // What text can hold exactly, and far more than any machine has.
  constexpr std::int64_t kMost = std::int64_t{1} << 53;
  const std::int64_t bytes = std::min(*budget.bytes, kMost / stages) * stages;
  whole.options.budget = fmt::format("{} B", bytes);
  whole.note = fmt::format("training.activation_budget is {} for each of {} stages, {} for the whole model",
                           budget.text(), stages, format_bytes(static_cast<std::uint64_t>(bytes)));
  return whole;
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
