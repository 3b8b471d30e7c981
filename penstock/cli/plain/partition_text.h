// A partition as text, JSON and picture.
#pragma once

#include <string>

#include "penstock/cli/plain/partition_plan.h"

namespace penstock::cli {

// A table with a line for each stage, sums of the ranks, and a comparison with other ways to divide the
// model.
std::string to_text(const PartitionPlan& plan);
std::string to_json(const PartitionPlan& plan);
// An SVG picture. `title` names the configuration.
std::string draw(const PartitionPlan& plan, const std::string& title);

// "AEM|EAE|ME": the parts as model.pattern. Empty if a stage has no blocks, which no pattern can say.
std::string pattern_of(const PartitionPlan& plan);

}  // namespace penstock::cli
