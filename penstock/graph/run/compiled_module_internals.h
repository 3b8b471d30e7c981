// What tools and tests need of a compiled module (compile.h) beyond its public API: its graphs and their
// interfaces.
//
//   auto fast = graph::compile(net);
//   fast->forward(x);
//   const JointGraph& joint = compiled_entry(*fast, 0).joint(0);
#pragma once

#include <cstddef>

#include "penstock/compile.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/pytree.h"

namespace penstock::graph {

// The parameters and buffers of the module.
const ModuleState& state_of(const CompiledModuleBase& module);

// One entry for each kind of arguments so far (types and nesting), each with one capture for each kind of
// call.
std::size_t entry_count(const CompiledModuleBase& module);
const Compiled& compiled_entry(const CompiledModuleBase& module, std::size_t entry);
const TreeSpec& arguments_spec(const CompiledModuleBase& module, std::size_t entry);
const TreeSpec& results_spec(const CompiledModuleBase& module, std::size_t entry, std::size_t capture);

}  // namespace penstock::graph
