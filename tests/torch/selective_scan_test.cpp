// The selective scan against the recurrence, token by token in float64, with its gradients by autograd.
#include "penstock/torch/scan/selective_scan.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace selective_scan_test {

using test::has_text;
using test::message_of;

struct Case {
  at::Device device;
  at::ScalarType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all{{at::kCPU, at::kDouble}, {at::kCPU, at::kFloat}, {at::kCPU, at::kBFloat16}};
  if (torch::cuda::is_available())
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
      all.push_back({at::Device(at::kCUDA, 0), dtype});
  return all;
}

// Relative to the largest element. On CUDA the operands of products are rounded to 16 bits, too.
double tolerance(const Case& each) {
  if (each.dtype == at::kBFloat16) return each.device.is_cuda() ? 3.0 / 64 : 1.0 / 64;
  return each.dtype == at::kFloat ? 2e-5 : 1e-11;
}

at::Tensor randn(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }

std::vector<at::Tensor> inputs_of(const SelectiveScan& scan) {
  return {scan.values, scan.steps, scan.decay, scan.keys, scan.queries, scan.skip, scan.initial_state};
}
const std::vector<std::string> kInputNames = {"values",  "steps", "decay",        "keys",
                                              "queries", "skip",  "initial_state"};

// One token at a time.
ScanResult recurrence(const SelectiveScan& scan) {
  const std::int64_t batch = scan.values.size(0), length = scan.values.size(1), heads = scan.values.size(2),
                     share = heads / scan.keys.size(2);
  at::Tensor state =
      scan.initial_state.defined()
          ? scan.initial_state
          : at::zeros({batch, heads, scan.values.size(3), scan.keys.size(3)}, scan.values.options());
  std::vector<at::Tensor> results;
  for (std::int64_t t = 0; t < length; ++t) {
    const at::Tensor value = scan.values.select(1, t), step = scan.steps.select(1, t),
                     key = scan.keys.select(1, t).repeat_interleave(share, 1),
                     query = scan.queries.select(1, t).repeat_interleave(share, 1);
    at::Tensor factor = at::exp(step * scan.decay);
    if (scan.documents.defined() && t > 0)
      factor = factor *
               scan.documents.select(1, t).eq(scan.documents.select(1, t - 1)).unsqueeze(1).to(at::kDouble);
    state = state * factor.unsqueeze(-1).unsqueeze(-1) +
            (step.unsqueeze(-1) * value).unsqueeze(-1) * key.unsqueeze(-2);
    results.push_back(at::matmul(state, query.unsqueeze(-1)).squeeze(-1) + scan.skip.unsqueeze(-1) * value);
  }
  return {.values = at::stack(results, 1), .state = state};
}

struct Sizes {
  std::int64_t batch, length, heads, head_width, groups, state_size, chunk;
  bool documents, initial;
};

SelectiveScan random_scan(const Sizes& s) {
  SelectiveScan scan{.values = randn({s.batch, s.length, s.heads, s.head_width}),
                     .steps = at::softplus(randn({s.batch, s.length, s.heads})),
                     .decay = -at::exp(randn({s.heads})),
                     .keys = randn({s.batch, s.length, s.groups, s.state_size}),
                     .queries = randn({s.batch, s.length, s.groups, s.state_size}),
                     .skip = randn({s.heads}),
                     .chunk = s.chunk};
  if (s.initial) scan.initial_state = randn({s.batch, s.heads, s.head_width, s.state_size});
  if (s.documents)
    scan.documents = at::cumsum(at::rand({s.batch, s.length}).lt(0.25).to(at::kLong), 1).remainder(3);
  return scan;
}

// Leaves with gradients, rounded to the dtypes that training has.
SelectiveScan as(const SelectiveScan& scan, const Case& each) {
  const at::ScalarType real = each.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto leaf = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.defined() ? tensor.detach().to(each.device).to(dtype).set_requires_grad(true)
                            : at::Tensor();
  };
  return {.values = leaf(scan.values, each.dtype),
          .steps = leaf(scan.steps, real),
          .decay = leaf(scan.decay, real),
          .keys = leaf(scan.keys, each.dtype),
          .queries = leaf(scan.queries, each.dtype),
          .skip = leaf(scan.skip, real),
          .documents = scan.documents.defined() ? scan.documents.to(each.device) : at::Tensor(),
          .initial_state = leaf(scan.initial_state, real),
          .chunk = scan.chunk};
}

