#include "tests/dtensor/rule_checker.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <random>
#include <set>

#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"

namespace penstock::test {
namespace {

using namespace std::chrono_literals;

std::vector<Placement> choices(const at::Tensor& tensor, bool partial) {
  std::vector<Placement> all{Replicate{}};
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) all.push_back(Shard{dim});
  if (partial && tensor.is_floating_point()) all.push_back(Partial{});
  return all;
}

// The placements of every input on a mesh.
using Combination = std::vector<Placements>;

std::vector<Combination> combinations(const RuleCase& rule_case, std::size_t axes,
                                      const std::vector<std::int64_t>& mesh_shape) {
  std::mt19937 random(7);
  std::vector<std::vector<Placements>> options;
  for (std::size_t i = 0; i < rule_case.inputs.size(); ++i) {
    std::vector<Placements> mine{Placements(axes)};
    if (std::find(rule_case.replicated.begin(), rule_case.replicated.end(), i) ==
        rule_case.replicated.end()) {
      mine.clear();
      const auto one = choices(rule_case.inputs[i], rule_case.partial);
      if (axes == 1) {
        for (const Placement& placement : one) mine.push_back({placement});
      } else {
        for (const Placement& a : one)
          for (const Placement& b : one) {
            mine.push_back({a, b});
            // Split by the right axis first, as sharded data parallelism does to tensor-parallel parameters.
            if (a.is_shard() && a == b) mine.push_back({StridedShard{a.dim(), mesh_shape[1]}, b});
            if (a.is_replicate() && b.is_shard()) mine.push_back({a, StridedShard{b.dim(), 2}});
          }
      }
    }
    options.push_back(std::move(mine));
  }
  std::size_t count = 1;
  for (const auto& mine : options) count *= mine.size();
  std::vector<Combination> all;
  if (count <= rule_case.most) {
    for (std::size_t number = 0; number < count; ++number) {
      Combination combination;
      std::size_t rest = number;
      for (const auto& mine : options) {
        combination.push_back(mine[rest % mine.size()]);
        rest /= mine.size();
      }
      all.push_back(std::move(combination));
    }
  } else {
    for (std::size_t i = 0; i < rule_case.most; ++i) {
      Combination combination;
      for (const auto& mine : options) combination.push_back(mine[random() % mine.size()]);
      all.push_back(std::move(combination));
    }
  }
  return all;
}

struct Outcome {
  Tensors outputs, gradients;
};

bool differentiable(const at::Tensor& tensor) { return tensor.is_floating_point(); }

Outcome run(const RuleCase& rule_case, const Tensors& inputs,
            const std::function<at::Tensor(const at::Tensor&, std::size_t)>& weigh) {
  Outcome outcome;
  Tensors leaves;
  for (const at::Tensor& input : inputs)
    leaves.push_back(input.detach().requires_grad_(rule_case.backward && differentiable(input)));
  Tensors arguments;
  // In-place bodies must not write leaves.
  for (const at::Tensor& leaf : leaves) arguments.push_back(leaf.requires_grad() ? leaf.alias() : leaf);
  outcome.outputs = rule_case.body(arguments);
  if (!rule_case.backward) return outcome;
  at::Tensor loss;
  for (std::size_t i = 0; i < outcome.outputs.size(); ++i) {
    if (!outcome.outputs[i].requires_grad()) continue;
    const at::Tensor term = weigh(outcome.outputs[i], i);
    loss = loss.defined() ? loss + term : term;
  }
  if (!loss.defined()) return outcome;
  loss.backward();
  for (const at::Tensor& leaf : leaves)
    outcome.gradients.push_back(leaf.requires_grad() ? leaf.grad() : at::Tensor());
  return outcome;
}

at::Tensor weights_of(const at::Tensor& output, std::size_t index) {
  return sample(output.sizes(), 100 + static_cast<int>(index)).to(output.dtype());
}

std::string compare(const at::Tensor& expected, const at::Tensor& actual, const RuleCase& rule_case) {
  if (!expected.defined() && !actual.defined()) return "";
  if (!expected.defined() || !actual.defined())
    return fmt::format("expected {}, got {}", expected.defined() ? "a tensor" : "none",
                       actual.defined() ? "a tensor" : "none");
  if (expected.sizes() != actual.sizes())
    return fmt::format("shape [{}], expected [{}]", fmt::join(actual.sizes(), ", "),
                       fmt::join(expected.sizes(), ", "));
  if (expected.scalar_type() != actual.scalar_type()) return "another dtype";
  if (at::equal(actual, expected)) return "";  // most are, and comparing them so costs a tenth
  if (at::allclose(actual.to(at::kDouble), expected.to(at::kDouble), rule_case.rtol, rule_case.atol, true))
    return "";
  return fmt::format("differs by up to {}",
                     (actual.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>());
}

at::Tensor whole(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return is_dtensor(tensor) ? full_tensor(tensor.detach()) : tensor.detach();
}

void check_on(const RuleCase& rule_case, const std::vector<std::int64_t>& mesh_shape, const Outcome& expected,
              std::size_t& tried, std::size_t& refused) {
  int size = 1;
  for (const std::int64_t n : mesh_shape) size *= static_cast<int>(n);
  std::mutex mutex;
  comm::run_ranks(size, 240s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", mesh_shape, {}, world.rank(), size));
    for (const Combination& combination : combinations(rule_case, mesh_shape.size(), mesh_shape)) {
      std::string where = fmt::format("{} on a mesh of ({}):", rule_case.name, fmt::join(mesh_shape, ", "));
      for (const Placements& placements : combination) where += " " + to_string(placements);
      Tensors inputs;
      for (std::size_t i = 0; i < rule_case.inputs.size(); ++i)
        inputs.push_back(spread(rule_case.inputs[i], mesh, combination[i]));
      Outcome outcome;
      if (world.rank() == 0) ++tried;
      try {
        outcome = run(rule_case, inputs, [&](const at::Tensor& output, std::size_t index) {
          return (output * distribute_tensor(weights_of(output, index), mesh, Placements(mesh_shape.size()),
                                             {.source_axis_rank = {}}))
              .sum();
        });
      } catch (const ValueError& error) {
        if (!rule_case.may_refuse) throw std::runtime_error(where + ": " + error.what());
        if (world.rank() == 0) ++refused;
        continue;
      } catch (const StateError& error) {
        if (!rule_case.may_refuse) throw std::runtime_error(where + ": " + error.what());
        if (world.rank() == 0) ++refused;
        continue;
      } catch (const std::exception& error) {
        throw std::runtime_error(where + ": " + error.what());
      }
      const auto report = [&](const std::string& what, std::size_t i, const std::string& difference,
                              const at::Tensor& actual) {
        if (difference.empty()) return;
        const std::lock_guard lock(mutex);
        ADD_FAILURE() << where << ", rank " << world.rank() << ": " << what << " " << i << " "
                      << (is_dtensor(actual) ? "as " + to_string(placements_of(actual)) + " " : std::string())
                      << difference;
      };
      ASSERT_EQ(outcome.outputs.size(), expected.outputs.size());
      for (std::size_t i = 0; i < expected.outputs.size(); ++i)
        report("output", i, compare(expected.outputs[i].detach(), whole(outcome.outputs[i]), rule_case),
               outcome.outputs[i]);
      for (std::size_t i = 0; i < expected.gradients.size(); ++i)
        report("gradient", i, compare(expected.gradients[i], whole(outcome.gradients[i]), rule_case),
               outcome.gradients[i]);
      // One failing combination is enough; the ranks agree on it, because whole results are compared.
      if (::testing::Test::HasFailure()) return;
    }
  });
}

// The rules checked by this program; written to the file when it ends.
std::set<std::string>& checked_rules() {
  static auto& names = *new std::set<std::string>;
  return names;
}
int scopes_open = 0;

class WriteChecked final : public ::testing::Environment {
 public:
  void TearDown() override {
    const char* path = std::getenv("PENSTOCK_RULES_CHECKED");
    if (!path) return;
    std::ofstream file(path);
    for (const std::string& name : checked_rules()) file << name << "\n";
    file.close();
    EXPECT_TRUE(file) << "cannot write " << path;
  }
};
const ::testing::Environment* const write_checked = ::testing::AddGlobalTestEnvironment(new WriteChecked);

}  // namespace

