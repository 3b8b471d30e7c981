// Second derivatives of the library's own operators: right, or an error that names the operator. Never
// numbers that lack terms.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/random.h"
#include "penstock/torch/experts/expert_choice.h"
#include "penstock/torch/experts/expert_feed.h"
#include "penstock/torch/experts/expert_gate.h"
#include "penstock/torch/experts/expert_rows.h"
#include "penstock/torch/experts/grouped_product.h"
#include "penstock/torch/experts/router.h"
#include "penstock/torch/kernels/fused_math.h"
#include "penstock/torch/kernels/recomputed_attention.h"
#include "penstock/torch/kernels/rms_norm.h"
#include "penstock/torch/scan/causal_convolution.h"
#include "penstock/torch/scan/selective_scan.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace operator_second_derivative_test {

using test::has_text;
using test::message_of;
using Tensors = std::vector<at::Tensor>;
using Call = std::function<at::Tensor(const Tensors&)>;

at::Tensor input(at::IntArrayRef sizes, at::TensorOptions options = at::kDouble) {
  return at::randn(sizes, at::kDouble).to(options).set_requires_grad(true);
}

// Another tensor at each call, the same in each run.
at::Tensor numbers_like(const at::Tensor& tensor, double phase) {
  return at::arange(tensor.numel(), at::kDouble)
      .mul(0.7)
      .add(phase)
      .cos()
      .view(tensor.sizes())
      .to(tensor.options().requires_grad(false));
}

Tensors first_derivatives(const at::Tensor& y, const Tensors& inputs, bool create_graph) {
  const at::Tensor by = numbers_like(y, 0.3);
  return torch::autograd::grad({(y * y * by).sum()}, inputs, {}, /*retain_graph=*/true, create_graph,
                               /*allow_unused=*/true);
}

at::Tensor mixed(const Tensors& gradients) {
  at::Tensor sum;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const at::Tensor part =
        (gradients[i] * gradients[i] * numbers_like(gradients[i], 1.0 + static_cast<double>(i))).sum();
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

// A recorded backward has the bits of one that is not; differentiating it is an error.
void expect_refused(const std::string& op, const Call& call, const Tensors& inputs) {
  SCOPED_TRACE(op);
  const at::Tensor y = call(inputs);
  const Tensors plain = first_derivatives(y, inputs, false), recorded = first_derivatives(y, inputs, true);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(plain[i].defined(), recorded[i].defined()) << i;
    if (!plain[i].defined()) continue;
    EXPECT_TRUE(at::equal(plain[i], recorded[i].detach())) << i;
    EXPECT_TRUE(recorded[i].requires_grad()) << i << " looks like a constant";
  }
  // With respect to every input, and to all of them.
  for (const at::Tensor& one : inputs)
    EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                           torch::autograd::grad({mixed(recorded)}, {one}, {}, /*retain_graph=*/true, false,
                                                 /*allow_unused=*/true);
                         }),
                         op + " can be differentiated once"));
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { mixed(recorded).backward(); }), "create_graph"));
}

void expect_equal_to(const Call& plain, const Call& call, const Tensors& inputs) {
  const auto derivatives = [&](const Call& of) {
    const Tensors first = first_derivatives(of(inputs), inputs, true);
    Tensors all = first;
    for (const at::Tensor& second :
         torch::autograd::grad({mixed(first)}, inputs, {}, c10::nullopt, false, /*allow_unused=*/true))
      all.push_back(second);
    return all;
  };
  const Tensors ours = derivatives(call), wanted = derivatives(plain);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(ours[i].defined(), wanted[i].defined()) << i;
    if (wanted[i].defined()) {
      EXPECT_TRUE(at::allclose(ours[i], wanted[i], 1e-9, 1e-11)) << i << "\n"
                                                                 << ours[i] << "\nexpected\n"
                                                                 << wanted[i];
    }
  }
}

std::vector<at::Device> devices() {
  std::vector<at::Device> all{at::kCPU};
  if (torch::cuda::is_available()) all.emplace_back(at::kCUDA, 0);
  return all;
}

struct Way {
  at::Tensor choices;
  ExpertOrder order;
};
Way way_of(const at::Device& device, std::int64_t capacity = 0) {
  const at::Tensor choices = torch::tensor({{0, 2}, {1, 0}, {2, 1}, {0, 1}}, at::kLong).to(device);
  return {choices, expert_order(choices, 3, capacity)};
}

