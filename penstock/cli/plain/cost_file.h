// Measured times and memory of the parts of a model as JSON: `penstock inspect costs` writes it, `penstock
// partition --costs` reads it.
//
//   {"unit": "seconds and bytes per microbatch",
//    "embed": {"forward": 1e-4, "backward": 1e-4, "kept": 65536},
//    "blocks": {"attention": {"forward": ..., "backward": ..., "kept": ...}, "experts": {...}},
//    "head": {...}, "kept_by_stage": 0, "border": 131072}
#pragma once

#include <map>
#include <string>

#include "penstock/model_plan.h"

namespace penstock::cli {

struct PartCost {
  double forward = 0, backward = 0;  // times of one microbatch
  double kept = 0;                   // bytes from its forward to its backward
  double time() const { return forward + backward; }
};

struct CostFile {
  PartCost embed;
  std::map<std::string, PartCost> blocks;  // by kind (BlockPlan)
  PartCost head;
  double kept_by_stage = 0;  // bytes that a stage keeps of a microbatch besides its parts
  double border = 0;         // bytes of the activation between two stages
};

// Throws ConfigError that names the file and the entry for text that is not such a file.
CostFile read_cost_file(const std::string& path);
std::string to_json(const CostFile& costs);

// Returns the cost of each part of a model. Throws ConfigError for a kind of block that the file lacks.
models::PartCosts part_costs(const CostFile& costs, const models::ModelPlan& plan, const std::string& path);

}  // namespace penstock::cli