void expect_near(const at::Tensor& value, const at::Tensor& wanted, double near, const std::string& what) {
  ASSERT_TRUE(value.defined()) << what;
  ASSERT_EQ(value.sizes(), wanted.sizes()) << what;
  const double off = (value.detach().to(at::kDouble).cpu() - wanted.detach()).abs().max().item<double>();
  EXPECT_LE(off, near * (0.1 + wanted.detach().abs().max().item<double>())) << what;
}

// Result, last state and all gradients. The loss weights both results, or only one of them.
void expect_scan(const SelectiveScan& scan, const Case& each, const std::string& name, int uses) {
  const std::string what = name + " " + each.device.str() + " " + c10::toString(each.dtype);
  const SelectiveScan own = as(scan, each), wanted = as(own, {at::kCPU, at::kDouble});
  const ScanResult result = selective_scan(own), expected = recurrence(wanted);
  const double near = tolerance(each);
  EXPECT_EQ(result.values.scalar_type(), each.dtype) << what;
  EXPECT_EQ(result.state.scalar_type(), each.dtype == at::kDouble ? at::kDouble : at::kFloat) << what;
  expect_near(result.values, expected.values, near, what + ", result");
  expect_near(result.state, expected.state, near, what + ", state");
  const at::Tensor by = randn(expected.values.sizes()).to(each.dtype),
                   by_state = randn(expected.state.sizes());
  const auto loss_of = [&](const ScanResult& from) {
    at::Tensor loss = at::zeros({}, from.state.options());
    if (uses != 2) loss = loss + (from.values * by.to(from.values.options())).sum();
    if (uses != 1) loss = loss + (from.state * by_state.to(from.state.options())).sum();
    return loss;
  };
  loss_of(result).backward();
  loss_of(expected).backward();
  for (std::size_t i = 0; i < inputs_of(own).size(); ++i) {
    const at::Tensor one = inputs_of(own)[i], other = inputs_of(wanted)[i];
    if (!one.defined()) continue;
    if (!other.grad().defined()) {
      if (one.grad().defined()) {
        EXPECT_EQ(one.grad().abs().max().item<double>(), 0) << what << ", gradient of " << kInputNames[i];
      }
      continue;
    }
    EXPECT_EQ(one.grad().scalar_type(), one.scalar_type()) << what;
    expect_near(one.grad(), other.grad(), 2 * near, what + ", gradient of " + kInputNames[i]);
  }
}

TEST(SelectiveScan, EqualsTheRecurrenceWithGradients) {
  torch::manual_seed(1);
  const auto pick = [](std::int64_t low, std::int64_t high) {
    return at::randint(low, high + 1, {1}).item<std::int64_t>();
  };
  for (int number = 0; number < 24; ++number) {
    const std::int64_t groups = pick(1, 3);
    const Sizes sizes{.batch = pick(1, 3),
                      .length = number < 2 ? 1 : pick(2, 23),
                      .heads = groups * pick(1, 3),
                      .head_width = pick(1, 6),
                      .groups = groups,
                      .state_size = pick(1, 7),
                      .chunk = number % 5 == 4 ? 64 : pick(1, 8),
                      .documents = number % 3 == 2,
                      .initial = number % 2 == 1};
    const SelectiveScan scan = random_scan(sizes);
    for (const Case& each : cases())
      expect_scan(scan, each,
                  "case " + std::to_string(number) + ", length " + std::to_string(sizes.length) + ", chunk " +
                      std::to_string(sizes.chunk),
                  number % 3);
  }
}

// Sizes as in models: several tiles of a chunk, and packs of elements on a GPU.
TEST(SelectiveScan, LargeChunksAndHeads) {
  torch::manual_seed(2);
  for (const bool documents : {false, true}) {
    const SelectiveScan scan = random_scan({.batch = 1,
                                            .length = 200,
                                            .heads = 4,
                                            .head_width = 16,
                                            .groups = 2,
                                            .state_size = 32,
                                            .chunk = 128,
                                            .documents = documents,
                                            .initial = documents});
    for (const Case& each : cases()) expect_scan(scan, each, "large", 0);
  }
}

