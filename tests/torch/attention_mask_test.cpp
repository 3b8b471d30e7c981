// Attention under every combination of window, documents, padding and bias.
#include "penstock/torch/kernels/attention_mask.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mode.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/block_attention.h"
#include "penstock/torch/kernels/fused_attention.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/torch/attention_reference.h"

namespace penstock {
namespace attention_mask_test {

using test::attend_by_definition;
using test::AttentionRules;
using test::has_text;
using test::message_of;

using Numbers = std::mt19937_64;

std::int64_t between(Numbers& numbers, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(numbers);
}

// One attention: tensors and rules.
struct Call {
  at::Tensor q, k, v;
  AttentionRules rules;

  AttentionMask mask() const {
    AttentionMask made = AttentionMask::causal(rules.queries, rules.keys);
    if (rules.documents.defined()) made = made.with_documents(rules.documents);
    if (rules.valid.defined()) made = made.with_valid(rules.valid);
    if (rules.bias.defined()) made = made.with_bias(rules.bias);
    if (rules.positions.defined()) made = made.with_positions(rules.positions);
    return made;
  }
  std::string text() const {
    return fmt::format("batch {} heads {}/{} queries {} keys {} width {} window {}{}{}{}", q.size(0),
                       q.size(1), k.size(1), rules.queries, rules.keys, q.size(3), rules.window,
                       rules.documents.defined() ? " documents" : "", rules.valid.defined() ? " valid" : "",
                       rules.bias.defined() ? " bias" : "");
  }
  std::vector<at::Tensor> inputs() const {
    std::vector<at::Tensor> all{q, k, v};
    if (rules.bias.defined()) all.push_back(rules.bias);
    return all;
  }
};

struct Shape {
  std::int64_t batch = 1, groups = 1, repeats = 1, queries = 1, keys = 1, width = 4;
};

// Heads inside, as a projection gives them: not contiguous.
at::Tensor heads_of(std::int64_t batch, std::int64_t heads, std::int64_t length, std::int64_t width) {
  return at::randn({batch, length, heads, width}, at::kDouble).transpose(1, 2).requires_grad_();
}

// Each token begins a new document with probability 1 / 20.
at::Tensor some_documents(std::int64_t batch, std::int64_t length) {
  return at::rand({batch, length}).lt(0.05).to(at::kInt).cumsum(1, at::kInt);
}

Call random_call(Numbers& numbers, const Shape& shape, std::int64_t window, bool documents, bool valid,
                 bool bias) {
  const std::int64_t heads = shape.groups * shape.repeats;
  Call call{heads_of(shape.batch, heads, shape.queries, shape.width),
            heads_of(shape.batch, shape.groups, shape.keys, shape.width),
            heads_of(shape.batch, shape.groups, shape.keys, shape.width),
            {.queries = shape.queries, .keys = shape.keys, .window = window}};
  if (documents) call.rules.documents = some_documents(shape.batch, shape.keys);
  if (valid) {
    std::vector<std::int64_t> counts;
    for (std::int64_t row = 0; row < shape.batch; ++row)
      counts.push_back(between(numbers, 0, shape.keys + 1));
    call.rules.valid = torch::tensor(counts, at::kLong);
  }
  if (bias)
    call.rules.bias = at::randn({between(numbers, 0, 1) == 0 ? 1 : shape.batch,
                                 between(numbers, 0, 1) == 0 ? 1 : heads, shape.queries, shape.keys},
                                at::kDouble)
                          .requires_grad_();
  return call;
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

using Form = std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                      const AttentionMask&, std::int64_t)>;

// Result and gradients equal the reference's. Sums of up to a few hundred terms of size 1 in another order:
// 1e-12 in float64.
void expect_the_definition(const Call& call, const Form& form, double tolerance = 1e-12) {
  SCOPED_TRACE(call.text());
  const at::Tensor expected = attend_by_definition(call.q, call.k, call.v, call.rules);
  const at::Tensor actual = form(call.q, call.k, call.v, call.mask(), call.rules.window);
  ASSERT_EQ(actual.sizes(), expected.sizes());
  EXPECT_LT(largest_difference(actual, expected), tolerance);
  const at::Tensor gradient = at::randn_like(expected);
  const auto wanted = torch::autograd::grad({expected}, call.inputs(), {gradient});
  const auto found = torch::autograd::grad({actual}, call.inputs(), {gradient});
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(found[i].sizes(), wanted[i].sizes()) << "input " << i;
    EXPECT_LT(largest_difference(found[i], wanted[i]), 10 * tolerance) << "gradient of input " << i;
  }
}

// ---- numbers ----

TEST(AttentionMask, EveryCombinationAgainstTheDefinition) {
  Numbers numbers(1);
  torch::manual_seed(1);
  for (int round = 0; round < 96; ++round) {
    const bool whole_row = between(numbers, 0, 2) > 0;
    Shape shape{between(numbers, 1, 3),
                between(numbers, 1, 2),
                between(numbers, 1, 3),
                between(numbers, 1, 200),
                0,
                4};
    shape.keys = shape.queries + (whole_row ? 0 : between(numbers, 1, 90));
    const std::int64_t window = round % 3 == 0 ? 0 : between(numbers, 1, shape.keys + 10);
    const Call call =
        random_call(numbers, shape, window, (round & 1) != 0, (round & 2) != 0, (round & 4) != 0);
    expect_the_definition(call, attend);
    if (round % 4 == 0) expect_the_definition(call, attend_by_products);
  }
}

// Small windows, so that there are many blocks; lengths around their borders.
TEST(AttentionMask, BandsAgainstTheDefinition) {
  Numbers numbers(2);
  torch::manual_seed(2);
  int round = 0;
  for (const std::int64_t length : {65, 127, 128, 129, 300})
    for (const std::int64_t window : {1, 2, 64, 65, 100, 128}) {
      const Shape shape{2, 2, 1 + round % 2, length, length + (round % 3 == 0 ? 17 : 0), 4};
      const Call call =
          random_call(numbers, shape, window, (round & 1) != 0, (round & 2) != 0, round % 5 == 0);
      expect_the_definition(call, attend);
      ++round;
    }
}

TEST(AttentionMask, QueryBlocksAgainstTheDefinition) {
  Numbers numbers(3);
  torch::manual_seed(3);
  // Documents, padding, bias, all.
  for (const int kind : {1, 2, 4, 7}) {
    const std::int64_t length = kind == 7 ? 1100 : 1025;
    const Shape shape{kind == 4 ? 1 : 2, 1, 2, length, length + (kind == 2 ? 9 : 0), 4};
    expect_the_definition(random_call(numbers, shape, 0, (kind & 1) != 0, (kind & 2) != 0, (kind & 4) != 0),
                          attend);
  }
}

TEST(AttentionMask, QueryBlocksWithAWindow) {
  Numbers numbers(4);
  torch::manual_seed(4);
  const Shape shape{2, 2, 1, 700, 720, 4};
  expect_the_definition(random_call(numbers, shape, 130, true, false, true), attend_in_query_blocks);
}

// Rows from which tokens were left out: a window reaches over the gaps.
TEST(AttentionMask, WindowsCountGivenPositions) {
  Numbers numbers(6);
  torch::manual_seed(6);
  int round = 0;
  for (const std::int64_t length : {1, 20, 65, 130, 300})
    for (const std::int64_t window : {1, 2, 7, 64, 100, 260, 1000}) {
      const Shape shape{2, 2, 1 + round % 2, length, length, 4};
      Call call = random_call(numbers, shape, window, (round & 1) != 0, (round & 2) != 0, round % 5 == 0);
      call.rules.positions = at::randint(1, 4, {2, length}, at::kLong).cumsum(1);
      expect_the_definition(call, attend);
      if (round % 4 == 0) expect_the_definition(call, attend_in_query_blocks);
      ++round;
    }
}

TEST(AttentionMask, AWindowOfOneIsTheTokenItself) {
  const Call call{heads_of(2, 2, 150, 4),
                  heads_of(2, 2, 150, 4),
                  heads_of(2, 2, 150, 4),
                  {.queries = 150, .keys = 150, .window = 1}};
  EXPECT_LT(largest_difference(attend(call.q, call.k, call.v, call.mask(), 1), call.v), 1e-15);
}

TEST(AttentionMask, AWindowOfTheWholeRowIsNone) {
  const Call call{
      heads_of(2, 2, 150, 4), heads_of(2, 2, 150, 4), heads_of(2, 2, 150, 4), {.queries = 150, .keys = 150}};
  const at::Tensor expected = attend(call.q, call.k, call.v, call.mask());
  for (const std::int64_t window : {150, 151, 100000})
    EXPECT_TRUE(at::equal(attend(call.q, call.k, call.v, call.mask(), window), expected)) << window;
}

// Rows of padding only, and values of padding tokens that are far too large: the result and all gradients
// stay finite, and padding gets zeros.
TEST(AttentionMask, PaddingIsZeroAndNeverSeen) {
  torch::manual_seed(5);
  for (const std::int64_t window : {0, 20})
    for (const std::int64_t length : {10, 200, 1030}) {
      SCOPED_TRACE(fmt::format("length {} window {}", length, window));
      Call call{heads_of(3, 2, length, 4),
                heads_of(3, 1, length, 4),
                heads_of(3, 1, length, 4),
                {.queries = length,
                 .keys = length,
                 .window = window,
                 .valid = torch::tensor({std::int64_t{0}, std::int64_t{7}, length})}};
      const at::Tensor before = attend(call.q, call.k, call.v, call.mask(), window);
      {
        const torch::NoGradGuard no_grad;
        for (const at::Tensor& x : {call.k, call.v}) {
          x[0].fill_(1e300);
          x[1].narrow(1, 7, length - 7).fill_(-1e300);
        }
      }
      const at::Tensor after = attend(call.q, call.k, call.v, call.mask(), window);
      EXPECT_TRUE(at::equal(after, before));
      EXPECT_EQ(after[0].abs().max().item<double>(), 0);
      EXPECT_EQ(after[1].narrow(1, 7, length - 7).abs().max().item<double>(), 0);
      EXPECT_GT(after[1].narrow(1, 0, 7).abs().min().item<double>(), 0);
      for (const at::Tensor& gradient : torch::autograd::grad({after.sum()}, {call.q, call.k, call.v}, {})) {
        EXPECT_TRUE(gradient.isfinite().all().item<bool>());
        EXPECT_EQ(gradient[0].abs().max().item<double>(), 0);
        EXPECT_EQ(gradient[1].narrow(1, 7, length - 7).abs().max().item<double>(), 0);
      }
    }
}

// A layer of a cache keeps only the keys that its window reaches.
TEST(AttentionMask, KeysBeforeTheWindowMayBeMissing) {
  Numbers numbers(6);
  torch::manual_seed(6);
  for (const std::int64_t queries : {1, 5, 90, 300}) {
    const Call call = random_call(numbers, {2, 2, 2, queries, 400, 4}, 50, true, true, true);
    const at::Tensor expected = attend_by_definition(call.q, call.k, call.v, call.rules);
    const std::int64_t kept = std::min<std::int64_t>(400, queries + 49);
    for (const std::int64_t more : {0, 3}) {
      const std::int64_t keys = std::min<std::int64_t>(kept + more, 400);
      EXPECT_LT(largest_difference(attend(call.q, call.k.narrow(2, 400 - keys, keys),
                                          call.v.narrow(2, 400 - keys, keys), call.mask(), 50),
                                   expected),
                1e-12)
          << queries << " queries, " << keys << " keys";
    }
    EXPECT_THROW(
        attend(call.q, call.k.narrow(2, 0, kept - 1), call.v.narrow(2, 0, kept - 1), call.mask(), 50),
        ValueError);
  }
}

// One mask for layers with different windows, with and without repeated heads: what one layer caches does not
// change another.
TEST(AttentionMask, OneMaskServesLayersWithDifferentWindows) {
  Numbers numbers(7);
  torch::manual_seed(7);
  Call call = random_call(numbers, {2, 2, 2, 150, 150, 4}, 0, true, true, false);
  const AttentionMask mask = call.mask();
  for (const std::int64_t window : {0, 30, 100, 30, 0, 70}) {
    call.rules.window = window;
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      const auto as = [&](const at::Tensor& x) { return x.to(dtype); };
      const at::Tensor expected = attend_by_definition(call.q, call.k, call.v, call.rules);
      EXPECT_LT(largest_difference(attend(as(call.q), as(call.k), as(call.v), mask, window), expected),
                dtype == at::kDouble ? 1e-12 : 1e-5);
      EXPECT_LT(largest_difference(attend(as(call.k), as(call.k), as(call.v), mask, window),
                                   attend_by_definition(call.k, call.k, call.v, call.rules)),
                dtype == at::kDouble ? 1e-12 : 1e-5);
    }
  }
}

