// Loop kernels (graph/codegen): the value, its C++, and what the compiled code computes, compared with an
// interpreter that works element by element.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/codegen/emit_cpp.h"
#include "penstock/graph/codegen/host_compiler.h"
#include "penstock/graph/codegen/index_space.h"
#include "penstock/graph/codegen/loop_kernel.h"
#include "tests/graph/random_kernel.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace loop_kernel_test {

using namespace penstock::test;

using namespace random_kernels;

TEST(LoopKernels, RandomOnesComputeWhatTheInterpreterDoes) {
  ASSERT_TRUE(host_compiler().works()) << host_compiler().problem;
  constexpr unsigned kAtOnce = 150;
  unsigned compared = 0;
  for (unsigned first = 0; first < random_count(); first += kAtOnce) {
    std::vector<NamedKernel> kernels[2];
    for (unsigned seed = first; seed < std::min(first + kAtOnce, random_count()); ++seed)
      kernels[seed % 2].push_back({"k" + std::to_string(seed), RandomKernel(seed).make()});
    const std::vector<ObjectCode> codes =
        compile_sources(host_compiler(), {emit_cpp(kernels[0]), emit_cpp(kernels[1])});
    for (int part = 0; part < 2; ++part) {
      ASSERT_EQ(codes[static_cast<std::size_t>(part)].problem, "")
          << codes[static_cast<std::size_t>(part)].output;
      const auto library = LoadedCode::load(codes[static_cast<std::size_t>(part)].bytes);
      for (const NamedKernel& named : kernels[part]) {
        const LoopKernel& kernel = named.kernel;
        const auto seed = static_cast<unsigned>(std::stoul(named.name.substr(1)));
        SCOPED_TRACE(to_text(kernel) + emit_function(named));
        // Odd values make sums of infinities, which are equal in any order.
        std::vector<Memory> expected = memory_for(kernel, seed, seed % 3 == 0), whole = expected,
                            parts = expected;
        Interpreter(kernel, expected).run();
        const auto run = [&](std::vector<Memory>& memory, std::int64_t step) {
          std::vector<void*> buffers;
          for (Memory& each : memory) buffers.push_back(each.data());
          for (std::int64_t begin = 0; begin < kernel.range(); begin += step)
            library->function(named.name)(buffers.data(), begin, std::min(begin + step, kernel.range()));
        };
        run(whole, kernel.range());
        run(parts, 1 + static_cast<std::int64_t>(seed % 5));
        const bool stable = is_stable(kernel);
        for (const LoopStore& store : kernel.stores) {
          const LoopBuffer& buffer = kernel.buffers[store.buffer];
          // However the range is divided, bits are the same.
          EXPECT_EQ(whole[store.buffer].words, parts[store.buffer].words);
          if (!stable) continue;
          ++compared;
          double scale = 1;
          for (const LoopBuffer& each : kernel.buffers)
            if (kernel.form != LoopForm::Elements && each.type != ElementType::Bool) scale = 100;
          for (std::int64_t i = 0; i < extent(kernel, buffer); ++i)
            ASSERT_TRUE(is_near(whole[store.buffer].at(i), expected[store.buffer].at(i), buffer.type, scale))
                << "buffer " << store.buffer << ", element " << i << ": " << whole[store.buffer].at(i)
                << " instead of " << expected[store.buffer].at(i);
        }
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_GT(compared * 3, random_count());
}

// ---- functions of float ----

double ulps(float actual, double expected) {
  const auto rounded = static_cast<float>(expected);
  if (std::isnan(rounded)) return std::isnan(actual) ? 0 : 1e30;
  if (actual == rounded) return 0;
  if (!std::isfinite(rounded) || !std::isfinite(actual)) return 1e30;
  const float next = std::nextafter(std::fabs(rounded), kInfinity) - std::fabs(rounded);
  return std::fabs(static_cast<double>(actual) - expected) / static_cast<double>(next);
}

TEST(LoopKernels, FunctionsAreAsExactAsStated) {
  struct Function {
    LoopOp op;
    double (*exact)(double);
    double ulps;
  };
  const Function functions[] = {{LoopOp::Exp, [](double x) { return std::exp(x); }, 2},
                                {LoopOp::Log, [](double x) { return std::log(x); }, 2},
                                {LoopOp::Tanh, [](double x) { return std::tanh(x); }, 3},
                                {LoopOp::Sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }, 4},
                                {LoopOp::Erf, [](double x) { return std::erf(x); }, 8}};
  std::vector<float> numbers{0.f,  -0.f,  kInfinity, -kInfinity, kNan,    1.f,
                             -1.f, 88.7f, 88.8f,     -87.4f,     -103.9f, -104.1f};
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    // All sizes, and those where the functions are curved.
    const auto any = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    numbers.push_back(any);
    numbers.push_back(std::uniform_real_distribution<float>(-12, 12)(random));
    numbers.push_back(std::uniform_real_distribution<float>(-100, 100)(random));
  }
  const auto items = static_cast<std::int64_t>(numbers.size());
  std::vector<NamedKernel> kernels;
  for (const Function& function : functions) {
    LoopKernel kernel;
    kernel.sizes = {items};
    kernel.buffers = {{ElementType::Float, {1}}, {ElementType::Float, {1}, true}};
    const int x = kernel.add({.op = LoopOp::Load});
    kernel.stores = {{kernel.add({.op = function.op, .operands = {x, kNoOperand, kNoOperand}}), 1}};
    kernels.push_back({std::string(to_text(function.op)), kernel});
  }
  const auto library = LoadedCode::load(compile_sources(host_compiler(), {emit_cpp(kernels)})[0].bytes);
  for (std::size_t f = 0; f < kernels.size(); ++f) {
    std::vector<float> results(numbers.size());
    void* buffers[] = {numbers.data(), results.data()};
    library->function(kernels[f].name)(buffers, 0, items);
    double worst = 0;
    float where = 0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      // Where 1 / (1 + exp) is below the smallest normal number, and near the zeros of denormal results, a
      // unit of the last place is larger than the number.
      const double exact = functions[f].exact(static_cast<double>(numbers[i]));
      if (std::fabs(exact) < 1e-37 && std::fabs(static_cast<double>(results[i])) < 2e-37) continue;
      const double off = ulps(results[i], exact);
      if (off > worst) worst = off, where = numbers[i];
    }
    EXPECT_LE(worst, functions[f].ulps) << kernels[f].name << " of " << where;
    EXPECT_GT(worst, 0) << kernels[f].name << ": nothing was compared";
  }
}

