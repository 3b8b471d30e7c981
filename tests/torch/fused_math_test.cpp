// The operators of fused_math.h compared with LibTorch's, on the CPU and, if available, on a GPU.
#include "penstock/torch/kernels/fused_math.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/torch/without_gradient.h"

namespace penstock {
namespace fused_math_test {

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

// Results are computed in float32 and rounded once.
double tolerance(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 1.0 / 128
         : dtype == at::kHalf   ? 1.0 / 1024
         : dtype == at::kFloat  ? 2e-6
                                : 1e-12;
}

at::Tensor made(std::vector<std::int64_t> shape, const Case& each, int seed) {
  torch::manual_seed(seed);
  return at::randn(shape, at::kDouble).mul(2).to(each.dtype).to(each.device);
}

void expect_near(const at::Tensor& value, const at::Tensor& wanted, double tolerance,
                 const std::string& what) {
  ASSERT_TRUE(value.defined()) << what;
  ASSERT_EQ(value.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(at::allclose(value.to(at::kDouble).cpu(), wanted.to(at::kDouble).cpu(), tolerance, tolerance))
      << what << ": differ by "
      << (value.to(at::kDouble).cpu() - wanted.to(at::kDouble).cpu()).abs().max().item<double>();
}

std::string name_of(const Case& each) { return each.device.str() + " " + c10::toString(each.dtype); }

TEST(FusedMath, CrossEntropySum) {
  for (const Case& each : cases())
    for (const std::int64_t classes : {1, 7, 8, 50, 1000, 1024, 5003}) {
      const std::string what = name_of(each) + " " + std::to_string(classes);
      torch::manual_seed(5);
      at::Tensor targets = at::randint(0, classes, {9}, at::kLong);
      targets[3] = -100;
      at::Tensor logits = made({9, classes}, each, 1).set_requires_grad(true),
                 exact = logits.detach().to(at::kDouble).cpu().set_requires_grad(true);
      const at::Tensor loss = cross_entropy_sum(logits, targets.to(each.device), -100),
                       wanted = at::cross_entropy_loss(exact, targets, {}, at::Reduction::Sum, -100);
      EXPECT_EQ(loss.scalar_type(), each.dtype == at::kDouble ? at::kDouble : at::kFloat) << what;
      expect_near(loss, wanted, each.dtype == at::kDouble ? 1e-12 : 1e-5, what);
      (loss * 0.25).backward();
      (wanted * 0.25).backward();
      EXPECT_EQ(logits.grad().scalar_type(), each.dtype) << what;
      expect_near(logits.grad(), exact.grad(), tolerance(each.dtype), what);
      EXPECT_EQ(logits.grad()[3].abs().max().item<double>(), 0) << what;
    }
}

TEST(FusedMath, CrossEntropyOfExtremeLogits) {
  for (const Case& each : cases()) {
    at::Tensor logits = at::zeros({3, 16}, at::TensorOptions(each.device).dtype(at::kFloat));
    logits[0] = -std::numeric_limits<float>::infinity();
    logits[0][4] = 3;
    logits[1][2] = 3e4;
    logits = logits.to(each.dtype).set_requires_grad(true);
    const at::Tensor loss = cross_entropy_sum(logits, at::tensor({4, 2, 5}, at::kLong).to(each.device), -100);
    EXPECT_NEAR(loss.item<double>(), std::log(16.0), 1e-5) << name_of(each);
    loss.backward();
    EXPECT_TRUE(at::isfinite(logits.grad()).all().item<bool>()) << name_of(each);
  }
}

// Turns that all rows share, and turns of each row.
void check_rotation(const Case& each, bool of_each_row) {
  for (const std::int64_t pairs : {1, 3, 4, 32}) {
    const std::string what = name_of(each) + " " + std::to_string(pairs);
    const at::Tensor angles = of_each_row ? at::arange(10 * pairs, at::kDouble).view({2, 5, 1, pairs})
                                          : at::arange(5 * pairs, at::kDouble).view({5, 1, pairs});
    const at::Tensor turns = at::polar(at::ones_like(angles), angles);
    const at::Tensor own =
        turns.to(each.dtype == at::kDouble ? at::kComplexDouble : at::kComplexFloat).to(each.device);
    // Also unaligned and non-contiguous inputs.
    for (const int form : {0, 1, 2}) {
      at::Tensor leaf = made({2, 5, 3, 2 * pairs + (form == 0 ? 0 : 1)}, each, 2).set_requires_grad(true);
      at::Tensor exact = leaf.detach().to(at::kDouble).cpu().set_requires_grad(true);
      const auto part = [&](const at::Tensor& x) {
        return form == 0   ? x
               : form == 1 ? x.flatten().narrow(0, 1, 30 * 2 * pairs).view({2, 5, 3, 2 * pairs})
                           : x.narrow(3, 1, 2 * pairs).contiguous();
      };
      const at::Tensor y = rotate_pairs(part(leaf), own);
      const at::Tensor wanted =
          at::view_as_real(at::view_as_complex(part(exact).clone().view({2, 5, 3, pairs, 2})) * turns)
              .view({2, 5, 3, 2 * pairs});
      EXPECT_EQ(y.scalar_type(), each.dtype) << what;
      expect_near(y, wanted, each.dtype == at::kFloat ? 1e-5 : tolerance(each.dtype), what);
      const at::Tensor weights = made({2, 5, 3, 2 * pairs}, each, 3);
      y.backward(weights);
      wanted.backward(weights.to(at::kDouble).cpu());
      expect_near(leaf.grad(), exact.grad(), each.dtype == at::kFloat ? 1e-5 : 2 * tolerance(each.dtype),
                  what);
    }
  }
}

TEST(FusedMath, RotatePairs) {
  for (const Case& each : cases())
    for (const bool of_each_row : {false, true}) check_rotation(each, of_each_row);
}

TEST(FusedMath, SiluProduct) {
  for (const Case& each : cases())
    for (const std::int64_t count : {1, 15, 4096, 100003}) {
      const std::string what = name_of(each) + " " + std::to_string(count);
      at::Tensor gate = made({count}, each, 1).set_requires_grad(true),
                 up = made({count}, each, 2).set_requires_grad(true);
      at::Tensor exact_gate = gate.detach().to(at::kDouble).cpu().set_requires_grad(true),
                 exact_up = up.detach().to(at::kDouble).cpu().set_requires_grad(true);
      const at::Tensor y = silu_product(gate, up), wanted = at::silu(exact_gate) * exact_up;
      const double near = 4 * tolerance(each.dtype);
      expect_near(y, wanted, near, what);
      const at::Tensor weights = made({count}, each, 3);
      y.backward(weights);
      wanted.backward(weights.to(at::kDouble).cpu());
      expect_near(gate.grad(), exact_gate.grad(), 2 * near, what);
      expect_near(up.grad(), exact_up.grad(), 2 * near, what);
    }
}

// Rows of a larger tensor, and halves of rows.
TEST(FusedMath, SiluProductOfParts) {
  for (const Case& each : cases())
    for (const std::int64_t width : {1, 6, 64}) {
      const std::string what = name_of(each) + " " + std::to_string(width);
      const at::Tensor all = made({3, 5, 2 * width + 7}, each, 1).set_requires_grad(true);
      const at::Tensor exact = all.detach().to(at::kDouble).cpu().set_requires_grad(true);
      const auto product = [&](const at::Tensor& of, const auto& multiply) {
        return multiply(of.narrow(2, 3, width), of.narrow(2, width + 5, width));
      };
      const at::Tensor y = product(all, silu_product),
                       wanted = product(exact, [](const auto&a, const auto&b) { return at::silu(a) * b; });
      const double near = 8 * tolerance(each.dtype);
      expect_near(y, wanted, near, what);
      const at::Tensor weights = made({3, 5, width}, each, 3);
      y.backward(weights);
      wanted.backward(weights.to(at::kDouble).cpu());
      expect_near(all.grad(), exact.grad(), near, what);

      const at::Tensor joint = made({9, 2 * width}, each, 4).set_requires_grad(true);
      const at::Tensor exact_joint = joint.detach().to(at::kDouble).cpu().set_requires_grad(true);
      const at::Tensor halves = silu_halves(joint),
                       wanted_halves =
                           at::silu(exact_joint.narrow(1, 0, width)) * exact_joint.narrow(1, width, width);
      expect_near(halves, wanted_halves, near, what);
      const at::Tensor by = made({9, width}, each, 5);
      halves.backward(by);
      wanted_halves.backward(by.to(at::kDouble).cpu());
      expect_near(joint.grad(), exact_joint.grad(), near, what);
    }
}

// Modes see LibTorch's operators, or ours.
TEST(FusedMath, ModesSeeOperators) {
  struct Count final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      names.push_back(op.operator_name().name);
      op.callBoxed(stack);
    }
    std::vector<std::string> names;
  };
  for (const Case& each : cases()) {
    Count count;
    const at::Tensor x = made({4, 8}, each, 1);
    const ModeGuard guard(count);
    silu_product(x, x);
    const bool fused = each.device.is_cuda() && each.dtype != at::kDouble;
    const std::vector<std::string> expected = fused ? std::vector<std::string>{"penstock::silu_product"}
                                                    : std::vector<std::string>{"aten::silu", "aten::mul"};
    EXPECT_EQ(count.names, expected) << name_of(each);
  }
}

TEST(FusedMath, SiluProductOnTheCpuKeepsItsInputsAlone) {
  count_cpu_memory();
  const at::Tensor gate = at::randn({64, 256}).requires_grad_(true),
                   up = at::randn({64, 256}).requires_grad_(true);
  const std::int64_t before = cpu_memory().live;
  const at::Tensor y = silu_product(gate, up);
  const std::int64_t kept = cpu_memory().live - before;
  EXPECT_GE(kept, y.numel() * 4);
  EXPECT_LT(kept, y.numel() * 4 + 4096);
  EXPECT_TRUE(at::equal(y, at::silu(gate) * up));
}

// Sizes that broadcast, empty and 0-dim tensors, mixed dtypes and layouts, and gradients of one input only.
TEST(FusedMath, SiluProductOfRandomFormsOfArguments) {
  for (unsigned seed = 0; seed < 400 && !HasFailure(); ++seed) {
    std::mt19937 random(seed);
    const auto choose = [&](std::size_t count) { return static_cast<std::int64_t>(random() % count); };
    const std::vector<Case> all = cases();
    const Case each = all[static_cast<std::size_t>(choose(all.size()))];
    std::vector<std::int64_t> sizes;
    const std::int64_t dims = choose(4);
    for (std::int64_t i = 0; i < dims; ++i) sizes.push_back(choose(6) == 0 ? 0 : 1 + choose(5));
    std::vector<std::int64_t> other = sizes;
    if (choose(4) == 0 && !other.empty()) other[static_cast<std::size_t>(choose(other.size()))] = 1;
    const bool gate_wants = choose(3) > 0, up_wants = !gate_wants || choose(2) > 0;
    const auto input = [&](const std::vector<std::int64_t>& of, at::ScalarType dtype, bool wants,
                           int number) {
      at::Tensor values = made(of, {each.device, dtype}, static_cast<int>(seed) * 2 + number);
      if (choose(2) > 0 && values.dim() > 1) values = values.transpose(0, 1).contiguous().transpose(0, 1);
      return values.detach().set_requires_grad(wants);
    };
    const at::ScalarType up_dtype = choose(4) == 0 ? at::kFloat : each.dtype;
    const at::Tensor gate = input(sizes, each.dtype, gate_wants, 0), up = input(other, up_dtype, up_wants, 1);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + name_of(each) + ", " + c10::str(gate.sizes()) +
                 " and " + c10::str(up.sizes()));
    const at::Tensor y = silu_product(gate, up);
    EXPECT_EQ(y.scalar_type(), c10::promoteTypes(each.dtype, up_dtype));
    const auto exact = [](const at::Tensor& of) {
      return of.detach().to(at::kDouble).cpu().set_requires_grad(of.requires_grad());
    };
    const at::Tensor exact_gate = exact(gate), exact_up = exact(up), wanted = at::silu(exact_gate) * exact_up;
    const double near = 16 * std::max(tolerance(each.dtype), tolerance(up_dtype));
    if (wanted.numel() > 0) expect_near(y, wanted, near, "product");
    // Numbers that every dtype has.
    const at::Tensor by = at::randint(-8, 9, wanted.sizes(), at::kDouble).div(4);
    y.backward(by.to(y.options().requires_grad(false)));
    wanted.backward(by);
    for (const auto& [ours, plain] : {std::pair(gate, exact_gate), std::pair(up, exact_up)}) {
      ASSERT_EQ(ours.grad().defined(), plain.grad().defined());
      if (!plain.grad().defined()) continue;
      EXPECT_EQ(ours.grad().sizes(), plain.grad().sizes());
      EXPECT_EQ(ours.grad().scalar_type(), ours.scalar_type());
      if (plain.grad().numel() > 0) expect_near(ours.grad(), plain.grad(), 4 * near, "gradient");
    }
  }
}

