// Helpers for tests of distributed tensors in captured functions.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/world.h"
#include "tests/graph/registered_wrappers.h"

namespace penstock::graph {

using namespace std::chrono_literals;
using test::same_tensor;

inline void on_ranks(int size, const std::function<void(const comm::MeshGroups&)>& body) {
  comm::run_ranks(size, 120s, [&](comm::World& world) {
    body({world, init_device_mesh("cpu", {size}, {"tp"}, world.rank(), size)});
  });
}

inline at::Tensor numbers(at::IntArrayRef sizes, int seed) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn(sizes, generator);
}

// Equal on every rank, or terms of a sum that differ.
inline at::Tensor placed(const at::Tensor& whole, const comm::MeshGroups& mesh, const Placement& placement,
                         bool requires_grad = true) {
  at::Tensor result;
  if (placement.is_partial())
    result = from_local(whole * (1.0 + mesh.coordinate()[0]), mesh, {placement}).detach();
  else
    result = distribute_tensor(whole, mesh, {placement}, {.source_axis_rank = std::nullopt});
  return result.set_requires_grad(requires_grad);
}

inline std::size_t count_of(const Graph& graph, const std::string& name) {
  return static_cast<std::size_t>(
      std::count_if(graph.nodes.begin(), graph.nodes.end(),
                    [&](const Node& node) { return node.op.operator_name().name == name; }));
}

inline std::size_t collectives_in(const Graph& graph) {
  std::size_t count = 0;
  for (const char* name :
       {"penstock::all_reduce", "penstock::all_gather_into_tensor", "penstock::reduce_scatter_tensor",
        "penstock::all_to_all_single", "penstock::all_gather_flat", "penstock::reduce_scatter_flat"})
    count += count_of(graph, name);
  return count;
}

// Ones with the placements that backward expects.
inline at::Tensor seed_like(const at::Tensor& result) {
  if (!is_dtensor(result) || is_subclass(to_local(result.detach()))) return at::ones_like(result.detach());
  Placements placements = placements_of(result);
  for (Placement& placement : placements)
    if (placement.is_partial()) placement = Replicate{};
  return distribute_tensor(at::ones(result.sizes(), result.options().requires_grad(false)), mesh_of(result),
                           placements, {.source_axis_rank = std::nullopt});
}

// Runs a function and a capture of it on equal inputs, the capture first, and compares results, gradients and
// mutated inputs.
inline void compare_call(const std::string& who, const Function& function, Compiled& compiled,
                         const std::function<std::vector<at::Tensor>()>& make_inputs) {
  const std::vector<at::Tensor> captured = make_inputs(), eager = make_inputs();
  const Values actual = compiled(Values(captured.begin(), captured.end())),
               expected = function(Values(eager.begin(), eager.end()));
  ASSERT_EQ(actual.size(), expected.size());
  std::vector<at::Tensor> roots, seeds, plain_roots, plain_seeds;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const at::Tensor one = actual[i].toTensor(), other = expected[i].toTensor();
    EXPECT_TRUE(same_tensor(one.detach(), other.detach())) << who << ", result " << i;
    EXPECT_EQ(one.requires_grad(), other.requires_grad()) << who << ", result " << i;
    if (!other.requires_grad()) continue;
    roots.push_back(one);
    seeds.push_back(seed_like(one));
    plain_roots.push_back(other);
    plain_seeds.push_back(seed_like(other));
  }
  if (!roots.empty()) {
    torch::autograd::backward(roots, seeds);
    torch::autograd::backward(plain_roots, plain_seeds);
  }
  for (std::size_t i = 0; i < eager.size(); ++i) {
    EXPECT_TRUE(same_tensor(captured[i].detach(), eager[i].detach())) << who << ", input " << i;
    EXPECT_TRUE(same_tensor(captured[i].grad(), eager[i].grad())) << who << ", gradient of input " << i;
  }
}

// The same three times, with different values.
inline void check(const comm::MeshGroups& mesh, const std::string& where, const Function& function,
                  const std::function<std::vector<at::Tensor>(int)>& make_inputs) {
  const std::string who = where + ", rank " + std::to_string(mesh.coordinate()[0]);
  Compiled compiled(function);
  for (int step = 0; step < 3; ++step)
    compare_call(who, function, compiled, [&] { return make_inputs(step); });
  EXPECT_EQ(compiled.captures(), 1u) << who;
}

}  // namespace penstock::graph