// A central difference per input, independent of autograd and of the reference.
TEST(SelectiveScan, GradientsAreDifferences) {
  torch::manual_seed(6);
  const SelectiveScan scan = as(random_scan({.batch = 2,
                                             .length = 9,
                                             .heads = 2,
                                             .head_width = 3,
                                             .groups = 1,
                                             .state_size = 4,
                                             .chunk = 4,
                                             .documents = true,
                                             .initial = true}),
                                {at::kCPU, at::kDouble});
  const at::Tensor by = randn(scan.values.sizes()), by_state = randn(scan.initial_state.sizes());
  const auto loss = [&] {
    const ScanResult result = selective_scan(scan);
    return (result.values * by).sum() + (result.state * by_state).sum();
  };
  loss().backward();
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < inputs_of(scan).size(); ++i) {
    at::Tensor input = inputs_of(scan)[i];
    const at::Tensor gradient = input.grad().clone(), direction = randn(input.sizes());
    constexpr double kStep = 1e-5;
    input.add_(direction, kStep);
    const double above = loss().item<double>();
    input.sub_(direction, 2 * kStep);
    const double below = loss().item<double>();
    input.add_(direction, kStep);
    const double slope = (above - below) / (2 * kStep), wanted = (gradient * direction).sum().item<double>();
    EXPECT_NEAR(slope, wanted, 1e-6 * (1 + std::abs(wanted))) << kInputNames[i];
  }
}

// Decays far below the smallest number and steps of zero: finite, and equal to the recurrence.
TEST(SelectiveScan, ExtremeDecaysStayFinite) {
  torch::manual_seed(7);
  for (const Case& each : cases()) {
    SelectiveScan scan = random_scan({.batch = 1,
                                      .length = 40,
                                      .heads = 3,
                                      .head_width = 4,
                                      .groups = 1,
                                      .state_size = 4,
                                      .chunk = 16,
                                      .documents = false,
                                      .initial = true});
    scan.decay = torch::tensor({-1e4, -1e-6, -30.0}, at::kDouble);
    scan.steps.narrow(1, 5, 3).zero_();
    scan.steps.narrow(1, 20, 1).fill_(1000);
    expect_scan(scan, each, "extreme", 0);
    const SelectiveScan own = as(scan, each);
    const ScanResult result = selective_scan(own);
    (result.values.sum() + result.state.sum()).backward();
    for (const at::Tensor& input : inputs_of(own)) EXPECT_TRUE(input.grad().isfinite().all().item<bool>());
  }
}

// A document does not see what is before it: not even NaN gets through.
TEST(SelectiveScan, DocumentsAreSeparate) {
  torch::manual_seed(8);
  for (const std::int64_t border : {3, 8, 11}) {
    SelectiveScan scan = random_scan({.batch = 2,
                                      .length = 20,
                                      .heads = 2,
                                      .head_width = 3,
                                      .groups = 1,
                                      .state_size = 4,
                                      .chunk = 8,
                                      .documents = false,
                                      .initial = false});
    scan.documents = at::arange(20).ge(border).to(at::kInt).expand({2, 20});
    const auto tail = [&](const at::Tensor& tensor) { return tensor.narrow(1, border, 20 - border); };
    SelectiveScan alone = scan;
    for (at::Tensor* part : {&alone.values, &alone.steps, &alone.keys, &alone.queries}) *part = tail(*part);
    alone.documents = at::Tensor();
    const ScanResult both = selective_scan(scan), one = selective_scan(alone);
    EXPECT_TRUE(at::allclose(tail(both.values), one.values, 1e-12, 1e-12)) << border;
    EXPECT_TRUE(at::allclose(both.state, one.state, 1e-12, 1e-12)) << border;
    // The last token of the first document has no influence on the second.
    at::Tensor values = scan.values.clone().set_requires_grad(true);
    scan.values = values;
    tail(selective_scan(scan).values).sum().backward();
    EXPECT_EQ(values.grad().narrow(1, 0, border).abs().max().item<double>(), 0) << border;
  }
}

