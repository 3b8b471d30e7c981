// The operators of torch/experts compared with loops in double precision, on the CPU and, if available, on a
// GPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mode.h"
#include "penstock/torch/compat/cpu_bfloat16.h"
#include "penstock/torch/experts/expert_choice.h"
#include "penstock/torch/experts/expert_feed.h"
#include "penstock/torch/experts/expert_gate.h"
#include "penstock/torch/experts/expert_rows.h"
#include "penstock/torch/experts/grouped_product.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace expert_operators_test {

using test::has_text;
using test::message_of;

struct Case {
  at::Device device;
  at::ScalarType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all{{at::kCPU, at::kFloat}, {at::kCPU, at::kDouble}, {at::kCPU, at::kBFloat16}};
  if (torch::cuda::is_available())
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
      all.push_back({at::Device(at::kCUDA, 0), dtype});
  return all;
}
std::vector<at::Device> devices() {
  std::vector<at::Device> all{at::kCPU};
  if (torch::cuda::is_available()) all.emplace_back(at::kCUDA, 0);
  return all;
}
std::string name_of(const Case& each) { return each.device.str() + " " + c10::toString(each.dtype); }

// Half a unit in the last place of the result, for sums in float32.
double tolerance(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 1.0 / 128
         : dtype == at::kHalf   ? 1.0 / 1024
         : dtype == at::kFloat  ? 5e-6
                                : 1e-12;
}

at::Tensor made(std::vector<std::int64_t> shape, const Case& each, std::uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble))
      .to(each.dtype)
      .to(each.device);
}
at::Tensor exactly(const at::Tensor& tensor) {
  return tensor.detach().to(at::kDouble).cpu().clone().set_requires_grad(tensor.requires_grad());
}
at::ScalarType weight_dtype(const Case& each) { return each.dtype == at::kDouble ? at::kDouble : at::kFloat; }

void expect_near(const at::Tensor& value, const at::Tensor& wanted, double near, const std::string& what) {
  ASSERT_TRUE(value.defined()) << what;
  ASSERT_EQ(value.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(at::allclose(value.to(at::kDouble).cpu(), wanted.to(at::kDouble).cpu(), near, near))
      << what << ": differ by "
      << (value.to(at::kDouble).cpu() - wanted.to(at::kDouble).cpu()).abs().max().item<double>();
}

std::vector<std::int64_t> numbers(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).cpu().contiguous();
  return {flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + flat.numel()};
}

// ---------------------------------------------------------------------------------------------- top_choices

TEST(TopChoices, HighestScoresAndLowerIndexAmongEquals) {
  std::mt19937 random(1);
  for (const at::Device device : devices())
    for (int round = 0; round < 60; ++round) {
      const std::int64_t tokens = 1 + random() % 40, experts = 1 + random() % 70,
                         count = 1 + random() % experts;
      std::vector<float> scores(static_cast<std::size_t>(tokens * experts));
      for (float& score : scores) {
        score = static_cast<float>(random() % 12) / 8 - 0.5F;  // many are equal
        if (random() % 15 == 0) score = std::numeric_limits<float>::infinity();
        if (random() % 15 == 0) score = -std::numeric_limits<float>::infinity();
        if (random() % 15 == 0 && experts > 1) score = std::numeric_limits<float>::quiet_NaN();
      }
      for (std::int64_t token = 0; token < tokens; ++token)
        scores[static_cast<std::size_t>(token * experts)] = 0;
      const at::Tensor given = torch::tensor(scores).view({tokens, experts}).to(device);
      const std::vector<std::int64_t> chosen = numbers(top_choices(given, count, "layer"));
      ASSERT_EQ(chosen.size(), static_cast<std::size_t>(tokens * count));
      for (std::int64_t token = 0; token < tokens; ++token) {
        const auto value = [&](std::int64_t expert) {
          const float score = scores[static_cast<std::size_t>(token * experts + expert)];
          return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
        };
        std::vector<std::int64_t> ranked(static_cast<std::size_t>(experts));
        std::iota(ranked.begin(), ranked.end(), 0);
        std::stable_sort(ranked.begin(), ranked.end(),
                         [&](std::int64_t a, std::int64_t b) { return value(a) > value(b); });
        for (std::int64_t j = 0; j < count; ++j)
          ASSERT_EQ(chosen[static_cast<std::size_t>(token * count + j)], ranked[static_cast<std::size_t>(j)])
              << device << " round " << round << " token " << token;
      }
    }
}

TEST(TopChoices, OtherDtypesAndStrides) {
  for (const Case& each : cases()) {
    const at::Tensor scores = made({9, 7}, each, 3).t();
    const at::Tensor wanted = std::get<1>(scores.to(at::kDouble).topk(3, 1));
    EXPECT_TRUE(torch::equal(top_choices(scores, 3, ""), wanted)) << name_of(each);
  }
}

