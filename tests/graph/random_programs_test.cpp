// Random programs of views, dtypes, conjugates, overlapping inputs, other memory and writes in backward,
// through every way to run a captured function.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph_compiler.h"
#include "tests/graph/cache_folder.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/program_paths.h"
#include "tests/graph/random_program.h"

namespace penstock::graph {

PathUnderTest path_of_compiler(const std::string& name) {
  return {"compiler " + name,
          [name](const Function& function, const CompileOptions& options) -> CallOfProgram {
            const auto call = std::make_shared<std::optional<CompiledCall>>();
            return [=](const Values& inputs) {
              if (!*call)
                call->emplace(partition(capture_function(function, inputs), options.partitioner),
                              graph_compiler(name), CompiledCallOptions{.exact = true});
              return (*call)->run(inputs);
            };
          }};
}

PathUnderTest path_of_compiled() {
  return {"Compiled", [](const Function& function, const CompileOptions& options) -> CallOfProgram {
            const auto compiled = std::make_shared<Compiled>(function, options);
            return [=](const Values& inputs) { return (*compiled)(inputs); };
          }};
}

PathUnderTest path_of_cache(const std::string& compiler) {
  return {"cache, compiler " + compiler,
          [compiler](const Function& function, const CompileOptions& options) -> CallOfProgram {
            const auto folder = std::make_shared<CacheFolder>();
            CompileOptions kept = folder->options("a program", options);
            kept.compiler = compiler;
            kept.compile_exact = true;
            const auto calls = std::make_shared<int>(0);
            return [=](const Values& inputs) {
              static_cast<void>(folder);  // it lives as long as the call
              Compiled compiled(function, kept);
              Values results = compiled(inputs);
              if (++*calls == 2) {
                EXPECT_EQ(compiled.loaded(), 1u) << compiled.cache_counts().text();
              }
              return results;
            };
          }};
}

namespace random_programs_test {
namespace {

enum class Kind { Training, NoGrad, Inference, Dynamic };

Tensors leaves_of(unsigned seed, Kind kind, std::int64_t rows) {
  torch::manual_seed(seed);
  const bool grad = kind == Kind::Training || kind == Kind::Dynamic;
  const auto floats = [&](at::IntArrayRef sizes) { return torch::randint(-4, 5, sizes).to(at::kFloat); };
  return {floats({rows, 4}).set_requires_grad(grad),
          at::complex(floats({rows, 4}), floats({rows, 4})).set_requires_grad(grad && seed % 3 != 0),
          floats({4}).set_requires_grad(grad && seed % 2 == 0)};
}

Tensors inputs_of(unsigned seed, Kind kind, const Tensors& fresh) {
  Tensors inputs = cloned(fresh);
  const bool alone = kind == Kind::Dynamic;  // inputs with dynamic dims share no memory
  if (seed % 7 == 1) inputs[1] = inputs[1].conj();
  if (seed % 7 == 2) inputs[0] = inputs[0]._neg_view();
  if (!alone) {
    if (seed % 7 == 3) inputs[2] = inputs[2].unsqueeze(0).expand({3, 4});
    if (seed % 7 == 4) inputs.push_back(inputs[0].slice(0, 1));
    if (seed % 7 == 5) inputs.push_back(inputs[1].select(0, 1));
    if (seed % 7 == 6) inputs.push_back(at::real(inputs[1]));
  }
  // A buffer that needs no gradient, for what is written in backward, given other memory or resized.
  inputs.push_back(torch::full({2, 2}, 2.f));
  return inputs;
}

// Whether the program is legal, runs through the path, and does the same there.
enum class Outcome { Illegal, Refused, Same };

Outcome compare(const PathUnderTest& path, unsigned seed, Kind kind) {
  const c10::AutoGradMode mode(kind != Kind::NoGrad);
  std::optional<c10::InferenceMode> inference;
  if (kind == Kind::Inference) inference.emplace();
  const Function function =
      over_tensors([seed](const Tensors& in) { return random_program(seed, in, Looks::AnyWrite); });
  CompileOptions options{.partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default};
  if (kind == Kind::Dynamic) options.dynamic.dims = {{0, 0, "B", 2}, {1, 0, "B", 2}};
  const CallOfProgram call = path.prepare(function, options);
  bool same = false;
  Tensors first;  // gradients; a run with equal inputs has the same, bit for bit
  for (const std::int64_t rows : {3, 3, kind == Kind::Dynamic ? 5 : 3}) {
    const Tensors leaves = leaves_of(seed, kind, rows);
    const auto prepare = [&](const Tensors& fresh) { return inputs_of(seed, kind, fresh); };
    Trace expected;
    try {
      expected = trace_of(function, leaves, prepare);
    } catch (const c10::Error&) {
      break;
    }
    try {
      const Trace actual = trace_of(call, leaves, prepare);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same(actual.inputs, expected.inputs, "input");
      expect_same_look(actual.outputs, expected.outputs, "output");
      if (!expected.refused) {
        EXPECT_FALSE(actual.refused);
        expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
        if (!first.empty() && rows == 3)
          expect_same(actual.gradients, first, "in another run, gradient", Compare::Exactly);
        first = actual.gradients;
      }
      expect_same_memory(actual, expected);
      same = true;
    } catch (const NotImplemented&) {
      return same ? Outcome::Same : Outcome::Refused;
    } catch (const std::exception& error) {
      // A function whose own backward throws cannot be captured.
      if (!expected.refused) ADD_FAILURE() << error.what();
      return Outcome::Refused;
    }
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "the program, as it is written: "
                    << to_text(capture_forward(function, values_of(prepare(cloned(leaves)))));
      return Outcome::Same;
    }
  }
  return same ? Outcome::Same : Outcome::Illegal;
}

}  // namespace
}  // namespace random_programs_test