// ---- once ----

TEST(OperatorSecondDerivatives, OfScansAreErrors) {
  for (const at::Device& device : devices()) {
    torch::manual_seed(1);
    const at::TensorOptions options = at::TensorOptions(device).dtype(at::kDouble);
    expect_refused("penstock::causal_convolution",
                   [](const Tensors& in) {
                     return causal_convolution({.x = in[0], .weight = in[1], .bias = in[2], .silu = true});
                   },
                   {input({2, 5, 3}, options), input({3, 2}, options), input({3}, options)});
    const auto scan = [](const Tensors& in, bool state) {
      const ScanResult result = selective_scan({.values = in[0],
                                                .steps = in[1].abs(),
                                                .decay = in[2].abs().neg(),
                                                .keys = in[3],
                                                .queries = in[4],
                                                .skip = in[5],
                                                .initial_state = in[6],
                                                .chunk = 2});
      return state ? result.state : result.values;
    };
    const Tensors inputs{input({1, 5, 2, 3}, options), input({1, 5, 2}, options),    input({2}, options),
                         input({1, 5, 1, 4}, options), input({1, 5, 1, 4}, options), input({2}, options),
                         input({1, 2, 3, 4}, options)};
    for (const bool state : {false, true})
      expect_refused(
          "penstock::selective_scan", [&](const Tensors& in) { return scan(in, state); }, inputs);
  }
}

TEST(OperatorSecondDerivatives, OfExpertsAreErrors) {
  for (const at::Device& device : devices()) {
    torch::manual_seed(2);
    const at::TensorOptions options = at::TensorOptions(device).dtype(at::kDouble);
    const Way way = way_of(device);
    expect_refused("penstock::combine_rows",
                   [&](const Tensors& in) { return combine_rows(in[0], in[1], way.order); },
                   {input({8, 3}, options), input({4, 2}, options)});
    // Also where forward makes copies, which have no history.
    expect_refused("penstock::combine_rows",
                   [&](const Tensors& in) { return combine_rows(in[0].t(), in[1].t(), way.order); },
                   {input({3, 8}, options), input({2, 4}, options)});
    expect_refused(
        "penstock::weighted_silu_product",
        [&](const Tensors& in) { return weighted_silu_product(in[0].t(), in[1], in[2], way.order); },
        {input({3, 8}, options), input({8, 3}, options), input({4, 2}, options)});
    expect_refused("penstock::weighted_silu_halves",
                   [&](const Tensors& in) { return weighted_silu_halves(in[0].t(), in[1], way.order); },
                   {input({6, 8}, options), input({4, 2}, options)});
    expect_refused("penstock::grouped_product",
                   [&](const Tensors& in) { return grouped_product(in[0], in[1], way.order.ends); },
                   {input({8, 3}, options), input({3, 3, 2}, options)});
  }
}

TEST(OperatorSecondDerivatives, OfKernelsOnAGpuAreErrors) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU: LibTorch's operators are used, compared below";
  torch::manual_seed(3);
  const at::TensorOptions options = at::TensorOptions(at::Device(at::kCUDA, 0)).dtype(at::kFloat);
  expect_refused("penstock::rms_norm", [](const Tensors& in) { return rms_norm(in[0], in[1], 1e-3); },
                 {input({3, 8}, options), input({8}, options)});
  expect_refused("penstock::rms_norm", [](const Tensors& in) { return rms_norm(in[0].t(), in[1], 1e-3); },
                 {input({8, 3}, options), input({8}, options)});
  expect_refused("penstock::silu_product", [](const Tensors& in) { return silu_product(in[0].t(), in[1]); },
                 {input({8, 3}, options), input({3, 8}, options)});
  expect_refused("penstock::silu_halves", [](const Tensors& in) { return silu_halves(in[0].t()); },
                 {input({8, 3}, options)});
  const at::Tensor targets = torch::tensor({1, 0, 3}, at::kLong).cuda();
  expect_refused("penstock::cross_entropy_rows",
                 [&](const Tensors& in) { return cross_entropy_sum(in[0], targets, -100); },
                 {input({3, 5}, options)});
}