TEST(TopChoices, NamesTheLayerWhoseScoresAreNan) {
  at::Tensor scores = torch::rand({4, 3});
  scores[2].fill_(std::nan(""));
  const std::string message = message_of<ValueError>([&] { top_choices(scores, 2, "blocks.7.experts"); });
  EXPECT_TRUE(has_text(message, "blocks.7.experts: router scores of token 2"));
  EXPECT_TRUE(has_text(message, "NaN for every expert"));
  scores[2][2] = 0.5;  // one number is enough for a choice
  EXPECT_EQ(top_choices(scores, 1, "")[2].item<std::int64_t>(), 2);
}

TEST(TopChoices, RejectsCountsAndShapes) {
  EXPECT_TRUE(has_text(message_of<ValueError>([] {
                         top_choices(torch::rand({4, 3}), 4, "");
                       }),
                       "top_choices: count: got 4, expected from 1 to the number of experts, 3"));
  EXPECT_THROW(top_choices(torch::rand({4, 3}), 0, ""), ValueError);
  EXPECT_THROW(top_choices(torch::rand({4}), 1, ""), ValueError);
  EXPECT_THROW(top_choices(torch::zeros({4, 3}, at::kLong), 1, ""), ValueError);
}

// --------------------------------------------------------------------------------------------- expert_order

TEST(ExpertOrder, StableSortOfRandomChoices) {
  std::mt19937 random(2);
  for (const at::Device device : devices())
    for (int round = 0; round < 80; ++round) {
      const std::int64_t tokens = random() % 200, choices = 1 + random() % 4;
      const std::int64_t experts = 1 + random() % (round % 3 == 0 ? 3 : 100);
      const std::int64_t capacity = round % 2 == 0 ? 0 : 1 + random() % 12;
      std::vector<std::int64_t> chosen(static_cast<std::size_t>(tokens * choices));
      for (std::int64_t& expert : chosen)
        expert = random() % 4 == 0 ? 0 : random() % static_cast<std::uint64_t>(experts);
      const ExpertOrder result = expert_order(
          torch::tensor(chosen, at::kLong).view({tokens, choices}).to(device), experts, capacity);
      // The expected result, from lists of each expert's choices.
      std::vector<std::vector<std::int64_t>> lists(static_cast<std::size_t>(experts));
      for (std::size_t i = 0; i < chosen.size(); ++i)
        lists[static_cast<std::size_t>(chosen[i])].push_back(static_cast<std::int64_t>(i));
      std::vector<std::int64_t> order, slot(chosen.size(), -1), ends, counts;
      for (auto& list : lists) {
        counts.push_back(static_cast<std::int64_t>(list.size()));
        if (capacity > 0 && static_cast<std::int64_t>(list.size()) > capacity)
          list.resize(static_cast<std::size_t>(capacity));
        for (const std::int64_t choice : list) {
          slot[static_cast<std::size_t>(choice)] = static_cast<std::int64_t>(order.size());
          order.push_back(choice);
        }
        ends.push_back(static_cast<std::int64_t>(order.size()));
      }
      order.resize(chosen.size(), -1);
      EXPECT_EQ(numbers(result.order), order) << device << " round " << round;
      EXPECT_EQ(numbers(result.slot), slot) << device << " round " << round;
      EXPECT_EQ(numbers(result.ends), ends) << device << " round " << round;
      EXPECT_EQ(numbers(result.counts), counts) << device << " round " << round;
      EXPECT_EQ(result.slot.sizes(), (at::IntArrayRef{tokens, choices}));
      for (const at::Tensor& tensor : {result.order, result.slot, result.ends, result.counts})
        EXPECT_EQ(tensor.scalar_type(), at::kInt);
    }
}

// Several blocks of a device's kernels.
TEST(ExpertOrder, ManyChoices) {
  for (const at::Device device : devices()) {
    const std::int64_t experts = 64;
    const at::Tensor choices =
        at::randint(0, experts, {40000, 2}, at::detail::createCPUGenerator(4), at::TensorOptions(at::kLong));
    const ExpertOrder result = expert_order(choices.to(device), experts);
    const at::Tensor wanted = std::get<1>(choices.flatten().sort(/*stable=*/true, 0, false));
    EXPECT_TRUE(torch::equal(result.order.cpu().to(at::kLong), wanted)) << device;
    EXPECT_TRUE(
        torch::equal(result.ends.cpu().to(at::kLong), choices.flatten().bincount({}, experts).cumsum(0)));
  }
}

