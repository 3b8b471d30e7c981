#include "penstock/comm/group/operators.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/errors.h"
#include "penstock/world.h"

namespace penstock::comm {
namespace operators_test {

using namespace std::chrono_literals;
using functional::wait_tensor;

// The derivative of every operator, checked against one process that computes all ranks' losses at once.
//
// Loss of rank r: sum(output_r * weight_r). `on_one` maps all inputs to all outputs in one process.
using OnRank = std::function<at::Tensor(const at::Tensor&, Group&)>;
using OnOne = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

void check_gradient(const OnRank& on_rank, const OnOne& on_one) {
  constexpr int kRanks = 3;
  const auto value = [](int rank, const at::Tensor& like, int seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(10 * seed + rank);
    return at::randn(like.sizes(), generator, at::kDouble);
  };
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < kRanks; ++rank)
    inputs.push_back(value(rank, at::empty({6, 2}), 1).requires_grad_());
  const auto outputs = on_one(inputs);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (int rank = 0; rank < kRanks; ++rank)
    loss = loss +
           (outputs[static_cast<std::size_t>(rank)] * value(rank, outputs[static_cast<std::size_t>(rank)], 2))
               .sum();
  loss.backward();
  std::vector<at::Tensor> expected;  // values only: the ranks' threads do not share the graph above
  for (const auto& output : outputs) expected.push_back(output.detach().clone());

  run_ranks(kRanks, 60s, [&](World& world) {
    Group group = world.group();
    at::Tensor input = value(world.rank(), at::empty({6, 2}), 1).requires_grad_();
    at::Tensor output = wait_tensor(on_rank(input, group));
    const auto own = static_cast<std::size_t>(world.rank());
    EXPECT_TRUE(at::allclose(output.detach(), expected[own]));
    (output * value(world.rank(), output, 2)).sum().backward();
    EXPECT_TRUE(at::allclose(input.grad(), inputs[own].grad())) << "rank " << world.rank();
  });
}

TEST(Operators, AllReduceDerivative) {
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg})
    check_gradient([&](const at::Tensor& x, Group& group) { return functional::all_reduce(x, op, group); },
                   [&](const std::vector<at::Tensor>& x) {
                     at::Tensor sum = x[0] + x[1] + x[2];
                     if (op == ReduceOp::Avg) sum = sum / 3;
                     return std::vector<at::Tensor>(3, sum);
                   });
}

TEST(Operators, AllGatherDerivative) {
  check_gradient([](const at::Tensor& x, Group& group) { return functional::all_gather(x, group); },
                 [](const std::vector<at::Tensor>& x) { return std::vector<at::Tensor>(3, at::cat(x)); });
}

TEST(Operators, ReduceScatterDerivative) {
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg})
    check_gradient(
        [&](const at::Tensor& x, Group& group) { return functional::reduce_scatter(x, op, group); },
        [&](const std::vector<at::Tensor>& x) {
          at::Tensor sum = x[0] + x[1] + x[2];
          if (op == ReduceOp::Avg) sum = sum / 3;
          const auto parts = sum.chunk(3);
          return std::vector<at::Tensor>(parts.begin(), parts.end());
        });
}

TEST(Operators, AllToAllDerivative) {
  // Rank s sends (1, 2, 3) rows rotated by s; received counts follow.
  const auto sent = [](int rank) {
    std::vector<std::int64_t> splits = {1, 2, 3};
    std::rotate(splits.begin(), splits.begin() + rank, splits.end());
    return splits;
  };
  check_gradient(
      [&](const at::Tensor& x, Group& group) {
        std::vector<std::int64_t> received;
        for (int from = 0; from < 3; ++from)
          received.push_back(sent(from)[static_cast<std::size_t>(group.axis_rank())]);
        return functional::all_to_all(x, received, sent(group.axis_rank()), group);
      },
      [&](const std::vector<at::Tensor>& x) {
        std::vector<at::Tensor> outputs;
        for (std::size_t to = 0; to < 3; ++to) {
          std::vector<at::Tensor> rows;
          for (int from = 0; from < 3; ++from)
            rows.push_back(x[static_cast<std::size_t>(from)].split_with_sizes(sent(from))[to]);
          outputs.push_back(at::cat(rows));
        }
        return outputs;
      });
}

