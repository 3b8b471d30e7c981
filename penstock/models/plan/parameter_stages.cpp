#include "penstock/models/plan/parameter_stages.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/plan/element_count.h"

namespace penstock::models {

ParameterStages::ParameterStages(const std::vector<StagePart>& parts, const ModelPlan& plan) {
  for (const StagePart& part : parts) {
    for (const ParameterShape& parameter : plan.embed)
      if (part.has_embed() || (part.has_head() && is_tied(plan, parameter.name)))
        stages_[parameter.name].push_back(part.index);
    for (const SharedParameter& shared : plan.shared)
      if (has_copy(part, shared)) stages_[shared.parameter.name].push_back(part.index);
    for (std::int64_t block = part.first_block; block < part.end_block; ++block)
      for (const ParameterShape& parameter : plan.blocks.at(static_cast<std::size_t>(block)).parameters)
        stages_[parameter.name].push_back(part.index);
    if (part.has_head())
      for (const ParameterShape& parameter : plan.head) stages_[parameter.name].push_back(part.index);
  }
}

const std::vector<int>& ParameterStages::of(const std::string& name) const {
  const auto found = stages_.find(name);
  if (found == stages_.end())
    throw ValueError(describe("parameter", fmt::format("'{}'", name),
                              "a name of the model, like blocks.0.feed.up.weight"));
  return found->second;
}

std::vector<int> stages_of_parameter(const std::vector<StagePart>& parts, const ModelPlan& plan,
                                     const std::string& name) {
  return ParameterStages(parts, plan).of(name);
}

}  // namespace penstock::models