TEST(ExpertOrder, RejectsChoicesOutsideOfTheExperts) {
  EXPECT_TRUE(has_text(message_of<ValueError>([] {
                         expert_order(torch::tensor({{0, 5}}, at::kLong), 5);
                       }),
                       "expert_order: a choice: got 5, expected from 0 to 4"));
  EXPECT_THROW(expert_order(torch::tensor({{0, -1}}, at::kLong), 5), ValueError);
  EXPECT_THROW(expert_order(torch::zeros({2, 2}, at::kInt), 5), ValueError);
  EXPECT_THROW(expert_order(torch::zeros({2}, at::kLong), 5), ValueError);
  EXPECT_THROW(expert_order(torch::zeros({2, 2}, at::kLong), 0), ValueError);
}

// ------------------------------------------------------------------------------------- gather and combine

struct Routing {
  ExpertOrder order;
  std::vector<std::int64_t> slots;  // of each choice
};

Routing routing(std::int64_t tokens, std::int64_t choices, std::int64_t experts, std::int64_t capacity,
                std::uint64_t seed, const at::Device& device) {
  const at::Tensor chosen = at::randint(0, experts, {tokens, choices}, at::detail::createCPUGenerator(seed),
                                        at::TensorOptions(at::kLong));
  Routing result{expert_order(chosen.to(device), experts, capacity), {}};
  result.slots = numbers(result.order.slot);
  return result;
}

struct Sizes {
  std::int64_t tokens, choices, experts, capacity, width;
};
const std::vector<Sizes> kSizes{{1, 1, 1, 0, 1},   {1, 3, 2, 0, 7},   {5, 2, 4, 0, 8},     {33, 2, 8, 3, 24},
                                {16, 4, 3, 5, 65}, {9, 1, 16, 0, 40}, {20, 2, 5, 0, 1031}, {64, 6, 6, 1, 16}};

TEST(ExpertRows, GatherAndItsDerivative) {
  for (const Case& each : cases())
    for (const Sizes& sizes : kSizes) {
      const auto [tokens, choices, experts, capacity, width] = sizes;
      const std::string what = name_of(each) + " width " + std::to_string(width);
      const Routing way = routing(tokens, choices, experts, capacity, 5, each.device);
      at::Tensor x = made({width, tokens}, each, 6).t().set_requires_grad(true), exact = exactly(x);
      const at::Tensor rows = gather_rows(x, way.order);
      std::vector<at::Tensor> wanted(static_cast<std::size_t>(tokens * choices),
                                     at::zeros({width}, at::kDouble));
      for (std::size_t i = 0; i < way.slots.size(); ++i)
        if (way.slots[i] >= 0)
          wanted[static_cast<std::size_t>(way.slots[i])] = exact[static_cast<std::int64_t>(i) / choices];
      expect_near(rows, at::stack(wanted), 0, what);
      EXPECT_EQ(rows.scalar_type(), each.dtype) << what;
      const at::Tensor gradient = made({tokens * choices, width}, each, 7);
      rows.backward(gradient);
      at::stack(wanted).backward(gradient.to(at::kDouble).cpu());
      expect_near(x.grad(), exact.grad(), tolerance(each.dtype), what);
    }
}

TEST(ExpertRows, CombineAndItsDerivatives) {
  for (const Case& each : cases())
    for (const Sizes& sizes : kSizes) {
      const auto [tokens, choices, experts, capacity, width] = sizes;
      const std::string what = name_of(each) + " width " + std::to_string(width);
      const Routing way = routing(tokens, choices, experts, capacity, 8, each.device);
      at::Tensor rows = made({tokens * choices, width}, each, 9).set_requires_grad(true);
      at::Tensor weights =
          made({tokens, choices}, {each.device, weight_dtype(each)}, 10).set_requires_grad(true);
      const at::Tensor exact_rows = exactly(rows), exact_weights = exactly(weights);
      const at::Tensor y = combine_rows(rows, weights, way.order);
      std::vector<at::Tensor> wanted;
      for (std::int64_t token = 0; token < tokens; ++token) {
        at::Tensor sum = at::zeros({width}, at::kDouble);
        for (std::int64_t j = 0; j < choices; ++j) {
          const std::int64_t slot = way.slots[static_cast<std::size_t>(token * choices + j)];
          if (slot >= 0) sum = sum + exact_weights[token][j] * exact_rows[slot];
        }
        wanted.push_back(sum);
      }
      expect_near(y, at::stack(wanted), 2 * tolerance(each.dtype), what);
      EXPECT_EQ(y.scalar_type(), each.dtype) << what;
      const at::Tensor gradient = made({width, tokens}, each, 11).t();
      y.backward(gradient);
      // A batch whose choices are all dropped has no derivative in the reference.
      at::Tensor exact = at::stack(wanted) + 0 * exact_rows.sum() + 0 * exact_weights.sum();
      exact.backward(gradient.to(at::kDouble).cpu());
      expect_near(rows.grad(), exact_rows.grad(), tolerance(each.dtype), what);
      // Sums of `width` products in float32.
      expect_near(weights.grad(), exact_weights.grad(), each.dtype == at::kDouble ? 1e-12 : 2e-5, what);
      EXPECT_EQ(weights.grad().scalar_type(), weight_dtype(each)) << what;
    }
}