TEST(LoopKernels, EveryHalfAndEveryRoundingIsThatOfTheFormat) {
  std::vector<NamedKernel> kernels;
  for (const ElementType type : {ElementType::Half, ElementType::BFloat16}) {
    LoopKernel widen, narrow;
    widen.sizes = {65536}, narrow.sizes = {400000};
    widen.buffers = {{type, {1}}, {ElementType::Float, {1}, true}};
    narrow.buffers = {{ElementType::Float, {1}}, {type, {1}, true}};
    widen.stores = {{widen.add({.op = LoopOp::Load}), 1}};
    narrow.stores = {{narrow.add({.op = LoopOp::Load}), 1}};
    kernels.push_back({"widen_" + std::string(to_text(type)), widen});
    kernels.push_back({"narrow_" + std::string(to_text(type)), narrow});
  }
  const auto library = LoadedCode::load(compile_sources(host_compiler(), {emit_cpp(kernels)})[0].bytes);
  std::vector<std::uint16_t> bits(65536);
  std::iota(bits.begin(), bits.end(), 0);
  std::vector<float> numbers(400000);
  std::mt19937 random(3);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    // Numbers of each size, those in the middle between two halves, and their neighbours.
    const float middle = (from_half(static_cast<std::uint16_t>(random() % 31743)) +
                          from_half(static_cast<std::uint16_t>(random() % 31743))) /
                         2;
    numbers[i] = i % 3 == 0   ? std::bit_cast<float>(static_cast<std::uint32_t>(random()))
                 : i % 3 == 1 ? middle
                              : std::nextafter(-middle, i % 2 ? 1.f : -1e6f);
  }
  for (int type = 0; type < 2; ++type) {
    std::vector<float> wide(65536);
    void* up[] = {bits.data(), wide.data()};
    library->function(kernels[static_cast<std::size_t>(2 * type)].name)(up, 0, 65536);
    for (std::size_t i = 0; i < wide.size(); ++i) {
      const float expected = type == 0 ? from_half(bits[i]) : from_bfloat16(bits[i]);
      if (std::isnan(expected))
        ASSERT_TRUE(std::isnan(wide[i])) << i;
      else
        ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(expected)) << i;
    }
    std::vector<std::uint16_t> narrow(numbers.size());
    void* down[] = {numbers.data(), narrow.data()};
    library->function(kernels[static_cast<std::size_t>(2 * type + 1)].name)(down, 0, 400000);
    for (std::size_t i = 0; i < narrow.size(); ++i) {
      if (std::isnan(numbers[i])) continue;
      ASSERT_EQ(narrow[i], type == 0 ? to_half(numbers[i]) : to_bfloat16(numbers[i])) << numbers[i];
    }
  }
}

// ---- the value ----