// A backward that is recorded for the sake of another part of the model.
TEST(OperatorSecondDerivatives, OfOtherPartsStayPossible) {
  torch::manual_seed(4);
  const Way way = way_of(at::kCPU);
  const at::Tensor rows = input({8, 3}), weight = input({3, 3, 2}), other = input({4});
  const at::Tensor y = grouped_product(rows, weight, way.order.ends).sum() + other.pow(3).sum();
  const Tensors first = torch::autograd::grad({y}, {rows, weight, other}, {}, true, true);
  const Tensors second = torch::autograd::grad({first[2].sum()}, {other}, {}, true);
  EXPECT_TRUE(at::allclose(second[0], 6 * other));
  // Without what a kernel has computed, too.
  EXPECT_TRUE(
      at::allclose(torch::autograd::grad({(first[0].detach() + other.sum()).sum()}, {other}, {}, true)[0],
                   at::full({4}, 24.0, at::kDouble)));
}

TEST(OperatorSecondDerivatives, ModesSeeTheSameOperatorsInARecordedBackward) {
  struct Names final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      if (op.operator_name().name.starts_with("penstock::")) seen.push_back(op.operator_name().name);
      op.callBoxed(stack);
    }
    std::vector<std::string> seen;
  };
  const Way way = way_of(at::kCPU);
  const at::Tensor rows = input({8, 3}), weights = input({4, 2});
  const auto seen = [&](bool create_graph) {
    Names names;
    const ModeGuard guard(names);
    first_derivatives(combine_rows(rows, weights, way.order), {rows, weights}, create_graph);
    return names.seen;
  };
  EXPECT_EQ(seen(true), seen(false));
}

// ---- any number of times ----

TEST(OperatorSecondDerivatives, OfGathersAndSumsAreRight) {
  torch::manual_seed(5);
  for (const std::int64_t capacity : {0, 2}) {
    const Way way = way_of(at::kCPU, capacity);
    const auto slots = [&](const at::Tensor& tokens) {  // [8, 3]
      Tensors rows;
      for (std::int64_t slot = 0; slot < 8; ++slot) {
        const std::int64_t choice = way.order.order[slot].item<std::int64_t>();
        rows.push_back(choice < 0 ? at::zeros({3}, at::kDouble) : tokens[choice / 2]);
      }
      return at::stack(rows);
    };
    const auto sums = [&](const at::Tensor& rows) {  // [4, 3]
      Tensors all;
      for (std::int64_t token = 0; token < 4; ++token) {
        at::Tensor sum = at::zeros({3}, at::kDouble);
        for (std::int64_t j = 0; j < 2; ++j) {
          const std::int64_t slot = way.order.slot[token][j].item<std::int64_t>();
          if (slot >= 0) sum = sum + rows[slot];
        }
        all.push_back(sum);
      }
      return at::stack(all);
    };
    expect_equal_to([&](const Tensors& in) { return slots(in[0]).sin(); },
                    [&](const Tensors& in) { return gather_rows(in[0], way.order).sin(); }, {input({4, 3})});
    expect_equal_to([&](const Tensors& in) { return sums(in[0]).sin(); },
                    [&](const Tensors& in) { return sum_rows(in[0], way.order).sin(); }, {input({8, 3})});
  }
}

TEST(OperatorSecondDerivatives, OfJoinedColumnsAreRight) {
  torch::manual_seed(6);
  expect_equal_to(
      [](const Tensors& in) {
        return at::cat({in[0], in[1]}, 2).sin();
      },
      [](const Tensors& in) { return join_columns(in[0], in[1], at::kDouble).sin(); },
      {input({2, 3, 2}), input({2, 3, 4})});
  expect_equal_to([](const Tensors& in) { return in[0].sin(); },
                  [](const Tensors& in) { return join_columns(in[0], at::Tensor(), at::kDouble).sin(); },
                  {input({2, 3, 2})});
}