// Rows of dropped choices may hold anything, as a device's product leaves them.
TEST(ExpertRows, DroppedRowsAreNotRead) {
  for (const at::Device device : devices()) {
    const Routing way = routing(12, 2, 3, 2, 12, device);
    const std::int64_t kept = way.order.ends[2].item<std::int64_t>();
    ASSERT_LT(kept, 24);
    at::Tensor rows = torch::rand({24, 5}).to(device);
    rows.narrow(0, kept, 24 - kept).fill_(std::nan(""));
    rows.set_requires_grad(true);
    const at::Tensor weights = torch::rand({12, 2}).to(device).set_requires_grad(true);
    const at::Tensor y = combine_rows(rows, weights, way.order);
    EXPECT_TRUE(at::isfinite(y).all().item<bool>());
    y.sum().backward();
    EXPECT_TRUE(at::isfinite(weights.grad()).all().item<bool>());
    EXPECT_EQ(rows.grad().narrow(0, kept, 24 - kept).abs().sum().item<float>(), 0);
  }
}

TEST(ExpertRows, SumsAndTheirDerivative) {
  for (const Case& each : cases())
    for (const Sizes& sizes : kSizes) {
      const auto [tokens, choices, experts, capacity, width] = sizes;
      const std::string what = name_of(each) + " width " + std::to_string(width);
      const Routing way = routing(tokens, choices, experts, capacity, 14, each.device);
      at::Tensor rows = made({tokens * choices, width}, each, 15).set_requires_grad(true);
      const at::Tensor ones = at::ones({tokens, choices}, rows.options().dtype(weight_dtype(each)));
      at::Tensor again = rows.detach().clone().set_requires_grad(true);
      const at::Tensor y = sum_rows(rows, way.order), wanted = combine_rows(again, ones, way.order);
      EXPECT_TRUE(at::equal(y, wanted)) << what;
      const at::Tensor gradient = made({width, tokens}, each, 16).t();
      y.backward(gradient);
      wanted.backward(gradient);
      EXPECT_TRUE(at::equal(rows.grad(), again.grad())) << what;
    }
}

// Both forms, beside a loop over the slots in double precision. Rows that no choice uses may hold anything.
TEST(ExpertGate, WeighsTheRowsAndTheirDerivatives) {
  for (const Case& each : cases())
    for (const Sizes& sizes : kSizes) {
      const auto [tokens, choices, experts, capacity, width] = sizes;
      const std::string what = name_of(each) + " width " + std::to_string(width);
      const Routing way = routing(tokens, choices, experts, capacity, 17, each.device);
      const std::int64_t kept = way.order.ends[experts - 1].item<std::int64_t>(), slots = tokens * choices;
      at::Tensor joint = made({slots, 2 * width}, each, 18);
      at::Tensor exact_joint = exactly(joint);
      joint.narrow(0, kept, slots - kept).fill_(std::nan(""));
      exact_joint.set_requires_grad(true);
      const at::Tensor weights =
          made({tokens, choices}, {each.device, weight_dtype(each)}, 19).set_requires_grad(true);
      const at::Tensor exact_weights = exactly(weights);
      const at::Tensor silu = at::silu(exact_joint.narrow(1, 0, width)) * exact_joint.narrow(1, width, width);
      std::vector<at::Tensor> wanted(static_cast<std::size_t>(slots), at::zeros({width}, at::kDouble));
      for (std::size_t i = 0; i < way.slots.size(); ++i)
        if (way.slots[i] >= 0)
          wanted[static_cast<std::size_t>(way.slots[i])] =
              exact_weights.flatten()[static_cast<std::int64_t>(i)] * silu[way.slots[i]];
      const at::Tensor gradient = made({slots, width}, each, 20);
      const at::Tensor exact = at::stack(wanted) + 0 * exact_joint.sum() + 0 * exact_weights.sum();
      exact.backward(gradient.to(at::kDouble).cpu());
      // Sums of `width` products in float32.
      const double near = 2 * tolerance(each.dtype), of_weights = each.dtype == at::kDouble ? 1e-12 : 1e-4;

      joint.set_requires_grad(true);
      const at::Tensor inner = weighted_silu_halves(joint, weights, way.order);
      EXPECT_EQ(inner.scalar_type(), each.dtype) << what;
      expect_near(inner, exact.detach(), near, what);
      inner.backward(gradient);
      expect_near(joint.grad(), exact_joint.grad(), near, what);
      expect_near(weights.grad(), exact_weights.grad(), of_weights, what);

      const at::Tensor gate = joint.detach().narrow(1, 0, width).clone().set_requires_grad(true),
                       up = joint.detach().narrow(1, width, width).set_requires_grad(true);
      const at::Tensor by_halves = weights.grad().clone();
      weights.mutable_grad().reset();
      const at::Tensor parts = weighted_silu_product(gate, up, weights, way.order);
      EXPECT_TRUE(at::equal(parts, inner)) << what;
      parts.backward(gradient);
      EXPECT_TRUE(at::equal(at::cat({gate.grad(), up.grad()}, 1), joint.grad())) << what;
      EXPECT_TRUE(at::equal(weights.grad(), by_halves)) << what;
    }
}