// The reference computes in float64 from the same rounded inputs. float32: sums of at most 300 terms of size
// 1. bfloat16 (8 bits): inputs of size up to 4 and one rounding of scores, weights or result each, 2^-5.
TEST(AttentionMask, OtherDtypes) {
  Numbers numbers(8);
  torch::manual_seed(8);
  for (const auto& [dtype, tolerance] :
       std::vector<std::pair<at::ScalarType, double>>{{at::kFloat, 1e-5}, {at::kBFloat16, 0.03125}})
    for (int kind = 0; kind < 8; ++kind) {
      Call call =
          random_call(numbers, {2, 2, 2, 300, 300, 8}, 70, (kind & 1) != 0, (kind & 2) != 0, (kind & 4) != 0);
      const auto narrow = [&](at::Tensor& x) {
        if (x.defined()) x = x.detach().to(dtype).requires_grad_();
      };
      for (at::Tensor* x : {&call.q, &call.k, &call.v, &call.rules.bias}) narrow(*x);
      Call wide = call;
      for (at::Tensor* x : {&wide.q, &wide.k, &wide.v, &wide.rules.bias})
        if (x->defined()) *x = x->detach().to(at::kDouble).requires_grad_();
      SCOPED_TRACE(call.text());
      const at::Tensor expected = attend_by_definition(wide.q, wide.k, wide.v, wide.rules);
      const at::Tensor actual = attend(call.q, call.k, call.v, call.mask(), 70);
      EXPECT_EQ(actual.scalar_type(), dtype);
      EXPECT_LT(largest_difference(actual, expected), tolerance);
      const auto wanted = torch::autograd::grad({expected.sum()}, wide.inputs());
      const auto found = torch::autograd::grad({actual.sum()}, call.inputs());
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_EQ(found[i].scalar_type(), dtype);
        // Gradients of v and the bias add up to 70 terms.
        EXPECT_LT(largest_difference(found[i], wanted[i]), 8 * tolerance) << "input " << i;
      }
    }
}