TEST(FusedMath, SiluProductWithoutAGradientHasNone) {
  for (const Case& each : cases()) {
    const at::Tensor gate = made({3, 8}, each, 1).set_requires_grad(true),
                     up = made({3, 8}, each, 2).set_requires_grad(true);
    test::expect_no_gradient(silu_product(gate, up), {gate, up});
    test::expect_no_gradient(silu_halves(gate), {gate});
  }
}

TEST(FusedMath, RowsOfAnOddWidthHaveNoHalves) {
  for (const Case& each : cases()) {
    EXPECT_TRUE(test::has_text(test::message_of<ValueError>([&] {
                                 silu_halves(made({3, 5}, each, 1));
                               }),
                               "silu_halves: rows: got [3, 5]"));
    EXPECT_THROW(silu_halves(made({}, each, 1)), ValueError);
    EXPECT_EQ(silu_halves(made({3, 0}, each, 1)).sizes(), at::IntArrayRef({3, 0}));
    EXPECT_EQ(silu_halves(made({0, 6}, each, 1)).sizes(), at::IntArrayRef({0, 3}));
  }
  EXPECT_THROW(silu_product(at::Tensor(), at::ones({2})), ValueError);
  EXPECT_THROW(silu_product(at::ones({2}), at::Tensor()), ValueError);
}

TEST(FusedMath, SecondDerivativesOfSiluProductOnTheCpu) {
  const at::Tensor gate = at::randn({3, 5}, at::kDouble).requires_grad_(true),
                   up = at::randn({3, 5}, at::kDouble).requires_grad_(true);
  const at::Tensor by = at::randn({3, 5}, at::kDouble);
  const auto derivatives = [&](const at::Tensor& y) {
    const auto first = torch::autograd::grad({y}, {gate, up}, {by}, /*retain_graph=*/true, true);
    const auto second = torch::autograd::grad({(first[0] * first[1]).sum()}, {gate, up});
    return std::vector<at::Tensor>{first[0], first[1], second[0], second[1]};
  };
  const auto ours = derivatives(silu_product(gate, up)), wanted = derivatives(at::silu(gate) * up);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(at::allclose(ours[i], wanted[i], 1e-10, 1e-12)) << i;
}

}  // namespace fused_math_test
}  // namespace penstock