TEST(SelectiveScan, ChunkLengthDoesNotMatter) {
  torch::manual_seed(9);
  SelectiveScan scan = random_scan({.batch = 2,
                                    .length = 33,
                                    .heads = 4,
                                    .head_width = 3,
                                    .groups = 2,
                                    .state_size = 5,
                                    .chunk = 33,
                                    .documents = true,
                                    .initial = true});
  const ScanResult whole = selective_scan(scan);
  for (const std::int64_t chunk : {1, 2, 7, 16, 32, 1000}) {
    scan.chunk = chunk;
    const ScanResult result = selective_scan(scan);
    EXPECT_TRUE(at::allclose(result.values, whole.values, 1e-12, 1e-12)) << chunk;
    EXPECT_TRUE(at::allclose(result.state, whole.state, 1e-12, 1e-12)) << chunk;
  }
}

TEST(SelectiveScan, NonContiguousInputs) {
  torch::manual_seed(10);
  SelectiveScan scan = random_scan({.batch = 2,
                                    .length = 10,
                                    .heads = 4,
                                    .head_width = 4,
                                    .groups = 2,
                                    .state_size = 6,
                                    .chunk = 4,
                                    .documents = true,
                                    .initial = true});
  const ScanResult plain = selective_scan(scan);
  for (at::Tensor* part :
       {&scan.values, &scan.keys, &scan.queries, &scan.steps, &scan.initial_state, &scan.documents})
    *part = part->transpose(0, 1).contiguous().transpose(0, 1);
  const ScanResult result = selective_scan(scan);
  EXPECT_TRUE(at::equal(result.values, plain.values));
  EXPECT_TRUE(at::equal(result.state, plain.state));
}

// Steps of one and of several tokens, from the state of a scan and from zeros.
TEST(SelectiveScan, StepsEqualTheScan) {
  torch::manual_seed(11);
  for (const Case& each : cases()) {
    const SelectiveScan scan = as(random_scan({.batch = 2,
                                               .length = 13,
                                               .heads = 4,
                                               .head_width = 5,
                                               .groups = 2,
                                               .state_size = 40,
                                               .chunk = 4,
                                               .documents = false,
                                               .initial = true}),
                                  each);
    const ScanResult whole = selective_scan(scan);
    SelectiveScan piece = scan;
    std::vector<at::Tensor> results;
    at::Tensor state = scan.initial_state;
    std::int64_t at = 0;
    for (const std::int64_t size : {1, 1, 3, 7, 1}) {
      const auto part = [&](const at::Tensor& tensor) { return tensor.narrow(1, at, size); };
      piece.values = part(scan.values);
      piece.steps = part(scan.steps);
      piece.keys = part(scan.keys);
      piece.queries = part(scan.queries);
      piece.initial_state = state;
      const at::Tensor kept = state.detach().clone();
      const ScanResult result = selective_scan_step(piece);
      EXPECT_TRUE(at::equal(state, kept)) << "a step must not write its input";
      EXPECT_FALSE(result.values.requires_grad());
      results.push_back(result.values);
      state = result.state;
      at += size;
    }
    const std::string what = each.device.str() + " " + c10::toString(each.dtype);
    expect_near(at::cat(results, 1), whole.values.to(at::kDouble).cpu(), tolerance(each), what);
    expect_near(state, whole.state.to(at::kDouble).cpu(), tolerance(each), what);
  }
}

// Autocast must not round the products of a float32 scan.
TEST(SelectiveScan, AutocastChangesNothing) {
  torch::manual_seed(12);
  const SelectiveScan scan = as(random_scan({.batch = 1,
                                             .length = 12,
                                             .heads = 2,
                                             .head_width = 4,
                                             .groups = 1,
                                             .state_size = 4,
                                             .chunk = 4,
                                             .documents = false,
                                             .initial = false}),
                                {at::kCPU, at::kFloat});
  const at::Tensor plain = selective_scan(scan).values;
  const AutocastScope casts(at::kCPU, at::kBFloat16);
  EXPECT_TRUE(at::equal(selective_scan(scan).values, plain));
}

