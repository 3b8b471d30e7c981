// Distributed tensors as inputs, results and gradients of captured functions: bitwise equal to the plain run,
// on worlds of threads.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "tests/graph/dtensor_compare.h"
#include "tests/graph/random_dtensor_program.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace dtensor_capture_test {

using test::has_text;
using test::message_of;

TEST(DTensorCapture, PlacementsThroughOperators) {
  for (const int ranks : {2, 3})
    on_ranks(ranks, [&](const comm::MeshGroups& mesh) {
      const std::vector<std::pair<std::string, Placement>> layouts{
          {"R", Replicate{}}, {"S0", Shard{0}}, {"S1", Shard{1}}, {"P", Partial{}}};
      const Function matmul = [](const Values& in) -> Values {
        return {in[0].toTensor().matmul(in[1].toTensor())};
      };
      const Function softmax = [](const Values& in) -> Values {
        return {at::softmax(in[0].toTensor() * in[1].toTensor(), 1)};
      };
      const Function norm = [](const Values& in) -> Values {
        const at::Tensor x = in[0].toTensor();
        return {at::layer_norm(x + in[1].toTensor(), {x.size(1)})};
      };
      const Function loss = [](const Values& in) -> Values {
        return {redistribute((in[0].toTensor() - in[1].toTensor()).pow(2).mean(), {Replicate{}})};
      };
      for (const auto& [name_x, x] : layouts)
        for (const auto& [name_y, y] : layouts) {
          // Sizes that two ranks split evenly and three do not.
          const auto square = [&, x = x, y = y](int step) {
            return std::vector<at::Tensor>{placed(numbers({4, 4}, step), mesh, x),
                                           placed(numbers({4, 4}, step + 9), mesh, y)};
          };
          const std::string where = name_x + " with " + name_y;
          check(mesh, "matmul of " + where, matmul, square);
          check(mesh, "softmax of " + where, softmax, square);
          check(mesh, "layer norm of " + where, norm, square);
          check(mesh, "loss of " + where, loss, square);
        }
    });
}

// All redistributions between placements, as operators of the graph.
TEST(DTensorCapture, Redistributions) {
  for (const int ranks : {2, 3})
    on_ranks(ranks, [&](const comm::MeshGroups& mesh) {
      const std::vector<Placement> layouts{Replicate{}, Shard{0}, Shard{1}, Partial{}};
      for (const Placement& from : layouts)
        for (const Placement& to : layouts) {
          if (to.is_partial()) continue;
          check(
              mesh, to_string(Placements{from}) + " to " + to_string(Placements{to}),
              [&](const Values& in) -> Values {
                return {redistribute(in[0].toTensor() * 2, {to}) * 3, full_tensor(in[0].toTensor()).sin()};
              },
              [&](int step) {
                return std::vector<at::Tensor>{placed(numbers({4, 5}, step), mesh, from)};
              });
        }
    });
}

// Plain inputs that become distributed inside, and vice versa.
TEST(DTensorCapture, BoundariesInsideTheFunction) {
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    check(
        mesh, "from_local",
        [&](const Values& in) -> Values { return {from_local(in[0].toTensor(), mesh, {Shard{0}}).sin()}; },
        [&](int step) {
          return std::vector<at::Tensor>{numbers({2, 3}, step).requires_grad_()};
        });
    check(
        mesh, "to_local",
        [&](const Values& in) -> Values {
          return {to_local(in[0].toTensor()).sin(), to_local(in[0].toTensor())};
        },
        [&](int step) {
          return std::vector<at::Tensor>{placed(numbers({4, 3}, step), mesh, Shard{0})};
        });
    check(
        mesh, "no gradients",
        [&](const Values& in) -> Values {
          return {to_local(in[0].toTensor()), from_local(in[1].toTensor(), mesh, {Replicate{}})};
        },
        [&](int step) {
          return std::vector<at::Tensor>{placed(numbers({4, 3}, step), mesh, Shard{0}, false),
                                         numbers({2, 3}, step)};
        });
  });
}

