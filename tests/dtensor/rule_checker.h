// Checks operators on distributed tensors against one process: every combination of placements on one mesh
// axis, random ones on two, forward and backward.
//
//   check_rule({.name = "softmax", .inputs = {randn({5, 7})},
//       .body = [](const auto& in) { return softmax(in[0], 1); }});
//
// Values are small multiples of 1/64, so that partial values add up to them exactly. An in-place body on a
// placement that cannot be written may throw ValueError, or StateError for a view that is a copy;
// `may_refuse` allows that. Everything else must produce the result of one process.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/world.h"

namespace penstock::test {

using Tensors = std::vector<at::Tensor>;

struct RuleCase {
  std::string name;
  Tensors inputs;  // floating-point ones get gradients, if `backward`
  std::function<Tensors(const Tensors&)> body;
  bool backward = true;
  bool partial = true;      // also try inputs that are partial sums
  bool may_refuse = false;  // ValueError and StateError are allowed
  double rtol = 1e-5, atol = 1e-6;
  // Inputs that stay replicated in all combinations (for example index lists).
  std::vector<std::size_t> replicated = {};
  // At most this many combinations are tried on each mesh, chosen at random.
  std::size_t most = 60;
};

// Multiples of 1/64 in about [-2, 2], never 0; the same for the same seed.
at::Tensor sample(at::IntArrayRef shape, int seed = 0);
// All positive.
at::Tensor sample_positive(at::IntArrayRef shape, int seed = 0);
// Integers in [0, limit).
at::Tensor sample_index(at::IntArrayRef shape, std::int64_t limit, int seed = 0);

// While an instance lives, the sharding rules used by calls count as checked, unless the test fails
// meanwhile. check_rule has one; a test that compares results itself creates one. The program writes the
// names of the checked rules, one per line, to the file named by PENSTOCK_RULES_CHECKED: rule_coverage_test
// finds the rules that no program has checked.
class RulesChecked {
 public:
  RulesChecked();
  ~RulesChecked();
  RulesChecked(const RulesChecked&) = delete;
  RulesChecked& operator=(const RulesChecked&) = delete;
};

// On meshes (2), (3) and (2, 2); fails the running test with the case, the mesh and the placements.
void check_rule(const RuleCase& rule_case);
void check_rules(const std::vector<RuleCase>& rule_cases);

// A distributed tensor with these placements and the given value: partial values differ from rank to rank.
at::Tensor spread(const at::Tensor& value, const comm::MeshGroups& mesh, const Placements& placements);

}  // namespace penstock::test
