// Random groups of operators over random shapes, strides and dtypes: what the generated kernels compute is
// compared with the operators, bit for bit in exact mode. Many groups are one graph, so that few compilers
// are started.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/fused/fused_graph.h"
#include "penstock/graph/trace/analyze.h"
#include "penstock/graph/trace/capture.h"
#include "tests/graph/call_trace.h"

namespace penstock::graph {
namespace fused_groups_test {

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 240;
}
constexpr unsigned kProgramsOfAGraph = 60;

enum class Mode { Exact, Close };

// One program: inputs, and what it computes of them.
class RandomGroup {
 public:
  RandomGroup(unsigned seed, Mode mode, at::Device device) : random_(seed), mode_(mode), device_(device) {
    const std::size_t dims = pick(4);
    for (std::size_t d = 0; d < dims; ++d) {
      const std::int64_t sizes[] = {1, 2, 3, 4, 7, 8, 16, 33, 64};
      sizes_.push_back(sizes[pick(9)]);
    }
    if (mode == Mode::Close && dims > 0 && pick(2)) sizes_.back() = 65;
    // Not half: LibTorch 1.13 lacks most operators of it on the CPU.
    const at::ScalarType kinds[] = {at::kFloat, at::kFloat, at::kFloat, at::kBFloat16, at::kDouble};
    dtype_ = kinds[pick(5)];
    const std::size_t count = 1 + pick(4);
    for (std::size_t i = 0; i < count; ++i) inputs_.push_back(input(i == 0));
    steps_ = 3 + pick(7);
    seed_ = seed;
  }
  const Tensors& inputs() const { return inputs_; }
  // A function of the inputs alone: it draws the same steps every time.
  Tensors operator()(const Tensors& inputs) {
    random_.seed(seed_ * 7919 + 1);
    Tensors known = inputs;
    for (std::size_t i = 0; i < steps_; ++i) known.push_back(step(known));
    // The last ones are results, the rest may be used in kernels alone.
    Tensors results;
    for (std::size_t i = known.size() - std::min<std::size_t>(2, steps_); i < known.size(); ++i)
      results.push_back(known[i]);
    if (pick(2)) results.push_back(known[inputs.size()]);
    for (at::Tensor& result : results)
      if (std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& in) { return in.is_same(result); }))
        result = result.clone();
    return results;
  }

 private:
  std::size_t pick(std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_); }

  at::Tensor filled(at::IntArrayRef sizes, at::ScalarType dtype) {
    at::Tensor x = torch::randint(-8, 9, sizes).to(at::kDouble).div(4);
    if (c10::isFloatingType(dtype)) {
      x = x + torch::rand(sizes, at::kDouble) * 0.25;
      if (pick(3) == 0 && x.numel() > 4) {
        const double odd[] = {std::numeric_limits<double>::quiet_NaN(),
                              std::numeric_limits<double>::infinity(),
                              -std::numeric_limits<double>::infinity(), -0.0};
        at::Tensor flat = x.view(-1);
        for (const double value : odd)
          flat[static_cast<std::int64_t>(pick(static_cast<std::size_t>(x.numel())))] = value;
      }
      return x.to(dtype).to(device_);
    }
    return (dtype == at::kBool ? x > 0 : torch::randint(0, 7, sizes).to(dtype)).to(device_);
  }
  // With a layout: dense in another order of dims, every other element, expanded, dense from an odd address.
  at::Tensor input(bool whole) {
    std::vector<std::int64_t> sizes = sizes_;
    at::ScalarType dtype = dtype_;
    if (!whole) {
      const at::ScalarType others[] = {dtype_, dtype_, at::kFloat, at::kLong, at::kInt, at::kBool, at::kByte};
      dtype = others[pick(7)];
      for (std::int64_t& size : sizes)
        if (pick(3) == 0) size = 1;
      if (pick(4) == 0 && !sizes.empty()) sizes.erase(sizes.begin());
      if (pick(8) == 0) sizes.clear();
    }
    if (sizes.empty()) return filled(sizes, dtype);
    const std::int64_t last = static_cast<std::int64_t>(sizes.size()) - 1;
    switch (pick(7)) {
      case 0: {
        std::vector<std::int64_t> swapped = sizes;
        std::swap(swapped.front(), swapped.back());
        return filled(swapped, dtype).transpose(0, last);
      }
      case 1: {
        std::vector<std::int64_t> larger = sizes;
        larger.back() = 2 * larger.back() + 1;
        return filled(larger, dtype).slice(last, 1, larger.back(), 2);
      }
      case 2: {
        std::vector<std::int64_t> one = sizes;
        one.front() = 1;
        return filled(one, dtype).expand(sizes);
      }
      case 3:
        if (sizes.size() == 4) return filled(sizes, dtype).contiguous(at::MemoryFormat::ChannelsLast);
        return filled(sizes, dtype);
      case 4: {
        const at::Tensor dense = filled(sizes, dtype);
        const at::Tensor longer = at::zeros({dense.numel() + 1}, dense.options());
        const at::Tensor moved = longer.narrow(0, 1, dense.numel()).view(sizes);
        moved.copy_(dense);
        return moved;
      }
      default:
        return filled(sizes, dtype);
    }
  }

  static bool is_whole(const at::Tensor& x) { return !x.is_floating_point() && x.scalar_type() != at::kBool; }
  // A result of tensors that broadcast with each other: all are made of one list of sizes.
  at::Tensor any(const Tensors& known) { return known[pick(known.size())]; }
  at::Tensor any_number(const Tensors& known) {
    at::Tensor x = any(known);
    return x.scalar_type() == at::kBool ? x.to(dtype_) : x;
  }
  at::Tensor any_float(const Tensors& known) {
    const at::Tensor x = any(known);
    return x.is_floating_point() ? x : x.to(dtype_);
  }

  // Numbers that are compared: in close mode those of inputs, so that no rounding decides.
  at::Tensor compared(const Tensors& known) {
    const at::Tensor x = known[pick(mode_ == Mode::Exact ? known.size() : inputs_.size())];
    return x.scalar_type() == at::kBool ? x.to(dtype_) : x;
  }
  // In close mode numbers stay small: what overflows in half precision does not in float.
  at::Tensor small(const at::Tensor& x) {
    return mode_ == Mode::Exact || !x.is_floating_point() ? x : x.clamp(-20, 20);
  }

  at::Tensor step(const Tensors& known) {
    const std::size_t kinds = mode_ == Mode::Exact ? 18 : 36;
    const at::Tensor x = any_number(known);
    switch (pick(kinds)) {
      case 0:
        return small(x + any_number(known));
      case 1:
        return small(x - any_number(known));
      case 2:
        return small(x * any_number(known));
      case 3:
        return mode_ == Mode::Exact ? any_float(known) / any_number(known)
                                    : small(any_float(known) / any_float(known).abs().add(0.5));
      case 4:
        return small(x * 2);
      case 5:
        return x.is_floating_point() ? small(x + 0.5) : x + 3;
      case 6:
        return -x;
      case 7:
        return x.abs();
      case 8: {
        const at::Tensor y = compared(known);
        return at::where(y > compared(known), y, at::zeros_like(y));
      }
      case 9:
        return any_float(known).relu();
      case 10:
        return compared(known) < 1;
      case 11:
        return any_float(known).to(pick(2) ? at::kFloat : dtype_);
      case 12:
        return any_float(known).clamp(-1, 1.5);
      case 13: {
        const at::Tensor y = compared(known);
        return y.masked_fill(y.lt(0), 1);
      }
      case 14:
        return any_float(known).sqrt();
      case 15:
        return at::logical_or(compared(known) == compared(known), compared(known).ne(2));
      case 16:
        return x.dim() > 1 ? x.transpose(0, x.dim() - 1).contiguous().transpose(0, x.dim() - 1) : x.clone();
      case 17:
        return x.dim() > 1 ? (x * 3).reshape({-1}).neg().view(x.sizes()) : x.pow(2);
      case 18:
        return any_float(known).clamp(-3, 3).exp();
      case 19:
        return any_float(known).tanh();
      case 20:
        return any_float(known).sigmoid();
      case 21:
        return at::gelu(any_float(known), pick(2) ? "tanh" : "none");
      case 22:
        return at::silu(any_float(known));
      case 23:
        return any_float(known).abs().add(0.5).log();
      case 24:
        return any_float(known).square().add(1).rsqrt();
      case 25: {
        const at::Tensor y = any_float(known);
        return y.dim() > 0 ? small(y.sum(-1, true)) : y;
      }
      case 26: {
        const at::Tensor y = any_float(known);
        return y.dim() > 0 ? y * at::rsqrt(at::mean(y * y, -1, true) + 0.1) : y;
      }
      case 27: {
        const at::Tensor y = any_float(known);
        return y.dim() > 0 ? at::softmax(y, -1) : y;
      }
      case 28: {
        const at::Tensor y = any_float(known);
        return y.dim() > 0 ? at::amax(y, {-1}, true) : y;
      }
      case 29: {
        const at::Tensor y = any_float(known);
        return y.dim() > 1 ? small(y.sum(0, true)) : y;
      }
      case 30: {
        const at::Tensor y = any_float(known);
        return y.dim() > 1 ? small(y.sum(std::vector<std::int64_t>{0, 1}, true)) : y.erf();
      }
      case 31:
        return at::maximum(x, x * 2);
      case 32: {
        const at::Tensor y = any_float(known);
        return y.dim() > 0 ? at::log_softmax(y, -1).clamp_min(-20) : y;
      }
      case 33: {
        const at::Tensor y = any_float(known);
        return y.dim() > 0 ? at::amin(y, {-1}, true).expand_as(y) * y : y.reciprocal();
      }
      case 34: {
        const at::Tensor y = any_float(known);
        return at::silu_backward(y.detach(), y);
      }
      default:
        return small(at::addcmul(any_float(known).to(dtype_), any_float(known).to(dtype_),
                                 any_float(known).to(dtype_), 0.5));
    }
  }

  std::mt19937 random_;
  Mode mode_;
  at::Device device_;
  unsigned seed_ = 0;
  std::vector<std::int64_t> sizes_;
  at::ScalarType dtype_ = at::kFloat;
  Tensors inputs_;
  std::size_t steps_ = 0;
};

