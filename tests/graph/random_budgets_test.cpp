// Random programs at random activation budgets: bit for bit what they compute without.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/graph/partition/activation_plan.h"
#include "penstock/graph/run/compiled.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/pass_program.h"
#include "tests/graph/program_paths.h"
#include "tests/has_text.h"

namespace penstock::graph {
namespace random_budgets_test {

using penstock::test::has_text;

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 200;
}

std::string random_budget(unsigned seed) {
  constexpr const char* kBudgets[] = {"0", "0", "0.1", "0.25", "0.4", "0.5", "0.7", "0.9", "200 B", "1"};
  return kBudgets[seed * 7919U % 10U];
}

// A call at a budget, or at the least one if that cannot be met.
CallOfProgram call_at(const Function& function, CompileOptions options, std::size_t* recomputing = nullptr) {
  const auto compiled = std::make_shared<std::optional<Compiled>>();
  return [=](const Values& inputs) mutable {
    if (!*compiled) compiled->emplace(function, options);
    try {
      (*compiled)->prepare(inputs);
    } catch (const ValueError& error) {
      if (!has_text(error.what(), "the activation budget")) throw;
      options.activations.budget = "0";
      compiled->emplace(function, options);
    }
    Values results = (**compiled)(inputs);
    if (recomputing && (*compiled)->captures() > 0) {
      const std::size_t last = (*compiled)->captures() - 1;
      const JointGraph& joint = (*compiled)->joint(last);
      if (!joint.tangents.empty() && options.activations.decide() &&
          plan_activations(joint, options.activations).cost > 0)
        ++*recomputing;
    }
    return results;
  };
}

TEST(RandomBudgets, OverAnyProgram) {
  const auto next = std::make_shared<unsigned>(0);
  const PathUnderTest path{"random budgets",
                           [next](const Function& function, const CompileOptions& given) -> CallOfProgram {
                             CompileOptions options = given;
                             options.partitioner = Partitioner::Default;
                             options.activations.budget = random_budget(*next);
                             options.explicit_random_states = *next % 2 == 0;
                             ++*next;
                             return call_at(function, options);
                           }};
  EXPECT_GE(compare_random_programs(path, {.first = 400000, .programs = programs()}) * 4, programs());
}

// Programs with dropout: results of the plain run, and gradients of a capture that saves everything, bit for
// bit.
TEST(RandomBudgets, ProgramsThatDraw) {
  const WarningCapture silent;
  unsigned legal = 0;
  std::size_t recomputing = 0;
  for (unsigned seed = 0; seed < programs() && !::testing::Test::HasFailure(); ++seed) {
    const Function function = over_tensors([seed](const Tensors& in) { return pass_program(seed, in); });
    torch::manual_seed(seed);
    const Tensors leaves{torch::randn({3, 4}).set_requires_grad(true),
                         torch::randn({4}).set_requires_grad(seed % 2 == 0), torch::randint(-3, 4, {2, 3})};
    const auto prepare = [](const Tensors& fresh) { return cloned(fresh); };
    CompileOptions options{.explicit_random_states = seed % 3 != 0};
    SCOPED_TRACE("program " + std::to_string(seed) + " at " + random_budget(seed));
    Trace expected, plain;
    try {
      expected = trace_of(function, leaves, prepare);
    } catch (const c10::Error&) {
      continue;
    }
    try {
      plain = trace_of(call_at(function, options), leaves, prepare);
    } catch (const NotImplemented&) {
      continue;
    } catch (const std::exception& error) {
      // A function whose own backward throws cannot be captured.
      if (!expected.refused) ADD_FAILURE() << error.what();
      continue;
    }
    ++legal;
    options.activations.budget = random_budget(seed);
    const CallOfProgram call = call_at(function, options, &recomputing);
    for (int run = 0; run < 2; ++run) {
      const Trace actual = trace_of(call, leaves, prepare);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same(actual.inputs, expected.inputs, "input");
      EXPECT_EQ(actual.refused, plain.refused);
      expect_same(actual.gradients, plain.gradients, "gradient");
    }
  }
  EXPECT_GE(legal * 2, programs());
  EXPECT_GE(recomputing, programs() / 4) << "hardly anything is recomputed";
}

}  // namespace random_budgets_test
}  // namespace penstock::graph
