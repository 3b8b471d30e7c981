// Shapes and cost models for tests of the simulator and the planner.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/errors.h"
#include "penstock/generators.h"

namespace penstock::plan::test {

inline schedule::PipelineShape shape(int ranks, int stages_per_rank, int microbatches) {
  schedule::PipelineShape result;
  result.ranks = ranks;
  result.stages_per_rank = stages_per_rank;
  result.microbatches = microbatches;
  return result;
}

struct Case {
  schedule::ScheduleKind kind;
  schedule::PipelineShape shape;
  std::string name() const {
    return std::string(to_text(kind)) + " P=" + std::to_string(shape.ranks) +
           " V=" + std::to_string(shape.stages_per_rank) + " M=" + std::to_string(shape.microbatches);
  }
};

// Every kind at every legal shape of a small range.
inline std::vector<Case> legal_cases(const std::vector<int>& ranks, const std::vector<int>& microbatches) {
  std::vector<Case> cases;
  for (const schedule::ScheduleKind kind : schedule::all_schedule_kinds()) {
    for (const int p : ranks) {
      for (const int v : {1, 2, 3}) {
        for (const int m : microbatches) {
          try {
            check_shape(kind, shape(p, v, m));
          } catch (const ValueError&) {
            continue;
          }
          cases.push_back({kind, shape(p, v, m)});
        }
      }
    }
  }
  return cases;
}

// Times in [low, high] for each stage and kind.
inline CostModel random_costs(std::mt19937& random, int stages, double low, double high) {
  std::uniform_real_distribution<double> time(low, high);
  CostModel model;
  model.stages.clear();
  for (int stage = 0; stage < stages; ++stage) {
    model.stages.push_back(
        {.forward = time(random), .backward_input = time(random), .backward_weight = time(random)});
  }
  return model;
}

}  // namespace penstock::plan::test