RulesChecked::RulesChecked() {
  if (scopes_open++ == 0) penstock::detail::take_used_rules();
}

RulesChecked::~RulesChecked() {
  --scopes_open;
  if (::testing::Test::HasFailure()) return;
  for (const std::string& name : penstock::detail::take_used_rules()) checked_rules().insert(name);
}

at::Tensor sample(at::IntArrayRef shape, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed) + 1);
  at::Tensor tensor = at::empty(shape, at::kFloat);
  float* data = tensor.data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    const int magnitude = 1 + static_cast<int>(random() % 127);
    data[i] = static_cast<float>((random() & 1) ? magnitude : -magnitude) / 64.0f;
  }
  return tensor;
}

at::Tensor sample_positive(at::IntArrayRef shape, int seed) { return sample(shape, seed).abs(); }

at::Tensor sample_index(at::IntArrayRef shape, std::int64_t limit, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed) + 1);
  at::Tensor tensor = at::empty(shape, at::kLong);
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    tensor.data_ptr<std::int64_t>()[i] = static_cast<std::int64_t>(random() % static_cast<unsigned>(limit));
  return tensor;
}

at::Tensor spread(const at::Tensor& value, const comm::MeshGroups& mesh, const Placements& placements) {
  // First this rank's shard, then a partial value of it for each axis that is Partial.
  Placements shards = placements;
  for (Placement& placement : shards)
    if (placement.is_partial()) placement = Replicate{};
  at::Tensor local =
      to_local(distribute_tensor(value.detach(), mesh, shards, {.source_axis_rank = {}})).clone();
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_partial()) continue;
    const std::int64_t ranks = mesh.shape()[axis], me = mesh.coordinate()[axis];
    // Multiples of 1/64 that add up to zero over the axis; the last rank has the value.
    const at::Tensor noise = sample(local.sizes(), 1000 + static_cast<int>(axis)).to(local.dtype());
    if (me + 1 < ranks)
      local = noise * static_cast<double>(me + 1);
    else
      local = local - noise * static_cast<double>(ranks * (ranks - 1) / 2);
  }
  return from_local(local, mesh, placements,
                    {.shape = value.sizes().vec(), .stride = value.strides().vec(), .check = false});
}

void check_rule(const RuleCase& rule_case) {
  const RulesChecked checked;
  const Outcome expected = run(rule_case, rule_case.inputs, [](const at::Tensor& output, std::size_t index) {
    return (output * weights_of(output, index)).sum();
  });
  std::size_t tried = 0, refused = 0;
  for (const std::vector<std::int64_t>& mesh_shape : {std::vector<std::int64_t>{2}, {3}, {2, 2}}) {
    try {
      check_on(rule_case, mesh_shape, expected, tried, refused);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_LT(refused, tried) << rule_case.name << ": every combination was refused";
}

void check_rules(const std::vector<RuleCase>& rule_cases) {
  for (const RuleCase& rule_case : rule_cases) {
    check_rule(rule_case);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace penstock::test