// Tiles end anywhere, and on several threads.
TEST(ExpertGate, ManyRowsOnSeveralThreads) {
  const Routing way = routing(3000, 2, 5, 900, 21, at::kCPU);
  const at::Tensor joint = torch::randn({6000, 46}).set_requires_grad(true),
                   weights = torch::rand({3000, 2}).set_requires_grad(true);
  const auto run = [&](int threads) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    const at::Tensor y = weighted_silu_halves(joint, weights, way.order);
    std::vector<at::Tensor> all = torch::autograd::grad({y}, {joint, weights}, {at::cos(y.detach())});
    all.push_back(y.detach());
    at::set_num_threads(before);
    return all;
  };
  const auto one = run(1), three = run(3);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << i;
}

TEST(ExpertGate, RejectsWhatDoesNotFit) {
  const Routing way = routing(6, 2, 3, 0, 22, at::kCPU);
  const at::Tensor rows = torch::rand({12, 4}), weights = torch::rand({6, 2});
  EXPECT_TRUE(has_text(
      message_of<ValueError>([&] { weighted_silu_product(rows, rows.to(at::kDouble), weights, way.order); }),
      "got 12 x 4 of Float and 12 x 4 of Double"));
  EXPECT_THROW(weighted_silu_product(rows, torch::rand({12, 3}), weights, way.order), ValueError);
  EXPECT_THROW(weighted_silu_product(torch::rand({11, 4}), torch::rand({11, 4}), weights, way.order),
               ValueError);
  EXPECT_THROW(weighted_silu_product(rows, rows, weights.to(at::kDouble), way.order), ValueError);
  EXPECT_THROW(weighted_silu_product(rows, rows, torch::rand({6, 3}), way.order), ValueError);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         weighted_silu_halves(torch::rand({12, 3}), weights, way.order);
                       }),
                       "a matrix of even width"));
}

TEST(ExpertRows, RejectsWhatDoesNotFit) {
  const Routing way = routing(6, 2, 3, 0, 13, at::kCPU);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         gather_rows(torch::rand({5, 4}), way.order);
                       }),
                       "gather_rows: tokens: got 5 rows, expected a divisor of the 12 choices"));
  EXPECT_THROW(gather_rows(torch::rand({6}), way.order), ValueError);
  EXPECT_THROW(combine_rows(torch::rand({11, 4}), torch::rand({6, 2}), way.order), ValueError);
  EXPECT_THROW(combine_rows(torch::rand({12, 4}), torch::rand({6, 1}), way.order), ValueError);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         combine_rows(torch::rand({12, 4}), torch::rand({6, 2}, at::kDouble), way.order);
                       }),
                       "combine_rows: weights: got 6 x 2 of Double, expected 6 x 2 of Float"));
}

// ------------------------------------------------------------------------------------------ grouped_product

// Sizes of the experts; rows behind the last are in none.
struct Groups {
  std::vector<std::int64_t> sizes;
  std::int64_t behind, in, out;
};

std::vector<Groups> random_groups() {
  std::vector<Groups> all{{{1}, 0, 1, 1},
                          {{0}, 3, 4, 2},
                          {{0, 0, 5}, 0, 8, 16},
                          {{130, 0, 257}, 9, 40, 24},
                          {{64, 128, 1, 0}, 0, 136, 200},
                          {{7, 0, 3}, 2, 33, 5}};
  std::mt19937 random(14);
  for (int round = 0; round < 12; ++round) {
    Groups groups{{},
                  static_cast<std::int64_t>(random() % 3),
                  1 + static_cast<std::int64_t>(random() % 50),
                  1 + static_cast<std::int64_t>(random() % 50)};
    for (std::uint64_t i = 0; i <= random() % 40; ++i)
      groups.sizes.push_back(random() % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % 20));
    all.push_back(groups);
  }
  return all;
}