LoopKernel sum_of_squares() {
  LoopKernel kernel;
  kernel.form = LoopForm::Rows;
  kernel.sizes = {2, 3, 64};
  kernel.row_dims = 1;
  kernel.buffers = {{ElementType::Float, {192, 64, 1}}, {ElementType::Float, {3, 1, 0}, true}};
  const int x = kernel.add({.op = LoopOp::Load});
  const int square = kernel.add({.op = LoopOp::Multiply, .operands = {x, x, kNoOperand}});
  kernel.stores = {{kernel.add({.op = LoopOp::RowSum, .operands = {square, kNoOperand, kNoOperand}}), 1}};
  return kernel;
}

TEST(LoopKernels, LoopsThatAreOneAreJoined) {
  LoopKernel kernel = sum_of_squares();
  join_loops(kernel);
  verify(kernel);
  EXPECT_EQ(to_text(kernel),
            "rows of 1 [6, 64]\n"
            "  buffer 0: float [64, 1]\n"
            "  buffer 1: float [1, 0] written\n"
            "  %0: float = load buffer 0\n"
            "  %1: float = multiply %0, %0\n"
            "  %2: float = row_sum %1\n"
            "  store %2 in buffer 1\n");
  EXPECT_EQ(kernel.range(), 6);
  EXPECT_EQ(kernel.bytes_moved(), 4 * (6 * 64 + 6));
}

TEST(LoopKernels, EqualInstructionsAreOne) {
  LoopKernel kernel;
  const int zero = kernel.add(LoopInstruction::of(ElementType::Float, 0));
  EXPECT_EQ(kernel.add(LoopInstruction::of(ElementType::Float, 0)), zero);
  EXPECT_NE(kernel.add(LoopInstruction::of(ElementType::Float, -0.0)), zero);
  EXPECT_NE(kernel.add(LoopInstruction::of(ElementType::Double, 0)), zero);
  const int nan = kernel.add(LoopInstruction::of(ElementType::Float, kNan));
  EXPECT_EQ(kernel.add(LoopInstruction::of(ElementType::Float, kNan)), nan);
}

TEST(LoopKernels, RulesAreChecked) {
  const auto broken = [](const std::function<void(LoopKernel&)>& change) {
    LoopKernel kernel = sum_of_squares();
    verify(kernel);
    change(kernel);
    return message_of<InvariantError>([&] { verify(kernel); });
  };
  EXPECT_TRUE(
      has_text(broken([](LoopKernel& k) { k.instructions[1].operands[0] = 2; }), "before it is computed"));
  EXPECT_TRUE(has_text(broken([](LoopKernel& k) { k.buffers[0].strides.pop_back(); }), "number of strides"));
  EXPECT_TRUE(has_text(broken([](LoopKernel& k) { k.stores[0].value = 1; }), "an element several times"));
  EXPECT_TRUE(has_text(broken([](LoopKernel& k) { k.row_dims = 0; }), "loops in a row"));
  EXPECT_TRUE(has_text(broken([](LoopKernel& k) { k.form = LoopForm::Elements; }), "loops in a row"));
  EXPECT_TRUE(has_text(broken([](LoopKernel& k) { k.stores.clear(); }), "does not write"));
  EXPECT_TRUE(has_text(broken([](LoopKernel& k) { k.stores[0].buffer = 0; }), "not written"));
  EXPECT_TRUE(has_text(broken([](LoopKernel& k) { k.instructions[1].op = LoopOp::And; }), "wrong type"));
  EXPECT_TRUE(
      has_text(broken([](LoopKernel& k) { k.buffers[1].type = ElementType::Int32; }), "another type"));
}

TEST(LoopKernels, TheTextOfAFunction) {
  LoopKernel kernel = sum_of_squares();
  join_loops(kernel);
  EXPECT_EQ(emit_function({"k0", kernel, "aten::mul, aten::sum"}),
            "// aten::mul, aten::sum\n"
            "extern \"C\" void k0(void* const* buffers, i64 begin, i64 end) {\n"
            "  const float* const p0 = (const float*)buffers[0];\n"
            "  float* const p1 = (float*)buffers[1];\n"
            "  for (i64 u = begin; u < end; ++u) {\n"
            "    const i64 qi0 = u;\n"
            "    const float* const q0 = p0 + qi0 * 64ll;\n"
            "    float* const q1 = p1 + qi0;\n"
            "    double t2 = 0;\n"
            "    float s2 = 0;\n"
            "    #pragma omp simd reduction(+ : s2)\n"
            "    for (i64 j = 0; j < 64ll; ++j) {\n"
            "      const float v0 = q0[j];\n"
            "      const float v1 = v0 * v0;\n"
            "      s2 += v1;\n"
            "    }\n"
            "    t2 += s2;\n"
            "    const float v2 = (float)t2;\n"
            "    q1[0] = v2;\n"
            "  }\n"
            "}\n");
}