TEST(DTensorCapture, TheGraphHoldsPlainTensorsAndCollectives) {
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    Compiled compiled([](const Values& in) -> Values {
      return {redistribute(in[0].toTensor().matmul(in[1].toTensor()), {Replicate{}}).relu()};
    });
    const at::Tensor x = placed(numbers({4, 6}, 1), mesh, Shard{1}),
                     w = placed(numbers({6, 2}, 2), mesh, Shard{0});
    const at::Tensor y = compiled({x, w})[0].toTensor();
    y.sum().backward();
    const JointGraph& joint = compiled.joint(0);
    EXPECT_EQ(count_of(compiled.partition(0).forward, "penstock::all_reduce"), 1u);
    EXPECT_EQ(collectives_in(compiled.partition(0).backward), 0u);
    EXPECT_EQ(joint.graph.inputs[0].name, "primals_1.local");
    EXPECT_EQ(joint.graph[joint.graph.inputs[0].value].geometry.sizes,
              (c10::SmallVector<std::int64_t, 5>{4, 3}));
    const SubclassMeta& input = joint.subclasses->inputs[0].subclass();
    EXPECT_EQ(input.to_text(), "DTensor [S(1)]");
    EXPECT_EQ(input.outer.sizes, (c10::SmallVector<std::int64_t, 5>{4, 6}));
    EXPECT_EQ(joint.subclasses->input_gradients[1].subclass().to_text(), "DTensor [S(0)]");
    EXPECT_TRUE(is_dtensor(w.grad()));
    EXPECT_EQ(placements_of(w.grad()), (Placements{Shard{0}}));
  });
}

TEST(DTensorCapture, GradientsInOtherPlacementsAreRedistributed) {
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    Compiled compiled([](const Values& in) -> Values { return {in[0].toTensor().sin()}; });
    const at::Tensor whole = numbers({4, 4}, 1), seed = numbers({4, 4}, 2);
    for (const Placement& given : std::vector<Placement>{Shard{0}, Shard{1}, Replicate{}}) {
      const at::Tensor x = placed(whole, mesh, Shard{0});
      const at::Tensor y = compiled({x})[0].toTensor();
      y.backward(placed(seed, mesh, given, false));
      EXPECT_EQ(placements_of(x.grad()), (Placements{Shard{0}}));
      EXPECT_TRUE(at::equal(full_tensor(x.grad()), seed * whole.cos())) << to_string(Placements{given});
    }
    EXPECT_EQ(compiled.captures(), 1u);
    // Terms of a sum are added up first.
    const at::Tensor x = placed(whole, mesh, Shard{0});
    compiled({x})[0].toTensor().backward(placed(seed, mesh, Partial{}, false));
    EXPECT_TRUE(at::allclose(full_tensor(x.grad()), (seed * 3) * whole.cos()));
    // A result that is a sum of terms expects a whole gradient.
    Compiled partial([](const Values& in) -> Values { return {in[0].toTensor().matmul(in[1].toTensor())}; });
    const at::Tensor a = placed(whole, mesh, Shard{1}), b = placed(whole, mesh, Shard{0});
    const at::Tensor terms = partial({a, b})[0].toTensor();
    EXPECT_TRUE(placements_of(terms)[0].is_partial());
    EXPECT_EQ(partial.joint(0).subclasses->tangents[0].subclass().to_text(), "DTensor [R]");
  });
}

TEST(DTensorCapture, GradientsOfAnotherKindOrMeshAreErrors) {
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    Compiled compiled([](const Values& in) -> Values { return {in[0].toTensor().sin()}; });
    const at::Tensor x = placed(numbers({4, 4}, 1), mesh, Shard{0});
    const at::Tensor y = compiled({x})[0].toTensor();
    const std::string message = message_of<TypeError>([&] { y.backward(at::ones({4, 4})); });
    EXPECT_TRUE(has_text(message, "the gradient of result 0"));
    EXPECT_TRUE(has_text(message, "DTensor [S(0)]"));
    EXPECT_TRUE(has_text(message, "a plain tensor"));
    const comm::MeshGroups other =
        mesh.with_mesh(init_device_mesh("cpu", {2}, {"other"}, mesh.mesh().this_rank(), 2));
    EXPECT_TRUE(has_text(message_of<TypeError>([&] {
                           y.backward(placed(at::ones({4, 4}), other, Shard{0}, false));
                         }),
                         "the gradient of result 0"));
    // A rejected gradient leaves the graph unchanged.
    y.backward(placed(at::ones({4, 4}), mesh, Shard{0}, false));
    EXPECT_TRUE(same_tensor(x.grad(), x.detach().cos()));
  });
}