// Many programs as one function.
struct Programs {
  std::vector<RandomGroup> all;
  std::vector<std::size_t> results_of;  // by result: the program
  Tensors inputs;

  Programs(unsigned first, unsigned count, Mode mode, at::Device device) {
    for (unsigned seed = first; seed < first + count; ++seed) {
      torch::manual_seed(seed);
      all.emplace_back(seed, mode, device);
      inputs.insert(inputs.end(), all.back().inputs().begin(), all.back().inputs().end());
    }
  }
  Tensors run(const Tensors& given) {
    Tensors results;
    results_of.clear();
    auto at = given.begin();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto end = at + static_cast<std::ptrdiff_t>(all[i].inputs().size());
      for (const at::Tensor& result : all[i](Tensors(at, end))) {
        results.push_back(result);
        results_of.push_back(i);
      }
      at = end;
    }
    return results;
  }
};

// Empty if equal.
std::string difference(const at::Tensor& fused, const at::Tensor& operators, Mode mode) {
  if (mode == Mode::Exact) return difference_from_operators(fused, operators, true, false);
  if (!fused.is_floating_point()) return difference_from_operators(fused, operators, true, false);
  const double tolerance = fused.scalar_type() == at::kBFloat16 ? 0.15
                           : fused.scalar_type() == at::kHalf   ? 0.02
                                                                : 2e-4;
  const at::Tensor a = fused.to(at::kDouble), b = operators.to(at::kDouble);
  const at::Tensor scale = at::where(b.isfinite(), b.abs(), at::zeros_like(b)).clamp_min(1);
  const at::Tensor largest = scale.max();
  const at::Tensor near = (a - b).abs() <= tolerance * largest;
  const at::Tensor same = near.logical_or(a == b).logical_or(a.isnan().logical_and(b.isnan()));
  if (same.all().item<bool>()) return {};
  const at::Tensor where = same.logical_not().reshape({-1}).nonzero()[0];
  return std::to_string(same.logical_not().sum().item<std::int64_t>()) +
         " elements differ, the first: " + std::to_string(a.reshape({-1})[where].item<double>()) +
         " instead of " + std::to_string(b.reshape({-1})[where].item<double>());
}

