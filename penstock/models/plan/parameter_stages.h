// Finds the stages that hold a parameter, for many names (stages_of_parameter is for one).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "penstock/model_plan.h"

namespace penstock::models {

// Construction takes time and memory linear in the number of parameters.
class ParameterStages {
 public:
  ParameterStages(const std::vector<StagePart>& parts, const ModelPlan& plan);
  // In stage order. Throws like stages_of_parameter. The reference is valid as long as this object.
  const std::vector<int>& of(const std::string& name) const;

 private:
  std::map<std::string, std::vector<int>> stages_;
};

}  // namespace penstock::models