// Softmax: the exponential is computed once and kept for the second pass, the input is read again.
LoopKernel softmax_rows() {
  LoopKernel kernel;
  kernel.form = LoopForm::Rows;
  kernel.sizes = {4, 40};
  kernel.row_dims = 1;
  kernel.buffers = {{ElementType::Float, {40, 1}}, {ElementType::Float, {40, 1}, true}};
  const auto add = [&](LoopOp op, int a, int b = kNoOperand) {
    return kernel.add({.op = op, .operands = {a, b, kNoOperand}});
  };
  const int x = kernel.add({.op = LoopOp::Load});
  const int power = add(LoopOp::Exp, add(LoopOp::Subtract, x, add(LoopOp::RowMaximum, x)));
  kernel.stores = {{add(LoopOp::Divide, power, add(LoopOp::RowSum, power)), 1}};
  return kernel;
}

TEST(LoopKernels, ExpensiveValuesAreKeptForLaterPasses) {
  const std::string text = emit_function({"k0", softmax_rows()});
  EXPECT_EQ(std::count(text.begin(), text.end(), '#'), 3) << text;
  EXPECT_EQ(text.find("exp_of"), text.rfind("exp_of")) << text;
  EXPECT_TRUE(has_text(text, "kept3[j] = v3;")) << text;
  EXPECT_TRUE(has_text(text, "const float v3 = kept3[j];")) << text;
}

TEST(LoopKernels, WhichBuffersMayShareMemory) {
  EXPECT_TRUE(may_share_memory(softmax_rows(), 0, 1));  // the last pass reads what was kept
  LoopKernel again = softmax_rows();                    // the last pass writes, and one after it reads
  EXPECT_FALSE(may_share_memory(sum_of_squares(), 0, 1));
  LoopKernel transposed = softmax_rows();
  transposed.buffers[0].strides = {1, 4};
  EXPECT_FALSE(may_share_memory(transposed, 0, 1));
  // y = x + 1 is stored in the first pass; the second one reads x.
  LoopKernel early;
  early.form = LoopForm::Rows;
  early.sizes = {4, 40};
  early.row_dims = 1;
  early.buffers = {{ElementType::Float, {40, 1}},
                   {ElementType::Float, {40, 1}, true},
                   {ElementType::Float, {40, 1}, true}};
  const int x = early.add({.op = LoopOp::Load}), one = early.add(LoopInstruction::of(ElementType::Float, 1));
  const int y = early.add({.op = LoopOp::Add, .operands = {x, one, kNoOperand}});
  const int sum = early.add({.op = LoopOp::RowSum, .operands = {x, kNoOperand, kNoOperand}});
  early.stores = {{y, 1}, {early.add({.op = LoopOp::Multiply, .operands = {x, sum, kNoOperand}}), 2}};
  verify(early);
  EXPECT_FALSE(may_share_memory(early, 0, 1));
  EXPECT_TRUE(may_share_memory(early, 0, 2));
}

// ---- dims ----

TEST(IndexSpaces, DimsAreSplitWhereTheyMustBe) {
  IndexSpace space;
  const auto rows = space.dim(24), batch = space.dim(4), length = space.dim(6);
  ASSERT_TRUE(space.unify(rows, joined({batch, length})));
  EXPECT_EQ(space.leaves(rows), space.leaves(joined({batch, length})));
  EXPECT_EQ(space.leaves(rows).size(), 2u);
  EXPECT_TRUE(space.dim(1).empty());
  IndexSpace other;
  const auto whole = other.dim(24);
  ASSERT_TRUE(other.unify(whole, joined({other.dim(4), other.dim(6)})));
  EXPECT_FALSE(other.unify(whole, joined({other.dim(3), other.dim(8)})))
      << "4 x 6 and 3 x 8 have no common split";
}

TEST(IndexSpaces, ViewsHaveTheAxesOfTheirBase) {
  IndexSpace space;
  const std::vector<IndexSpace::Dim> dims{space.dim(4), space.dim(6), {}};
  const auto joined_view = space.viewed(dims, {24});
  ASSERT_TRUE(joined_view);
  EXPECT_EQ(space.leaves((*joined_view)[0]), space.leaves(joined(dims)));
  const auto split = space.viewed(dims, {2, 2, 1, 3, 2});
  ASSERT_TRUE(split);
  EXPECT_EQ(space.leaves(joined(*split)), space.leaves(joined(dims)));
  EXPECT_FALSE(space.viewed(dims, {3, 8}));
}

}  // namespace loop_kernel_test
}  // namespace penstock::graph