void compare_programs(unsigned first, unsigned count, Mode mode, at::Device device, std::size_t& kernels,
                      std::size_t& inside) {
  const c10::InferenceMode no_gradients(false);
  const at::NoGradGuard guard;
  Programs programs(first, count, mode, device);
  const Function function = over_tensors([&](const Tensors& in) { return programs.run(in); });
  Graph graph = capture_forward(function, values_of(programs.inputs));
  remove_dead_nodes(graph);
  const Executor plain(graph);
  FusedCompileOptions options;
  options.fusion.lowering.exact = options.kernels.exact = mode == Mode::Exact;
  // Odd seeds: every group, even of a single operator.
  options.fusion.everything = first % 2 == 1;
  const auto compiled = compile_fused(graph, options);
  const FusedGraph* fused = fused_graph(*compiled);
  ASSERT_NE(fused, nullptr);
  const auto expected = plain(programs.inputs);
  for (int run = 0; run < 2; ++run) {
    const auto actual = fused->run(programs.inputs, nullptr);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const at::Tensor x = actual[i].toTensor(), y = expected[i].toTensor();
      const std::string what = difference(x, y, mode);
      EXPECT_EQ(what, "") << "program " << first + programs.results_of[i];
      EXPECT_EQ(x.sizes(), y.sizes());
      for (std::int64_t d = 0; d < x.dim(); ++d)
        EXPECT_TRUE(x.size(d) == 1 || x.stride(d) == y.stride(d))
            << "program " << first + programs.results_of[i];
      if (::testing::Test::HasFailure()) {
        const RandomGroup& one = programs.all[programs.results_of[i]];
        RandomGroup again = one;
        ADD_FAILURE() << to_text(capture_forward(over_tensors([&](const Tensors& in) { return again(in); }),
                                                 values_of(one.inputs())));
        return;
      }
    }
  }
  for (const FusedKernelReport& kernel : fused->kernels()) {
    EXPECT_EQ(kernel.calls, 2u) << kernel.operators;
    EXPECT_EQ(kernel.calls_of_operators, 0u) << kernel.operators;
    ++kernels;
  }
  inside += graph.nodes.size();
}