TEST(OperatorSecondDerivatives, OfRoutersAreRight) {
  torch::manual_seed(7);
  expect_equal_to([](const Tensors& in) { return at::mm(in[0], in[1].t()); },
                  [](const Tensors& in) { return router_logits(in[0], in[1]); },
                  {input({4, 3}), input({5, 3})});
  for (const bool sigmoid : {false, true})
    for (const bool normalize : {false, true})
      for (const bool strided : {false, true}) {
        SCOPED_TRACE(std::to_string(sigmoid) + std::to_string(normalize) + std::to_string(strided));
        const at::Tensor logits = strided ? input({5, 4}) : input({4, 5});
        const auto seen = [&](const Tensors& in) { return strided ? in[0].t() : in[0]; };
        const auto all = [](const at::Tensor& weights, const at::Tensor& means, const at::Tensor& square) {
          return at::cat({weights.flatten(), means, square.view({1})});
        };
        expect_equal_to(
            [&](const Tensors& in) {
              const at::Tensor scores = sigmoid ? at::sigmoid(seen(in)) : at::softmax(seen(in), -1);
              at::Tensor weights = scores.gather(1, std::get<1>(scores.detach().topk(2, -1)));
              if (normalize) weights = weights / weights.sum(-1, true);
              return all(weights, scores.mean(0), at::logsumexp(seen(in), {-1}).square().mean());
            },
            [&](const Tensors& in) {
              const Routed routed =
                  route_tokens(seen(in), {.choices = 2, .sigmoid = sigmoid, .normalize = normalize});
              return all(routed.weights, routed.mean_scores, routed.mean_square);
            },
            {logits});
      }
}

TEST(OperatorSecondDerivatives, OfRotationsAndDropoutAreRight) {
  torch::manual_seed(8);
  const at::Tensor angles = at::arange(6, at::kDouble).view({3, 1, 2});
  const at::Tensor turns = at::polar(at::ones_like(angles), angles);
  expect_equal_to(
      [&](const Tensors& in) {
        return at::view_as_real(at::view_as_complex(in[0].view({2, 3, 1, 2, 2})) * turns).sin();
      },
      [&](const Tensors& in) {
        return rotate_pairs(in[0], turns).view({2, 3, 1, 2, 2}).sin();
      },
      {input({2, 3, 1, 4})});
  const RandomKey key{.seed = 3};
  const at::Tensor kept = keyed_dropout(at::ones({4, 5}, at::kDouble), 0.5, key);
  expect_equal_to([&](const Tensors& in) { return (in[0] * kept).sin(); },
                  [&](const Tensors& in) { return keyed_dropout(in[0], 0.5, key).sin(); }, {input({4, 5})});
}

TEST(OperatorSecondDerivatives, OfRecomputedAttentionAreRight) {
  torch::manual_seed(9);
  const Call plain = [](const Tensors& in) {
    const at::Tensor k = in[1].unsqueeze(2), v = in[2].unsqueeze(2);
    return at::matmul(at::softmax(at::matmul(in[0], k.transpose(-1, -2)) / 2 + in[3], -1), v);
  };
  expect_equal_to(
      plain, [](const Tensors& in) { return attend_recomputed(in[0], in[1], in[2], in[3], std::nullopt); },
      {input({1, 2, 2, 3, 4}), input({1, 2, 5, 4}), input({1, 2, 5, 4}), input({1, 1, 1, 3, 5})});
}

TEST(OperatorFirstDerivatives, OfTurns) {
  for (const at::Device& device : devices()) {
    const at::Tensor x = at::randn({1, 3, 2, 4}).to(device),
                     angles = at::arange(6, at::kFloat).view({3, 1, 2}).to(device).set_requires_grad(true);
    const at::Tensor turns = at::polar(at::ones_like(angles), angles);
    rotate_pairs(x, turns).square().select(3, 0).sum().backward();
    ASSERT_TRUE(angles.grad().defined());
    EXPECT_GT(angles.grad().abs().max().item<double>(), 0);
  }
}

TEST(OperatorFirstDerivatives, OfAnOperatorWithoutOneAreErrors) {
  const Way way = way_of(at::kCPU);
  const at::Tensor tokens = at::randn({4, 3}), gate = at::randn({3, 3, 2}), up = at::randn({3, 3, 2}),
                   down = at::randn({3, 2, 3}), weights = at::rand({4, 2});
  const at::Tensor leaf = up.clone().set_requires_grad(true);
  EXPECT_TRUE(
      has_text(message_of<StateError>([&] { expert_feed(tokens, gate, leaf, down, weights, way.order); }),
               "requires a gradient"));
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(expert_feed(tokens, gate, leaf, down, weights, way.order),
                        expert_feed(tokens, gate, up, down, weights, way.order)));
}

}  // namespace operator_second_derivative_test
}  // namespace penstock