TEST(DTensorCapture, TheGuardKnowsPlacements) {
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    const Function function = [](const Values& in) -> Values { return {in[0].toTensor() * 2}; };
    const at::Tensor whole = numbers({4, 4}, 1);
    Compiled compiled(function);
    for (int round = 0; round < 2; ++round)
      for (const Placement& placement : std::vector<Placement>{Shard{0}, Shard{1}, Replicate{}, Partial{}})
        EXPECT_EQ(placements_of(compiled({placed(whole, mesh, placement, false)})[0].toTensor()),
                  (Placements{placement}));
    EXPECT_EQ(compiled.captures(), 4u);
    Compiled strict(function, {.recapture = false});
    strict({placed(whole, mesh, Shard{0}, false)});
    EXPECT_TRUE(has_text(message_of<StateError>([&] { strict({placed(whole, mesh, Shard{1}, false)}); }),
                         "input 0 is DTensor [S(1)], in the capture DTensor [S(0)]"));
    EXPECT_TRUE(has_text(message_of<StateError>([&] { strict({whole}); }),
                         "input 0 is a plain tensor, in the capture DTensor [S(0)]"));
    const comm::MeshGroups other =
        mesh.with_mesh(init_device_mesh("cpu", {2}, {"other"}, mesh.mesh().this_rank(), 2));
    EXPECT_TRUE(has_text(message_of<StateError>([&] { strict({placed(whole, other, Shard{0}, false)}); }),
                         "input 0 is DTensor [S(0)] with a different mesh"));
  });
}

TEST(DTensorCapture, WritesReachTheLocalParts) {
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    const Function function = [](const Values& in) -> Values {
      const at::Tensor x = in[0].toTensor(), y = in[1].toTensor();
      x.add_(1).mul_(y);
      return {x.sum(), x};
    };
    check(mesh, "without gradients", function, [&](int step) {
      return std::vector<at::Tensor>{placed(numbers({4, 3}, step), mesh, Shard{0}, false),
                                     placed(numbers({4, 3}, step + 7), mesh, Shard{0}, false)};
    });
    Compiled compiled(function);
    const at::Tensor x = placed(numbers({4, 3}, 1), mesh, Shard{0}),
                     y = placed(numbers({4, 3}, 2), mesh, Shard{0});
    const at::Tensor x2 = placed(numbers({4, 3}, 1), mesh, Shard{0}),
                     y2 = placed(numbers({4, 3}, 2), mesh, Shard{0});
    const at::Tensor written = x * 1, written2 = x2 * 1;
    const Values actual = compiled({written, y}), expected = function({written2, y2});
    EXPECT_TRUE(actual[1].toTensor().is_same(written));
    EXPECT_TRUE(same_tensor(written.detach(), written2.detach()));
    (actual[0].toTensor() + written.sin().sum()).backward();
    (expected[0].toTensor() + written2.sin().sum()).backward();
    EXPECT_TRUE(same_tensor(x.grad(), x2.grad()));
    EXPECT_TRUE(same_tensor(y.grad(), y2.grad()));
    const std::string message = message_of<NotImplemented>([&] {
      Compiled([](const Values& in) -> Values { return {in[0].toTensor().t_() + 1}; })({x.detach()});
    });
    EXPECT_TRUE(has_text(message, "input 0, DTensor"));
  });
}

