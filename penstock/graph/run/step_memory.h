// The memory of a training step through a captured graph, tensor by tensor: forward, what it saves, backward.
//
//   const StepMemory step = memory_of_step(joint, plan_activations(joint, {.budget = "0.5"}));
//   step.peak_bytes()                      // of one microbatch; parameters and inputs not counted
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "penstock/graph/compiler/run_memory.h"
#include "penstock/graph/partition/activation_plan.h"

namespace penstock::graph {

// Memory that exists while the operators [first, last] of the step run: those of forward, then those of
// backward.
struct StepTensor {
  enum class Kind : std::uint8_t {
    Temporary,   // used in its own half only
    Saved,       // made by forward for backward
    Recomputed,  // made again by backward
    Gradient,    // made by backward, and returned
    Given        // a gradient of a result that backward is given
  };
  Kind kind = Kind::Temporary;
  ValueId value = kNoValue;  // of the joint graph
  std::int64_t bytes = 0;
  std::size_t first = 0, last = 0;
};

struct StepMemory {
  std::vector<StepTensor> tensors;
  std::vector<std::int64_t> live;     // by operator: bytes while it runs
  std::vector<std::size_t> nodes;     // by operator: the node of the joint graph
  std::size_t forward_operators = 0;  // the others are those of backward

  std::int64_t peak_bytes() const;
  std::size_t peak_operator() const;
};

StepMemory memory_of_step(const JointGraph& joint, const ActivationPlan& plan);

}  // namespace penstock::graph