TEST(AttentionMask, UnderAutocastTheResultHasItsDtype) {
  Numbers numbers(9);
  torch::manual_seed(9);
  for (const std::int64_t window : {0, 70}) {
    Call call = random_call(numbers, {2, 1, 2, window == 0 ? 1100 : 300, window == 0 ? 1100 : 300, 8}, window,
                            true, false, false);
    const at::Tensor expected = attend_by_definition(call.q, call.k, call.v, call.rules);
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    const auto as = [](const at::Tensor& x) { return x.to(at::kBFloat16); };
    const at::Tensor actual = attend(as(call.q), as(call.k), as(call.v), call.mask(), window);
    EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
    EXPECT_LT(largest_difference(actual, expected), 0.0625);
    const auto found = torch::autograd::grad({actual.sum()}, {call.q});
    EXPECT_TRUE(found[0].isfinite().all().item<bool>());
  }
}

// ---- memory ----

// Elements of the largest memory that any operator returned.
class LargestTensor final : public Mode {
 public:
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    op.callBoxed(stack);
    const std::size_t results = op.schema().returns().size();
    for (std::size_t i = stack->size() - results; i < stack->size(); ++i)
      if ((*stack)[i].isTensor() && (*stack)[i].toTensor().defined()) note((*stack)[i].toTensor());
  }
  std::int64_t elements = 0;

 private:
  void note(const at::Tensor& tensor) {
    elements = std::max(elements, static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.itemsize()));
  }
};