// Parameters that the function does not use, results of one capture as inputs of another, modes without
// gradients, repeated backward.
TEST(DTensorCapture, GradientsAndModes) {
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    const Function first = [](const Values& in) -> Values {
      return {in[0].toTensor().sin() + in[1].toTensor()};
    };
    const Function second = [](const Values& in) -> Values { return {(in[0].toTensor() * 2).exp()}; };
    Compiled one(first), two(second);
    const auto make = [&] {
      return std::vector<at::Tensor>{placed(numbers({4, 3}, 1), mesh, Shard{0}),
                                     placed(numbers({4, 3}, 2), mesh, Shard{0}),
                                     placed(numbers({4, 3}, 3), mesh, Shard{0})};
    };
    const std::vector<at::Tensor> a = make(), b = make();
    const at::Tensor seed = placed(numbers({4, 3}, 4), mesh, Shard{0}, false);
    const at::Tensor actual = two({one({a[0], a[1], a[2]})[0]})[0].toTensor(),
                     expected = second({first({b[0], b[1], b[2]})[0]})[0].toTensor();
    for (int time = 0; time < 2; ++time) {
      actual.backward(seed, /*retain_graph=*/time == 0);
      expected.backward(seed, /*retain_graph=*/time == 0);
    }
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_tensor(a[i].grad(), b[i].grad())) << i;
    EXPECT_FALSE(a[2].grad().defined());
    EXPECT_THROW(actual.backward(seed), c10::Error);
    // A backward that is differentiated runs the function again.
    const auto differentiable = [&](const at::Tensor& result, const std::vector<at::Tensor>& in) {
      return torch::autograd::grad({result}, {in[0], in[1]}, {seed}, /*retain_graph=*/true,
                                   /*create_graph=*/true);
    };
    const auto again = differentiable(one({a[0], a[1], a[2]})[0].toTensor(), a),
               plain = differentiable(first({b[0], b[1], b[2]})[0].toTensor(), b);
    for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(same_tensor(again[i], plain[i])) << i;
    EXPECT_TRUE(same_tensor(torch::autograd::grad({again[0]}, {a[0]}, {seed})[0],
                            torch::autograd::grad({plain[0]}, {b[0]}, {seed})[0]));
    // A result that is saved for backward and written before it.
    const at::Tensor written = two({a[0]})[0].toTensor();
    written.add_(1);
    EXPECT_TRUE(has_text(message_of<c10::Error>([&] { written.backward(seed); }),
                         "modified by an inplace operation"));
    {
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(same_tensor(two({a[0]})[0].toTensor(), second({a[0]})[0].toTensor()));
    }
    {
      const c10::InferenceMode inference;
      const at::Tensor x = placed(numbers({4, 3}, 5), mesh, Shard{0}, false);
      EXPECT_TRUE(same_tensor(two({x})[0].toTensor(), second({x})[0].toTensor()));
    }
    EXPECT_EQ(two.captures(), 4u);
  });
}

// A distributed tensor of subclasses: two kinds, one in the other.
TEST(DTensorCapture, LocalPartsThatAreSubclasses) {
  test::register_sample_kinds();
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    const auto make = [&](int step) {
      const at::Tensor local = numbers({2, 3}, step + 20 * static_cast<int>(mesh.coordinate()[0]));
      return std::vector<at::Tensor>{
          from_local(sample::Boxed::make(local), mesh, {Shard{0}}).detach().set_requires_grad(true)};
    };
    check(
        mesh, "DTensor of Boxed",
        [](const Values& in) -> Values { return {redistribute(in[0].toTensor().sin(), {Replicate{}}) * 2}; },
        make);
  });
}

TEST(DTensorCapture, RandomPrograms) {
  std::atomic<int> compared{0}, refused{0};
  for (const int ranks : {2, 3})
    on_ranks(ranks, [&](const comm::MeshGroups& mesh) {
      for (std::uint32_t seed = 1; seed <= 60; ++seed) {
        const RandomDTensorProgram program(seed, mesh);
        if (!program.is_legal()) {
          ++refused;
          continue;
        }
        check(mesh, "program " + std::to_string(seed), program.function,
              [&](int step) { return program.inputs(step); });
        ++compared;
      }
    });
  // The programs of two and of three ranks, on each.
  EXPECT_EQ(compared + refused, 60 * 2 + 60 * 3);
  EXPECT_GE(compared, 220);
}

TEST(DTensorCapture, RandomOperatorsAreRefused) {
  on_ranks(2, [&](const comm::MeshGroups& mesh) {
    Compiled compiled([](const Values& in) -> Values { return {at::dropout(in[0].toTensor(), 0.5, true)}; });
    EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                           compiled({placed(numbers({4, 4}, 1), mesh, Shard{0})});
                         }),
                         "random operators on distributed tensors"));
    Compiled distributes(
        [&](const Values& in) -> Values { return {distribute_tensor(in[0].toTensor(), mesh, {Shard{0}})}; });
    EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                           distributes({numbers({4, 4}, 1)});
                         }),
                         "source_axis_rank"));
  });
}

}  // namespace dtensor_capture_test
}  // namespace penstock::graph
