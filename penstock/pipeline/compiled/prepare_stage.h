// A compiled stage (compiled_stage.h) that can be compiled without running it, for artifacts.
//
//   PreparableStage stage = preparable_stage(module, options);
//   {
//     const StepGuard step(context);             // of a step like those that will run
//     const at::AutoGradMode training(true);
//     stage.prepare(args, kwargs);               // captures and compiles for a forward with these arguments
//   }
//
// Thread safety: that of the module.
#pragma once

#include <functional>

#include "penstock/compiled_stage.h"
#include "penstock/pytree.h"
#include "penstock/stage_module.h"

namespace penstock {

struct PreparableStage {
  StageModule module;  // what compiled_stage() returns
  // Captures, or loads, the graphs for a forward with such arguments; nothing is computed. Sharded parameters
  // are gathered meanwhile. Throws what forward throws.
  std::function<void(const Tree& args, const Tree& kwargs)> prepare;
};

PreparableStage preparable_stage(StageModule module, CompiledStageOptions options = {});

}  // namespace penstock
