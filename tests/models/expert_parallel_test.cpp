// Experts divided among 2 and 4 ranks against one rank that has the tokens of all.
#include "penstock/models/blocks/expert_parallel.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::models {
namespace expert_parallel_test {

using namespace std::chrono_literals;
using penstock::test::has_text;
using penstock::test::message_of;

// Sums over the tokens of several ranks are in another order.
constexpr double kTolerance = 1e-12;
// Everything else has the same terms in the same order. On some processors LibTorch computes the last
// elements of a tensor without vectors, and exponentials of both kinds differ in their last bit.
constexpr double kLastBits = 1e-14;

double off(const at::Tensor& value, const at::Tensor& wanted) {
  return (value - wanted).abs().max().item<double>() / (1 + wanted.abs().max().item<double>());
}

// Logits are sums of few products of small integers and multiples of 1/8: exact, whatever the order of the
// sum, so that every rank's router computes the bits of one rank's.
at::Tensor whole_numbers(at::IntArrayRef shape, std::uint64_t seed) {
  return at::randint(-4, 5, shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble));
}

Experts made(const ExpertOptions& options) {
  Experts experts(options, "blocks.1.experts");
  experts->to(at::kDouble);
  experts->initialize("blocks.1.experts", {.seed = 9, .deviation = 0.3, .residual = 0.2});
  const at::NoGradGuard no_grad;
  experts->router->weight.copy_(whole_numbers({options.experts, options.width}, 31) / 8);
  return experts;
}

at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& factors) { return (hidden * factors).sum(); }

std::mutex mutex;

// x: [ranks, length, width], one row of the batch per rank.
void expect_one_rank(const ExpertOptions& options, const at::Tensor& x, const std::string& what) {
  const at::Tensor factors = at::linspace(-1, 1.5, x.numel(), at::kDouble).view(x.sizes());
  Experts alone = made(options);
  const at::Tensor all = x.clone().set_requires_grad(true);
  const at::Tensor expected = alone->forward(all).hidden;
  loss_of(expected, factors).backward();

  const int ranks = static_cast<int>(x.size(0));
  std::map<std::string, at::Tensor> sums;  // gradients of parameters that every rank holds
  comm::run_ranks(ranks, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {ranks}, {"ep"}, world.rank(), ranks));
    Experts experts = made(options);
    parallelize_experts(*experts, mesh);
    EXPECT_EQ(to_local(experts->gate).size(0), options.experts / ranks);
    const at::Tensor own = x.narrow(0, world.rank(), 1).clone().set_requires_grad(true);
    const at::Tensor hidden = experts->forward(own).hidden;
    loss_of(hidden, factors.narrow(0, world.rank(), 1)).backward();
    const at::Tensor gate = full_tensor(experts->gate.grad()), up = full_tensor(experts->up.grad()),
                     down = full_tensor(experts->down.grad());
    const std::lock_guard lock(mutex);
    EXPECT_LE(off(hidden, expected.narrow(0, world.rank(), 1)), kLastBits) << what << world.rank();
    EXPECT_LE(off(gate, alone->gate.grad()), kLastBits) << what << world.rank();
    EXPECT_LE(off(up, alone->up.grad()), kLastBits) << what << world.rank();
    EXPECT_LE(off(down, alone->down.grad()), kLastBits) << what << world.rank();
    EXPECT_LT((own.grad() - all.grad().narrow(0, world.rank(), 1)).abs().max().item<double>(), kTolerance)
        << what << world.rank();
    for (const auto& item : experts->named_parameters()) {
      if (is_dtensor(item.value())) continue;
      at::Tensor& sum = sums[item.key()];
      sum = sum.defined() ? sum + item.value().grad() : item.value().grad().clone();
    }
  });
  EXPECT_EQ(sums.size(), options.shared_expert_width > 0 ? 4u : 1u);
  for (const auto& [name, sum] : sums)
    EXPECT_LT((sum - alone->named_parameters()[name].grad()).abs().max().item<double>(), kTolerance)
        << what << name;
}

TEST(ExpertParallel, TwoAndFourRanksEqualOne) {
  for (const std::int64_t ranks : {2, 4})
    for (const std::int64_t top_k : {1, 2, 8}) {
      ExpertOptions options{.width = 6, .experts = 8, .top_k = top_k, .expert_width = 5};
      options.shared_expert_width = top_k == 2 ? 4 : 0;
      expect_one_rank(options, whole_numbers({ranks, 7, 6}, 40 + static_cast<std::uint64_t>(top_k)),
                      std::to_string(ranks) + " ranks, top " + std::to_string(top_k) + ": ");
    }
}