void expect_products(const Case& each, const Groups& groups) {
  const std::string what = name_of(each) + ", " + std::to_string(groups.sizes.size()) + " experts, " +
                           std::to_string(groups.in) + " to " + std::to_string(groups.out);
  std::vector<std::int32_t> ends;
  for (const std::int64_t size : groups.sizes)
    ends.push_back((ends.empty() ? 0 : ends.back()) + static_cast<std::int32_t>(size));
  const std::int64_t experts = static_cast<std::int64_t>(ends.size()), total = ends.back() + groups.behind;
  at::Tensor rows = made({total, groups.in}, each, 15).set_requires_grad(true),
             weight = made({experts, groups.in, groups.out}, each, 16).set_requires_grad(true);
  const at::Tensor exact_rows = exactly(rows), exact_weight = exactly(weight);
  const at::Tensor y = grouped_product(rows, weight, torch::tensor(ends, at::kInt).to(each.device));
  std::vector<at::Tensor> parts;
  for (std::int64_t expert = 0, first = 0; expert < experts; ++expert) {
    const std::int64_t size = groups.sizes[static_cast<std::size_t>(expert)];
    parts.push_back(exact_rows.narrow(0, first, size).matmul(exact_weight[expert]));
    first += size;
  }
  parts.push_back(at::zeros({groups.behind, groups.out}, at::kDouble));
  const at::Tensor wanted = at::cat(parts) + 0 * exact_rows.sum();
  // Sums of products of numbers around 1, rounded at the end: relative to the largest of the results.
  const double near = tolerance(each.dtype);
  const auto scaled = [](const at::Tensor& exact) {
    return exact.numel() == 0 ? 1.0 : std::max(1.0, exact.abs().max().item<double>());
  };
  expect_near(y, wanted, near * scaled(wanted), what);
  EXPECT_EQ(y.scalar_type(), each.dtype) << what;
  const at::Tensor gradient = made({total, groups.out}, each, 17);
  y.backward(gradient);
  wanted.backward(gradient.to(at::kDouble).cpu());
  expect_near(rows.grad(), exact_rows.grad(), near * scaled(exact_rows.grad()), what + ", rows");
  expect_near(weight.grad(), exact_weight.grad(), near * scaled(exact_weight.grad()), what + ", weight");
}

TEST(GroupedProduct, EveryExpertWithItsRowsAndDerivatives) {
  ensure_cpu_bfloat16();
  for (const auto path : {GroupedProductPath::Auto, GroupedProductPath::Kernel}) {
    const GroupedProductPath before = set_grouped_product_path(path);
    for (const Case& each : cases())
      for (const Groups& groups : random_groups()) expect_products(each, groups);
    EXPECT_EQ(set_grouped_product_path(before), path);
    if (!torch::cuda::is_available()) break;
  }
}

TEST(GroupedProduct, StridedInputsAndUnusedGradients) {
  const at::Tensor ends = torch::tensor({2, 5}, at::kInt);
  const at::Tensor rows = torch::rand({4, 5}).t(), weight = torch::rand({2, 3, 4}).transpose(1, 2);
  const at::Tensor y = grouped_product(rows, weight, ends);
  const at::Tensor wanted =
      at::cat({rows.narrow(0, 0, 2).matmul(weight[0]), rows.narrow(0, 2, 3).matmul(weight[1])});
  EXPECT_TRUE(at::allclose(y, wanted));
  EXPECT_FALSE(y.requires_grad());
  const at::Tensor leaf = weight.detach().clone().set_requires_grad(true);
  grouped_product(rows, leaf, ends).sum().backward();
  EXPECT_TRUE(at::allclose(leaf.grad()[1], rows.narrow(0, 2, 3).sum(0).unsqueeze(1).expand({4, 3})));
}

TEST(GroupedProduct, RejectsWhatDoesNotFit) {
  const at::Tensor rows = torch::rand({6, 4}), weight = torch::rand({2, 4, 3});
  const at::Tensor ends = torch::tensor({2, 6}, at::kInt);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { grouped_product(rows, weight.to(at::kDouble), ends); }),
                       "got 6 x 4 of Float and 2 x 4 x 3 of Double"));
  EXPECT_THROW(grouped_product(rows, torch::rand({2, 3, 4}), ends), ValueError);
  EXPECT_THROW(grouped_product(rows, weight, ends.to(at::kLong)), ValueError);
  EXPECT_THROW(grouped_product(rows, weight, torch::tensor({6}, at::kInt)), ValueError);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         grouped_product(rows, weight, torch::tensor({2, 7}, at::kInt));
                       }),
                       "grouped_product: end of expert 1: got 7, expected from 2 to 6"));
  EXPECT_THROW(grouped_product(rows, weight, torch::tensor({4, 2}, at::kInt)), ValueError);
}

