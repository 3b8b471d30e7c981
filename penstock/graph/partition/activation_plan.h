// Splits a joint graph so that what forward saves for backward fits a budget, with the least work done twice
// (docs/memory.md).
//
//   const ActivationPlan plan = plan_activations(joint, {.budget = "0.3", .policy = {"head: save"}});
//   plan.halves                                 // as of partition_default(joint)
//   plan.bytes, plan.cost                       // what is saved, and what recomputation costs
//   for (const Activation& each : plan.activations) ...
//
// Memory that forward makes and backward needs is saved or recomputed as a whole: views of saved memory are
// saved with it, views of recomputed memory are made again. Memory of inputs, parameters and constants is at
// hand anyway. Never recomputed, whatever the budget: operators with side effects, such as collectives, and
// random operators without explicit states (CompileOptions::explicit_random_states), since they would draw
// other numbers; all others have the same bits again.
// Of a graph with symbols, the sizes of its example decide.
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/compile_options.h"
#include "penstock/graph/partition/partition.h"

namespace penstock::graph {

// Part of the keys of stored graphs: another number for each change of what is chosen, as of the cost model.
inline constexpr int kActivationPlanVersion = 2;

// Memory that forward makes and that backward needs, or would need if it recomputed less.
struct Activation {
  enum class Fate : std::uint8_t { Saved, Recomputed };
  // Who decided: the choice under the budget, a rule, or the operator, which must not run twice.
  enum class Reason : std::uint8_t { Choice, Policy, RunsOnce };

  ValueId value = kNoValue;  // of the joint graph: the first one in this memory
  std::int64_t bytes = 0;
  std::int64_t cost = 0;  // of running the operator once more (operator_cost.h)
  std::string op;         // that makes it: "aten::mm"
  std::string module;     // that it belongs to; empty if unknown
  Fate fate = Fate::Saved;
  Reason reason = Reason::Choice;
};

struct ActivationPlan {
  Partition halves;
  detail::SplitOrigin origin;           // of the halves
  std::vector<Activation> activations;  // in the order of forward
  std::int64_t budget_bytes = 0;
  std::int64_t bytes = 0;         // saved
  std::int64_t all_bytes = 0;     // if nothing were recomputed
  std::int64_t least_bytes = 0;   // the smallest budget that can be met
  std::int64_t cost = 0;          // of what backward recomputes
  std::int64_t forward_cost = 0;  // of forward, to compare with
  double gap = 0;                 // the cost is within this fraction of the least one
};

// Throws ValueError for a graph with writes, for a budget that cannot be met, which names the least one and
// the tensors that need it, and for a pattern that matches no module, unless
// ActivationOptions::part_of_model is set.
ActivationPlan plan_activations(const JointGraph& joint, const ActivationOptions& options);

// "aten::mm in blocks.0.feed (4.0 MiB, must run once)"
std::string to_text(const Activation& activation);

}  // namespace penstock::graph
