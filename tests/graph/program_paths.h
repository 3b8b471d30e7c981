// Ways to run a captured function, and a comparison of one of them with the plain run over random programs.
//
//   compare_random_programs({"mine", [](const Function& function) { return my_call(function); }}, {.programs
//   = 400});
//
// Every program is run in each kind of call: training, without gradients, in inference mode, and with dynamic
// dims where the path supports them. Results, inputs, gradients, and which tensors share memory must be those
// of the plain run.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "penstock/compile_options.h"
#include "penstock/graph/trace/analyze.h"

namespace penstock::graph {

using CallOfProgram = std::function<Values(const Values&)>;

struct PathUnderTest {
  std::string name;
  // Takes a function, returns a call of it that captures, compiles, stores and loads as it likes.
  std::function<CallOfProgram(const Function& function, const CompileOptions& options)> prepare;
};

// Captures, compiles by a compiler known by its name, and calls.
PathUnderTest path_of_compiler(const std::string& name);
// Compiled, which chooses between captures.
PathUnderTest path_of_compiled();
// Each call by a new Compiled with the same cache folder: stored by the first one, loaded by the second.
PathUnderTest path_of_cache(const std::string& compiler);

struct ProgramRange {
  unsigned first = 0, programs = 0;
  bool dynamic = true;  // the path supports dynamic dims
};
// Fails the current test at the first difference. Returns how many programs ran through the path; those that
// it refuses with NotImplemented do not count.
unsigned compare_random_programs(const PathUnderTest& path, const ProgramRange& range);

}  // namespace penstock::graph