TEST(SelectiveScan, FakeTensorsHaveTheShapes) {
  const auto fake = [](at::IntArrayRef sizes, at::ScalarType dtype) {
    return make_fake(sizes, at::TensorOptions(dtype)).set_requires_grad(dtype != at::kLong);
  };
  SelectiveScan scan{.values = fake({2, 10, 4, 3}, at::kBFloat16),
                     .steps = fake({2, 10, 4}, at::kFloat),
                     .decay = fake({4}, at::kFloat),
                     .keys = fake({2, 10, 2, 5}, at::kBFloat16),
                     .queries = fake({2, 10, 2, 5}, at::kBFloat16),
                     .skip = fake({4}, at::kFloat),
                     .documents = fake({2, 10}, at::kLong),
                     .initial_state = fake({2, 4, 3, 5}, at::kFloat),
                     .chunk = 4};
  const ScanResult result = selective_scan(scan);
  ASSERT_TRUE(is_fake(result.values));
  EXPECT_EQ(result.values.sizes(), scan.values.sizes());
  EXPECT_EQ(result.values.scalar_type(), at::kBFloat16);
  EXPECT_EQ(result.state.sizes(), scan.initial_state.sizes());
  EXPECT_EQ(result.state.scalar_type(), at::kFloat);
  (result.values.to(at::kFloat).sum() + result.state.sum()).backward();
  for (const at::Tensor& input : inputs_of(scan)) {
    ASSERT_TRUE(input.grad().defined());
    EXPECT_EQ(input.grad().sizes(), input.sizes());
    EXPECT_EQ(input.grad().scalar_type(), input.scalar_type());
  }
  scan.documents = at::Tensor();
  EXPECT_EQ(selective_scan_step(scan).state.sizes(), scan.initial_state.sizes());
}

TEST(SelectiveScan, ErrorsNameTheArgument) {
  const SelectiveScan good = random_scan({.batch = 2,
                                          .length = 5,
                                          .heads = 4,
                                          .head_width = 3,
                                          .groups = 2,
                                          .state_size = 6,
                                          .chunk = 4,
                                          .documents = true,
                                          .initial = true});
  const auto message = [&](const auto& spoil) {
    SelectiveScan scan = good;
    spoil(scan);
    return message_of<ValueError>([&] { selective_scan(scan); });
  };
  EXPECT_TRUE(has_text(message([](auto& scan) { scan.values = scan.values[0]; }), "selective_scan: values"));
  EXPECT_TRUE(has_text(message([](auto& scan) {
                         scan.keys = at::zeros({2, 5, 3, 6});
                       }),
                       "keys: got [2, 5, 3, 6], expected a number of groups that divides 4 heads"));
  EXPECT_TRUE(has_text(message([](auto& scan) {
                         scan.queries = at::zeros({2, 5, 2, 7});
                       }),
                       "queries: got [2, 5, 2, 7], expected [2, 5, 2, 6]"));
  EXPECT_TRUE(has_text(message([](auto& scan) {
                         scan.steps = at::zeros({2, 5, 1});
                       }),
                       "steps: got [2, 5, 1], expected [2, 5, 4]"));
  EXPECT_TRUE(has_text(message([](auto& scan) { scan.decay = at::zeros({3}); }), "decay: got [3]"));
  EXPECT_TRUE(has_text(message([](auto& scan) { scan.skip = at::zeros({3}); }), "skip: got [3]"));
  EXPECT_TRUE(has_text(message([](auto& scan) {
                         scan.documents = at::zeros({2, 5});
                       }),
                       "documents: got float32, expected integers"));
  EXPECT_TRUE(has_text(message([](auto& scan) {
                         scan.initial_state = at::zeros({2, 4, 6, 3});
                       }),
                       "initial_state: got [2, 4, 6, 3], expected [2, 4, 3, 6]"));
  EXPECT_TRUE(
      has_text(message([](auto& scan) { scan.chunk = 0; }), "chunk: got 0, expected at least 1 token"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { selective_scan_step(good); }), "documents"));
}

}  // namespace selective_scan_test
}  // namespace penstock
