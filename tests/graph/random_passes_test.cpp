// Random programs through random subsets of the passes in random order: bit for bit what the program computes
// when it is run operator by operator.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/graph/passes/pass_list.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph/run/graph_passes.h"
#include "penstock/graph_compiler.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/pass_program.h"
#include "tests/graph/program_paths.h"

namespace penstock::graph {
namespace random_passes_test {
namespace {

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 400;
}

// A random subset, possibly with repetitions, in random order.
PassList random_passes(unsigned seed) {
  std::mt19937 random(seed * 7919 + 1);
  std::vector<PassPointer> all = standard_passes(), chosen;
  const std::size_t count = random() % (all.size() + 4);
  for (std::size_t i = 0; i < count; ++i) chosen.push_back(all[random() % all.size()]);
  return PassList(std::move(chosen), /*verify=*/true);
}

std::string text_of(const PassList& passes) {
  std::string text;
  for (const PassPointer& pass : passes.passes()) text += std::string(pass->name()) + " ";
  return text;
}

CallOfProgram call_with(const Function& function, PassList passes, Partitioner partitioner,
                        std::size_t* changes = nullptr) {
  const auto call = std::make_shared<std::optional<CompiledCall>>();
  return [=](const Values& inputs) {
    if (!*call) {
      PassLog log;
      FunctionCapture capture = capture_function(function, inputs);
      run_passes_on_joint(capture, passes, &log);
      call->emplace(partition(std::move(capture), partitioner, passes, &log),
                    graph_compiler(kExecutorCompiler));
      for (const PassRun& run : log.runs)
        if (changes && run.nodes_before != run.nodes_after) ++*changes;
    }
    return (*call)->run(inputs);
  };
}

// Zeros have signs, and a NaN is a NaN whatever its bits are.
void expect_same_bits(const Tensors& actual, const Tensors& expected, const char* what) {
  expect_same(actual, expected, what, Compare::Exactly);
  for (std::size_t i = 0; i < actual.size() && i < expected.size(); ++i) {
    if (!actual[i].defined() || !expected[i].defined() || !actual[i].is_floating_point()) continue;
    if (actual[i].sizes() != expected[i].sizes()) continue;
    const auto signs = [](const at::Tensor& x) { return x.detach().signbit().logical_and(x.eq(x)); };
    EXPECT_TRUE(torch::equal(signs(actual[i]), signs(expected[i]))) << what << " " << i << ", signs";
  }
}

Tensors leaves_of(unsigned seed, bool grad) {
  torch::manual_seed(seed);
  at::Tensor x = torch::randint(-3, 4, {3, 4}).to(at::kFloat);
  if (seed % 4 == 0) x = torch::randn({3, 4});
  // -0.0, an infinity, a NaN and a denormal number.
  if (seed % 5 == 0) {
    x[0][0] = -0.0;
    x[1][1] = INFINITY;
    x[2][2] = NAN;
    x[0][3] = 1e-41f;
  }
  at::Tensor y = torch::randint(-3, 4, {4}).to(at::kFloat) * -0.0;
  return {x.set_requires_grad(grad), y.set_requires_grad(grad && seed % 2 == 0),
          torch::randint(-3, 4, {2, 3})};
}

// Whether the program is legal, and the same with passes.
bool compare(unsigned seed, std::size_t& changes) {
  const bool grad = seed % 3 != 0;
  const c10::AutoGradMode mode(grad);
  const Function function = over_tensors([seed](const Tensors& in) { return pass_program(seed, in); });
  const PassList passes = random_passes(seed);
  const Partitioner partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default;
  const Tensors leaves = leaves_of(seed, grad);
  const auto prepare = [](const Tensors& fresh) { return cloned(fresh); };
  Trace expected, plain, actual;
  try {
    expected = trace_of(function, leaves, prepare);
  } catch (const c10::Error&) {
    return false;
  }
  SCOPED_TRACE("program " + std::to_string(seed) + " with passes " + text_of(passes));
  try {
    const CallOfProgram without =
        call_with(function, PassList(std::vector<PassPointer>(), false), partitioner);
    plain = trace_of(without, leaves, prepare);
  } catch (const NotImplemented&) {
    return false;
  } catch (const std::exception& error) {
    // A function whose own backward throws cannot be captured.
    if (!expected.refused) ADD_FAILURE() << error.what();
    return false;
  }
  try {
    const CallOfProgram with = call_with(function, passes, partitioner, &changes);
    for (int run = 0; run < 2; ++run) {
      actual = trace_of(with, leaves, prepare);
      expect_same_bits(actual.outputs, expected.outputs, "output");
      expect_same_bits(actual.inputs, expected.inputs, "input");
      EXPECT_EQ(actual.refused, plain.refused);
      // Autograd adds gradients in another order if all of forward is one node.
      expect_same(actual.gradients, plain.gradients, "gradient", Compare::Exactly);
      expect_same_look(actual.outputs, expected.outputs, "output");
    }
    expect_same_memory(actual, expected);  // writes the results
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  if (::testing::Test::HasFailure())
    ADD_FAILURE() << "the program, as it is written: "
                  << to_text(capture_forward(function, values_of(prepare(cloned(leaves)))));
  return true;
}

}  // namespace

TEST(RandomPasses, SubsetsInRandomOrderChangeNoBit) {
  const WarningCapture silent;
  unsigned legal = 0;
  std::size_t changes = 0;
  for (unsigned seed = 0; seed < programs() && !::testing::Test::HasFailure(); ++seed)
    legal += compare(seed, changes) ? 1 : 0;
  EXPECT_GE(legal * 2, programs());
  EXPECT_GE(changes, programs() / 2) << "the passes have hardly anything to do";
}

// Programs of views, dtypes, conjugates, writes and other memory.
TEST(RandomPasses, OverAnyProgram) {
  const auto next = std::make_shared<unsigned>(0);
  const PathUnderTest path{"random passes",
                           [next](const Function& function, const CompileOptions& options) -> CallOfProgram {
                             return call_with(function, random_passes((*next)++), options.partitioner);
                           }};
  EXPECT_GE(compare_random_programs(path, {.first = 300000, .programs = programs(), .dynamic = false}) * 4,
            programs());
}

}  // namespace random_passes_test
}  // namespace penstock::graph