// Most experts, and with one expert for all tokens most ranks, get no rows.
TEST(ExpertParallel, RanksWithoutRows) {
  ExpertOptions options{.width = 6, .experts = 8, .top_k = 1, .expert_width = 5};
  expect_one_rank(options, whole_numbers({4, 1, 6}, 50), "one token each: ");
  expect_one_rank(options, whole_numbers({1, 1, 6}, 51).expand({4, 3, 6}).contiguous(), "equal tokens: ");
}

TEST(ExpertParallel, CapacityOfEachRankDropsItsLastTokens) {
  const ExpertOptions options{
      .width = 6, .experts = 4, .top_k = 2, .expert_width = 5, .capacity_factor = 0.6};
  const at::Tensor x = whole_numbers({2, 9, 6}, 52);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"ep"}, world.rank(), 2));
    Experts experts = made(options), alone = made(options);
    parallelize_experts(*experts, mesh);
    const at::Tensor own = x.narrow(0, world.rank(), 1);
    const at::Tensor hidden = experts->forward(own).hidden;
    const std::lock_guard lock(mutex);
    EXPECT_LT((hidden - alone->forward(own).hidden).abs().max().item<double>(), kTolerance);
  });
}

TEST(ExpertParallel, InitialValuesDoNotDependOnTheRanks) {
  const ExpertOptions options{.width = 6, .experts = 4, .top_k = 2, .expert_width = 5};
  const BlockInit init{.seed = 4, .deviation = 0.5, .residual = 0.1};
  Experts alone = made(options);
  alone->initialize("blocks.5.experts", init);
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {4}, {"ep"}, world.rank(), 4));
    Experts experts = made(options);
    parallelize_experts(*experts, mesh);
    experts->initialize("blocks.5.experts", init);
    const at::Tensor gate = full_tensor(experts->gate.detach());
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(torch::equal(gate, alone->gate));
  });
}

// The mean over the ranks of a loss with the shares of all of them is the loss of all tokens.
TEST(ExpertParallel, BalanceOverAllRanks) {
  const ExpertOptions options{.width = 6, .experts = 8, .top_k = 2, .expert_width = 5};
  const at::Tensor x = whole_numbers({4, 3, 6}, 61);
  const auto balance = [](const BlockResult& result) { return result.losses.at(0).value; };
  Experts alone = made(options);
  const at::Tensor expected = balance(alone->forward(x));
  expected.backward();
  double value = 0, own_shares = 0;
  at::Tensor gradient = at::zeros_like(alone->router->weight);
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const at::Tensor own = x.narrow(0, world.rank(), 1);
    Experts experts = made(options);
    const at::Tensor without = balance(experts->forward(own));
    experts->set_balance_ranks(world.group());
    const at::Tensor loss = balance(experts->forward(own));
    loss.backward();
    experts->eval();  // sends nothing: a single rank may generate
    EXPECT_EQ(balance(experts->forward(own)).item<double>(), without.item<double>());
    const std::lock_guard lock(mutex);
    value += loss.item<double>() / 4;
    own_shares += without.item<double>() / 4;
    gradient += experts->router->weight.grad() / 4;
  });
  EXPECT_NEAR(value, expected.item<double>(), kTolerance);
  EXPECT_GT(std::abs(own_shares - value), 1e-3);
  EXPECT_LT((gradient - alone->router->weight.grad()).abs().max().item<double>(), kTolerance);
}

TEST(ExpertParallel, RejectsExpertsThatCannotBeDivided) {
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    Experts experts(ExpertOptions{.width = 6, .experts = 6, .top_k = 2, .expert_width = 5});
    const comm::MeshGroups line(world, init_device_mesh("cpu", {4}, {"ep"}, world.rank(), 4));
    const comm::MeshGroups grid(world, init_device_mesh("cpu", {2, 2}, {"dp", "ep"}, world.rank(), 4));
    const std::string uneven = message_of<ConfigError>([&] { parallelize_experts(*experts, line); });
    EXPECT_TRUE(has_text(uneven, "layout.ep: got 4, expected a divisor of model.experts, 6"));
    EXPECT_THROW(parallelize_experts(*experts, grid), ValueError);
  });
}

}  // namespace expert_parallel_test
}  // namespace penstock::models