void compare_all(Mode mode, at::Device device = at::kCPU) {
  std::size_t kernels = 0, nodes = 0;
  for (unsigned first = 0, part = 0; first < programs(); first += kProgramsOfAGraph, ++part) {
    compare_programs(first + part % 2, kProgramsOfAGraph, mode, device, kernels, nodes);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(kernels * 2, programs()) << "of " << nodes << " operators";
}

// Losses over classes, with their backward: some rows are ignored.
TEST(FusedGroups, ClassLossesAndTheirBackward) {
  for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
    const std::int64_t rows = 37, classes = 19;
    torch::manual_seed(5);
    const Tensors inputs{torch::randn({rows, classes}),
                         torch::randint(0, classes, {rows}).index_fill(0, torch::tensor({3, 30}), -100),
                         reduction == at::Reduction::None ? torch::randn({rows}) : torch::randn({})};
    const Function function = over_tensors([&](const Tensors& in) -> Tensors {
      const at::Tensor logits = at::log_softmax(in[0] * 2, -1);
      const auto [loss, weight] = at::nll_loss_forward(logits, in[1], {}, reduction, -100);
      const at::Tensor gradient = at::nll_loss_backward(in[2], logits, in[1], {}, reduction, -100, weight);
      return {at::_log_softmax_backward_data(gradient, logits, -1, at::kFloat) * 2};
    });
    const at::NoGradGuard guard;
    const Graph graph = capture_forward(function, values_of(inputs));
    const auto compiled = compile_fused(graph, {});
    const FusedGraph* fused = fused_graph(*compiled);
    ASSERT_NE(fused, nullptr);
    const at::Tensor expected = Executor(graph)(inputs)[0].toTensor(),
                     actual = fused->run(inputs, nullptr)[0].toTensor();
    EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-7)) << actual - expected;
    ASSERT_EQ(fused->kernels().size(), 2u);
    EXPECT_EQ(fused->kernels()[1].operators,
              "aten::nll_loss_backward, aten::_log_softmax_backward_data, aten::mul");
  }
}

