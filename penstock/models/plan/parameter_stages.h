// Finds the stages that hold a parameter, for many names (stages_of_parameter is for one).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

// Construction takes time and memory linear in the number of layers.
class ParameterStages {
 public:
  ParameterStages(const std::vector<StagePart>& parts, const TransformerOptions& options);
  // In stage order. Throws like stages_of_parameter. The reference is valid as long as this object.
  const std::vector<int>& of(const std::string& name) const;

 private:
  std::vector<std::vector<int>> of_block_;
  std::vector<int> of_embed_, of_head_;
  std::set<std::string> in_block_, in_none_;  // names
};

}  // namespace penstock::models
