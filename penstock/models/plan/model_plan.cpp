#include "penstock/model_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "penstock/models/plan/element_count.h"

namespace penstock::models {

std::int64_t element_count(const ParameterShape& parameter) {
  return std::accumulate(parameter.shape.begin(), parameter.shape.end(), std::int64_t{1},
                         std::multiplies<>());
}

std::int64_t element_count(const std::vector<ParameterShape>& parameters) {
  std::int64_t count = 0;
  for (const ParameterShape& parameter : parameters) count += element_count(parameter);
  return count;
}

bool is_tied(const ModelPlan& plan, const std::string& name) {
  return std::find(plan.tied.begin(), plan.tied.end(), name) != plan.tied.end();
}

bool has_copy(const StagePart& part, const SharedParameter& shared) {
  return std::any_of(shared.blocks.begin(), shared.blocks.end(),
                     [&](std::int64_t block) { return block >= part.first_block && block < part.end_block; });
}

std::vector<ParameterShape> parameter_shapes(const ModelPlan& plan) {
  std::vector<ParameterShape> all = plan.embed;
  for (const SharedParameter& each : plan.shared) all.push_back(each.parameter);
  for (const BlockPlan& block : plan.blocks)
    all.insert(all.end(), block.parameters.begin(), block.parameters.end());
  all.insert(all.end(), plan.head.begin(), plan.head.end());
  return all;
}

std::int64_t parameter_count(const ModelPlan& plan) {
  std::int64_t count = element_count(plan.embed) + element_count(plan.head);
  for (const SharedParameter& each : plan.shared) count += element_count(each.parameter);
  for (const BlockPlan& block : plan.blocks) count += element_count(block.parameters);
  return count;
}

std::int64_t active_parameter_count(const ModelPlan& plan) {
  std::int64_t count = parameter_count(plan) - plan.inactive_embed_parameters - plan.head_inactive_parameters;
  for (const BlockPlan& block : plan.blocks) count -= block.inactive_parameters;
  return count;
}

double training_flops_per_token(const ModelPlan& plan) {
  double forward = plan.head_flops_per_token;
  for (const BlockPlan& block : plan.blocks) forward += block.flops_per_token;
  return 3 * forward;
}

}  // namespace penstock::models