// What is fused must be one kernel at least, and have the numbers of the operators.
void expect_fused(const std::function<Tensors(const Tensors&)>& steps, const Tensors& inputs, Mode mode) {
  const at::NoGradGuard guard;
  Graph graph = capture_forward(over_tensors(steps), values_of(inputs));
  remove_dead_nodes(graph);
  FusedCompileOptions options;
  options.fusion.lowering.exact = options.kernels.exact = mode == Mode::Exact;
  const auto compiled = compile_fused(graph, options);
  const FusedGraph* fused = fused_graph(*compiled);
  ASSERT_NE(fused, nullptr) << to_text(graph);
  const auto expected = Executor(graph)(inputs), actual = fused->run(inputs, nullptr);
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_EQ(difference(actual[i].toTensor(), expected[i].toTensor(), mode), "") << "result " << i;
}

// Half types are rounded before they decide something, and so are the numbers beside them.
TEST(FusedGroups, HalfTypesDecideAsInMemory) {
  expect_fused(
      [](const Tensors& in) {
        const at::Tensor product = in[0] * in[0];
        return Tensors{product, product == product * 2};
      },
      {at::full({64}, 1000, at::kHalf)}, Mode::Close);
  expect_fused([](const Tensors& in) { return Tensors{at::where(in[0] == 0.1, in[0], -in[0])}; },
               {at::full({64}, 0.1, at::kBFloat16)}, Mode::Close);
  expect_fused([](const Tensors& in) { return Tensors{in[0].pow(3) + in[0]}; },
               {at::full({64}, 1.1640625, at::kBFloat16)}, Mode::Exact);
}

TEST(FusedGroups, WholeFactorsStayWhole) {
  expect_fused([](const Tensors& in) { return Tensors{at::add(in[0], in[1], 9007199254740993) * 1 + in[0]}; },
               {at::ones({64}, at::kLong), at::ones({64}, at::kLong)}, Mode::Exact);
}

TEST(FusedGroups, SumsOfColumns) {
  const Tensors x{torch::randn({256, 64})};
  // Twice the same, and one that another one depends on.
  expect_fused(
      [](const Tensors& in) {
        const at::Tensor doubled = in[0] * 2, sum = doubled.sum(0);
        return Tensors{sum, sum.clone(), doubled.sum(0)};
      },
      x, Mode::Close);
  expect_fused(
      [](const Tensors& in) {
        return Tensors{((in[0] * 2) - in[0].sum(0)).sum(0), (in[0] * 3).relu()};
      },
      x, Mode::Close);
  // A sum that is not worth a kernel keeps what it reads.
  expect_fused(
      [](const Tensors& in) {
        const at::Tensor product = in[0] * in[1].t();
        return Tensors{product.t().contiguous(), product.sum(0), (in[0] + 1).relu()};
      },
      {torch::randn({4096, 8}), torch::randn({8, 4096})}, Mode::Close);
}