std::int64_t largest_tensor(const Call& call) {
  LargestTensor largest;
  const ModeGuard guard(largest);
  attend(call.q, call.k, call.v, call.mask(), call.rules.window).sum().backward();
  return largest.elements;
}

TEST(AttentionMask, NoTensorOfAllPairsForWindows) {
  torch::manual_seed(10);
  const std::int64_t length = 2048;
  for (const bool documents : {false, true}) {
    Call call{at::randn({1, 4, length, 8}).requires_grad_(),
              at::randn({1, 2, length, 8}).requires_grad_(),
              at::randn({1, 2, length, 8}).requires_grad_(),
              {.queries = length, .keys = length, .window = 128}};
    if (documents) call.rules.documents = some_documents(1, length);
    // Scores of four heads: 192 keys for each query.
    EXPECT_LE(largest_tensor(call), 4 * length * 192);
    EXPECT_LT(4 * length * 192, length * length);
  }
}

// Documents without a window: scores of one block at a time, and no mask is kept.
TEST(AttentionMask, NoTensorOfAllPairsForDocuments) {
  torch::manual_seed(11);
  const std::int64_t length = 2048;
  Call call{at::randn({1, 2, length, 8}).requires_grad_(),
            at::randn({1, 2, length, 8}).requires_grad_(),
            at::randn({1, 2, length, 8}).requires_grad_(),
            {.queries = length, .keys = length, .documents = some_documents(1, length)}};
  EXPECT_LE(largest_tensor(call), 2 * 512 * length);
  EXPECT_LT(2 * 512 * length, length * length);
}