// ------------------------------------------------------------------------------------------------- all of
// them

// Shapes are known without values: the whole layer runs on fake tensors, forward and backward.
// One operator for all steps: the bits of the single ones, with dropped choices, experts without tokens and
// tokens that chose an expert twice.
TEST(ExpertFeed, EqualsTheSingleOperators) {
  std::mt19937 random(31);
  const auto below = [&](std::int64_t end) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(end));
  };
  for (int round = 0; round < 60; ++round) {
    const Case each{at::kCPU, round % 2 == 0 ? at::kFloat : at::kDouble};
    const std::int64_t tokens = below(70), choices = 1 + below(2), experts = 1 + below(9),
                       width = 1 + below(300), inner_width = 1 + below(40),
                       capacity = round % 3 == 0 ? 1 + below(5) : 0;
    const std::string what = name_of(each) + " round " + std::to_string(round);
    const auto next = static_cast<std::uint64_t>(100 * round);
    const at::Tensor x = made({tokens, 2 * width}, each, next).narrow(1, 0, width),
                     gate = made({experts, width, inner_width}, each, next + 1),
                     up = made({experts, width, inner_width}, each, next + 2),
                     down = made({experts, inner_width, width}, each, next + 3),
                     weights = made({tokens, choices}, each, next + 4);
    const ExpertOrder order =
        expert_order(torch::randint(experts, {tokens, choices}, at::kLong), experts, capacity);
    ASSERT_TRUE(can_use_expert_feed(x, gate, up, down, weights)) << what;
    const at::Tensor rows = gather_rows(x, order);
    const at::Tensor inner = weighted_silu_product(grouped_product(rows, gate, order.ends),
                                                   grouped_product(rows, up, order.ends), weights, order);
    const at::Tensor wanted = sum_rows(grouped_product(inner, down, order.ends), order);
    EXPECT_TRUE(at::equal(expert_feed(x, gate, up, down, weights, order), wanted)) << what;
  }
}

// Where the single operators are needed: for derivatives, other dtypes, and sums that depend on the order.
TEST(ExpertFeed, OnlyWhereItsBitsAreTheSame) {
  const auto tensor = [](at::IntArrayRef sizes) { return torch::rand(sizes); };
  const at::Tensor x = tensor({4, 6}), gate = tensor({3, 6, 5}), down = tensor({3, 5, 6}),
                   weights = tensor({4, 2});
  EXPECT_TRUE(can_use_expert_feed(x, gate, gate, down, weights));
  EXPECT_FALSE(can_use_expert_feed(x, gate, gate, down, tensor({4, 3})));
  EXPECT_FALSE(can_use_expert_feed(x.to(at::kBFloat16), gate, gate, down, weights));
  EXPECT_FALSE(can_use_expert_feed(x, gate, gate, down.to(at::kDouble), weights));
  const at::Tensor trained = down.clone().set_requires_grad(true);
  EXPECT_FALSE(can_use_expert_feed(x, gate, gate, trained, weights));
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(can_use_expert_feed(x, gate, gate, trained, weights));
}

TEST(ExpertFeed, RejectsWhatDoesNotFit) {
  const at::Tensor x = torch::rand({4, 6}), gate = torch::rand({3, 6, 5}), down = torch::rand({3, 5, 6}),
                   weights = torch::rand({4, 2});
  const ExpertOrder order = expert_order(torch::zeros({4, 2}, at::kLong), 3);
  const auto refused = [&](const at::Tensor& of_x, const at::Tensor& of_up, const at::Tensor& of_down,
                           const at::Tensor& of_weights) {
    return message_of<ValueError>([&] { expert_feed(of_x, gate, of_up, of_down, of_weights, order); });
  };
  EXPECT_TRUE(has_text(refused(x.to(at::kHalf), gate, down, weights), "expert_feed: tokens"));
  EXPECT_TRUE(has_text(refused(x, torch::rand({3, 6, 4}), down, weights), "expert_feed: up"));
  EXPECT_TRUE(has_text(refused(x, gate, gate, weights), "expert_feed: down"));
  EXPECT_TRUE(has_text(refused(x, gate, down, torch::rand({4, 3})), "expert_feed: weights"));
}