TEST(FusedGroups, RandomExactOnesHaveTheBitsOfTheOperators) { compare_all(Mode::Exact); }
TEST(FusedGroups, RandomOnesAreCloseToTheOperators) { compare_all(Mode::Close); }

const at::Device kGpu(at::kCUDA, 0);

TEST(FusedGroupsOnAGpu, RandomOnesAreCloseToTheOperators) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  compare_all(Mode::Close, kGpu);
}

// Rows that several passes read, with loads that fit in registers and ones that do not; columns whose rows
// are divided into splits; sizes that are no multiple of a vector.
TEST(FusedGroupsOnAGpu, LargeRowsAndColumns) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const at::NoGradGuard guard;
  const auto steps = [](const Tensors& in) -> Tensors {
    const at::Tensor &x = in[0], &y = in[1], &w = in[2];
    const at::Tensor wide = x.to(at::kFloat), scale = at::rsqrt(at::mean(wide * wide, -1, true) + 1e-5);
    return {(wide * scale * w).to(x.scalar_type()),
            at::softmax(wide - y.to(at::kFloat), -1),
            at::amax(x * 2, {-1}),
            (wide * y.to(at::kFloat)).sum(0),
            (x.to(at::kFloat) + y.to(at::kFloat)).sum(0).to(x.scalar_type()),
            x + y,
            at::gelu(x.to(at::kFloat)) * y.to(at::kFloat)};
  };
  const std::vector<std::vector<std::int64_t>> shapes{{4096, 768}, {1000, 3071}, {70, 50257}, {33, 8},
                                                      {129, 1},    {20000, 24},  {5, 65536}};
  for (const auto& sizes : shapes)
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      SCOPED_TRACE(::testing::PrintToString(sizes) + " " + c10::toString(dtype));
      torch::manual_seed(sizes[0]);
      const auto random = [&](at::IntArrayRef of, at::ScalarType type) {
        return torch::randn(of, at::device(kGpu).dtype(type));
      };
      const Tensors inputs{random(sizes, dtype), random(sizes, dtype), random({sizes[1]}, at::kFloat)};
      Graph graph = capture_forward(over_tensors(steps), values_of(inputs));
      for (const bool everything : {false, true}) {
        FusedCompileOptions options;
        options.fusion.everything = everything;
        const auto compiled = compile_fused(graph, options);
        const FusedGraph* fused = fused_graph(*compiled);
        ASSERT_NE(fused, nullptr);
        const auto expected = Executor(graph)(inputs), actual = fused->run(inputs, nullptr);
        for (std::size_t i = 0; i < actual.size(); ++i)
          EXPECT_EQ(difference(actual[i].toTensor(), expected[i].toTensor(), Mode::Close), "")
              << "result " << i;
        for (const FusedKernelReport& kernel : fused->kernels())
          EXPECT_EQ(kernel.calls, 1u) << kernel.operators;
      }
    }
}

TEST(FusedGroupsOnAGpu, ReportsItsTimes) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const at::NoGradGuard guard;
  const Tensors inputs{torch::randn({4096, 768}, kGpu), torch::randn({768}, kGpu)};
  const auto compiled = compile_fused(
      capture_forward(over_tensors([](const Tensors& in) { return Tensors{(in[0] * in[1]).relu()}; }),
                      values_of(inputs)),
      {});
  const FusedGraph* fused = fused_graph(*compiled);
  ASSERT_NE(fused, nullptr);
  fused->measure(true);
  for (int i = 0; i < 3; ++i) fused->run(inputs, nullptr);
  ASSERT_EQ(fused->kernels().size(), 1u);
  const FusedKernelReport kernel = fused->kernels()[0];
  EXPECT_EQ(kernel.calls, 3u);
  EXPECT_GT(kernel.seconds, 0);
  EXPECT_EQ(kernel.bytes, 2 * 4096 * 768 * 4 + 768 * 4);
  EXPECT_TRUE(kernel.source.find("__global__") != std::string::npos);
}

}  // namespace fused_groups_test
}  // namespace penstock::graph