unsigned compare_random_programs(const PathUnderTest& path, const ProgramRange& range) {
  using namespace random_programs_test;
  unsigned legal = 0, compared = 0;
  const WarningCapture silent;  // of sizes that are captured separately
  for (unsigned i = 0; i < range.programs; ++i) {
    const unsigned seed = range.first + i;
    Kind kind = static_cast<Kind>(seed % 4);
    if (kind == Kind::Dynamic && !range.dynamic) kind = Kind::Training;
    SCOPED_TRACE(path.name + ", program " + std::to_string(seed) + ", kind " +
                 std::to_string(static_cast<int>(kind)));
    const Outcome outcome = compare(path, seed, kind);
    if (::testing::Test::HasFailure()) return compared;
    legal += outcome == Outcome::Illegal ? 0 : 1;
    compared += outcome == Outcome::Same ? 1 : 0;
  }
  EXPECT_GE(compared * 2, legal) << compared << " of " << legal << " legal programs";
  return compared;
}

namespace random_programs_test {

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 240;
}

// Each capture of the compiler "fused" runs a compiler of C++.
unsigned programs_for(const std::string& compiler) {
  return compiler == kFusedCompiler ? std::max(programs() / 10, 20u) : programs();
}

TEST(RandomPrograms, ThroughCompiled) {
  EXPECT_GE(compare_random_programs(path_of_compiled(), {.programs = programs()}) * 4, programs());
}

TEST(RandomPrograms, ThroughEveryCompiler) {
  for (const std::string& name : graph_compiler_names())
    EXPECT_GE(compare_random_programs(path_of_compiler(name),
                                      {.first = 100000, .programs = programs_for(name), .dynamic = false}) *
                  4,
              programs_for(name))
        << name;
}

// Each call is made by an object of its own: the first one stores it, the second one must load it.
TEST(RandomPrograms, ThroughTheCacheAndEveryCompiler) {
  for (const std::string& name : graph_compiler_names())
    EXPECT_GE(
        compare_random_programs(path_of_cache(name), {.first = 200000, .programs = programs_for(name)}) * 4,
        programs_for(name))
        << name;
}

}  // namespace random_programs_test
}  // namespace penstock::graph
