// Small questions about plans that several files ask.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/model_plan.h"

namespace penstock::models {

std::int64_t element_count(const ParameterShape& parameter);
std::int64_t element_count(const std::vector<ParameterShape>& parameters);

// Returns whether the last stage uses a parameter of the embedding, too.
bool is_tied(const ModelPlan& plan, const std::string& name);
// Returns whether a stage has one of the blocks that use the parameter, hence a copy of it.
bool has_copy(const StagePart& part, const SharedParameter& shared);

}  // namespace penstock::models