// ---- fake tensors, bad input ----

TEST(AttentionMask, FakeTensorsHaveTheShapes) {
  for (const std::int64_t window : {0, 70}) {
    const at::Tensor q = make_fake({2, 4, 1100, 8}), k = make_fake({2, 2, 1100, 8});
    const AttentionMask mask =
        AttentionMask::within_documents(make_fake({2, 1100}, at::TensorOptions(at::kInt)));
    const at::Tensor y = attend(q.requires_grad_(), k.requires_grad_(), k, mask, window);
    EXPECT_TRUE(is_fake(y));
    EXPECT_EQ(y.sizes(), q.sizes());
    const auto found = torch::autograd::grad({y.sum()}, {q, k});
    EXPECT_EQ(found[0].sizes(), q.sizes());
    EXPECT_EQ(found[1].sizes(), k.sizes());
  }
}

TEST(AttentionMask, BadInputNamesTheTensor) {
  const AttentionMask mask = AttentionMask::causal(6, 8);
  const auto message = [](const auto& work) { return message_of<ValueError>(work); };
  EXPECT_THROW(AttentionMask::causal(3, 2), ValueError);
  EXPECT_TRUE(has_text(message([&] { mask.with_documents(at::zeros({2, 6}, at::kInt)); }), "[batch, 8]"));
  EXPECT_TRUE(has_text(message([&] { mask.with_documents(at::zeros({2, 8})); }), "documents"));
  EXPECT_TRUE(has_text(message([&] { mask.with_documents({}); }), "no tensor"));
  EXPECT_TRUE(has_text(message([&] { mask.with_valid(at::zeros({2})); }), "row-valid"));
  EXPECT_TRUE(has_text(message([&] { mask.with_valid(at::zeros({2, 1}, at::kInt)); }), "[batch]"));
  EXPECT_TRUE(has_text(message([&] { mask.with_positions(at::zeros({2, 6}, at::kInt)); }), "positions"));
  EXPECT_TRUE(has_text(message([&] { mask.with_positions(at::zeros({2, 8})); }), "[batch, 8]"));
  EXPECT_TRUE(has_text(message([&] { mask.with_bias(at::zeros({2, 6, 8})); }), "additive bias"));
  EXPECT_TRUE(has_text(message([&] { mask.with_bias(at::zeros({1, 1, 8, 8})); }), "6, 8"));
  EXPECT_TRUE(has_text(message([&] {
                         mask.with_bias(at::zeros({1, 1, 6, 8}, at::kInt));
                       }),
                       "floating point"));
  const at::Tensor q = at::randn({3, 4, 6, 2}), k = at::randn({3, 2, 8, 2});
  EXPECT_TRUE(has_text(message([&] { attend(q, k, k, mask, -1); }), "window"));
  EXPECT_TRUE(has_text(message([&] { attend(q.narrow(2, 0, 5), k, k, mask); }), "queries"));
  EXPECT_TRUE(has_text(message([&] {
                         attend(q, k, k, mask.with_documents(at::zeros({2, 8}, at::kInt)));
                       }),
                       "documents"));
  EXPECT_TRUE(has_text(message([&] { attend(q, k, k, mask.with_valid(at::zeros({2}, at::kInt))); }),
                       "row-valid counts"));
  EXPECT_TRUE(has_text(message([&] {
                         attend(q, k, k, mask.with_bias(at::zeros({1, 2, 6, 8})));
                       }),
                       "heads of this rank"));
  EXPECT_THROW(attend(q.narrow(1, 0, 3), k, k, mask), ValueError);
}

}  // namespace attention_mask_test
}  // namespace penstock