TEST(ExpertOperators, FakeShapes) {
  FakeMode fake;
  const ModeGuard guard(fake);
  const at::Tensor x = torch::rand({10, 6}).set_requires_grad(true);
  const at::Tensor scores = torch::rand({10, 4}).set_requires_grad(true);
  const at::Tensor weight = torch::rand({4, 6, 8}).set_requires_grad(true);
  const at::Tensor choices = top_choices(scores, 2, "layer");
  EXPECT_TRUE(is_fake(choices));
  EXPECT_EQ(choices.sizes(), (at::IntArrayRef{10, 2}));
  const ExpertOrder order = expert_order(choices, 4, 3);
  EXPECT_EQ(order.order.sizes(), (at::IntArrayRef{20}));
  EXPECT_EQ(order.slot.sizes(), (at::IntArrayRef{10, 2}));
  EXPECT_EQ(order.ends.sizes(), (at::IntArrayRef{4}));
  const at::Tensor joint =
      grouped_product(gather_rows(x, order), torch::cat({weight, weight}, 2), order.ends);
  const at::Tensor rows =
      weighted_silu_halves(joint, scores.gather(1, choices), order) +
      weighted_silu_product(joint.narrow(1, 0, 8), joint.narrow(1, 8, 8), scores.gather(1, choices), order);
  EXPECT_EQ(rows.sizes(), (at::IntArrayRef{20, 8}));
  EXPECT_EQ(sum_rows(rows, order).sizes(), (at::IntArrayRef{10, 8}));
  EXPECT_EQ(expert_feed(x.detach(), weight.detach(), weight.detach(), weight.detach().transpose(1, 2),
                        scores.detach().gather(1, choices), order)
                .sizes(),
            (at::IntArrayRef{10, 6}));
  const at::Tensor y = combine_rows(rows, scores.gather(1, choices), order);
  EXPECT_EQ(y.sizes(), (at::IntArrayRef{10, 8}));
  y.sum().backward();
  EXPECT_TRUE(is_fake(weight.grad()));
  EXPECT_EQ(weight.grad().sizes(), weight.sizes());
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(scores.grad().sizes(), scores.sizes());
}

TEST(ExpertOperators, ModesSeeThemForwardAndBackward) {
  struct Names final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      if (op.operator_name().name.rfind("penstock::", 0) == 0) names.push_back(op.operator_name().name);
      op.callBoxed(stack);
    }
    std::vector<std::string> names;
  };
  Names seen;
  {
    const ModeGuard guard(seen);
    const at::Tensor x = torch::rand({3, 4}).set_requires_grad(true);
    const at::Tensor weight = torch::rand({2, 4, 4}).set_requires_grad(true);
    const ExpertOrder order = expert_order(top_choices(torch::rand({3, 2}), 1, ""), 2);
    combine_rows(grouped_product(gather_rows(x, order), weight, order.ends), torch::ones({3, 1}), order)
        .sum()
        .backward();
  }
  EXPECT_EQ(seen.names,
            (std::vector<std::string>{
                "penstock::top_choices", "penstock::expert_order", "penstock::gather_rows",
                "penstock::grouped_product", "penstock::combine_rows", "penstock::combine_rows_backward",
                "penstock::grouped_product", "penstock::grouped_outer", "penstock::combine_rows"}));
}

TEST(GroupedProduct, JoinedColumns) {
  for (const Case& each : cases()) {
    const auto made = [&](at::IntArrayRef sizes) {
      return at::randn(sizes, at::kDouble).to(each.device, each.dtype).set_requires_grad(true);
    };
    const at::Tensor first = made({3, 4, 5}), second = made({3, 4, 2});
    const at::Tensor joint = join_columns(first, second, at::kFloat);
    EXPECT_TRUE(at::equal(joint, at::cat({first, second}, 2).to(at::kFloat)));
    const at::Tensor by = at::randn({3, 4, 7}, joint.options());
    joint.backward(by);
    EXPECT_TRUE(at::equal(first.grad(), by.narrow(2, 0, 5).to(each.dtype)));
    EXPECT_TRUE(at::equal(second.grad(), by.narrow(2, 5, 2).to(each.dtype)));
    const at::Tensor alone = made({3, 4, 8}), cast = join_columns(alone, {}, at::kBFloat16);
    EXPECT_TRUE(at::equal(cast, alone.to(at::kBFloat16)));
    cast.backward(by.narrow(2, 0, 7).repeat({1, 1, 2}).narrow(2, 0, 8).to(at::kBFloat16));
    EXPECT_EQ(alone.grad().scalar_type(), each.dtype);
    EXPECT_TRUE(at::equal(alone.grad().narrow(2, 0, 7), by.to(at::kBFloat16).to(each.dtype)));
  }
  EXPECT_THROW(join_columns(at::ones({2, 3, 4}), at::ones({2, 4, 4}), at::kFloat), ValueError);
}

}  // namespace expert_operators_test
}  // namespace penstock