// With parts of different sizes, one of them empty.
TEST(Operators, AllGatherFlatDerivative) {
  const std::vector<std::int64_t> counts{4, 0, 12};
  const auto part = [&](const at::Tensor& x, std::size_t rank) {
    return x.reshape({-1}).narrow(0, 0, counts[rank]);
  };
  check_gradient(
      [&](const at::Tensor& x, Group& group) {
        return functional::all_gather_flat(part(x, static_cast<std::size_t>(group.axis_rank())), counts,
                                           group);
      },
      [&](const std::vector<at::Tensor>& x) {
        return std::vector<at::Tensor>(3, at::cat({part(x[0], 0), part(x[1], 1), part(x[2], 2)}));
      });
}

TEST(Operators, ReduceScatterFlatDerivative) {
  const std::vector<std::int64_t> counts{3, 4, 5};
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg})
    check_gradient(
        [&](const at::Tensor& x, Group& group) {
          return functional::reduce_scatter_flat(x.reshape({-1}), op, counts, group);
        },
        [&](const std::vector<at::Tensor>& x) {
          at::Tensor sum = (x[0] + x[1] + x[2]).reshape({-1});
          if (op == ReduceOp::Avg) sum = sum / 3;
          return sum.split_with_sizes(counts);
        });
}

TEST(Operators, BroadcastDerivative) {
  check_gradient(
      [](const at::Tensor& x, Group& group) { return functional::broadcast(x, 1, group); },
      [](const std::vector<at::Tensor>& x) { return std::vector<at::Tensor>(3, x[1] + 0 * (x[0] + x[2])); });
}

TEST(Operators, MinHasNoDerivativeAndSaysSo) {
  EXPECT_THROW(
      run_ranks(2, 60s,
                [](World& world) {
                  at::Tensor x = at::ones({2}).requires_grad_();
                  wait_tensor(functional::all_reduce(x, ReduceOp::Min, world.group())).sum().backward();
                }),
      NotImplemented);
}

TEST(Operators, ShapeOnlyKernelsNeedNoGroup) {
  const World world = World::fake(0, 4);
  const at::Tensor x = at::empty({8, 3}, at::TensorOptions().device(at::kMeta).dtype(at::kHalf));
  const Group& group = world.group();
  EXPECT_EQ(functional::all_reduce(x, ReduceOp::Sum, group).sizes(), x.sizes());
  EXPECT_EQ(functional::all_gather(x, group).sizes(), (std::vector<std::int64_t>{32, 3}));
  EXPECT_EQ(functional::reduce_scatter(x, ReduceOp::Sum, group).sizes(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(functional::all_to_all(x, {1, 2, 3, 4}, {2, 2, 2, 2}, group).sizes(),
            (std::vector<std::int64_t>{10, 3}));
  EXPECT_EQ(functional::all_gather_flat(x.view({-1}), {24, 1, 2, 3}, group).sizes(),
            (std::vector<std::int64_t>{30}));
  EXPECT_EQ(functional::reduce_scatter_flat(x.view({-1}), ReduceOp::Sum, {5, 6, 6, 7}, group).sizes(),
            (std::vector<std::int64_t>{5}));
  EXPECT_EQ(functional::broadcast(x, 2, group).scalar_type(), at::kHalf);
  EXPECT_TRUE(wait_tensor(x).is_meta());
}

TEST(Operators, UnknownGroupAndUnevenRowsAreNamed) {
  const World world = World::fake(1, 4);
  EXPECT_THROW(functional::reduce_scatter(at::ones({6, 2}), ReduceOp::Sum, world.group()), ValueError);
  EXPECT_THROW(functional::all_gather(at::ones({}), world.group()), ValueError);
  EXPECT_THROW(functional::all_gather_flat(at::ones({3}), {3, 2, 3, 3}, world.group()), ValueError);
  EXPECT_THROW(functional::reduce_scatter_flat(at::ones({3, 4}), ReduceOp::Sum, {3, 3, 3, 3}, world.group()),
               ValueError);
  EXPECT_THROW(find_group("nobody"), ValueError);
}

}  // namespace operators_test
}  // namespace penstock::comm
