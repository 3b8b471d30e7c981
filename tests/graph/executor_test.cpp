// The built-in executor: each of its faster ways computes the same bits as boxed calls of the operators, sees
// to it that nobody can tell the difference, and allocates nothing of its own. This program counts its
// allocations, therefore it is one of its own.
#include "penstock/graph/compiler/execute.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "penstock/fake.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/mode.h"
#include "penstock/torch/compat/blas_gemm.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "tests/graph/random_program.h"

namespace {

std::atomic<std::int64_t> g_allocations{0};

void* allocate_or_null(std::size_t bytes) noexcept {
  ++g_allocations;
  return std::malloc(bytes > 0 ? bytes : 1);
}

void* allocate(std::size_t bytes) {
  void* memory = allocate_or_null(bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

// All forms without an alignment: what one of them allocates, another one may free, and a sanitizer would
// find memory of its own operators freed by these.
void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate_or_null(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate_or_null(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace penstock::graph {
namespace executor_test {

const ExecutorOptions kPlain{
    .unboxed = false, .direct_views = false, .reuse_memory = false, .direct_kernels = false};

unsigned random_programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 300;
}

Tensors cloned(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

// The same bits in the same layout.
void expect_same_bits(const std::vector<c10::IValue>& actual, const std::vector<c10::IValue>& expected,
                      const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].isTensor(), expected[i].isTensor()) << what << " " << i;
    if (!actual[i].isTensor() || !expected[i].toTensor().defined()) continue;
    const at::Tensor a = actual[i].toTensor(), b = expected[i].toTensor();
    ASSERT_EQ(a.sizes(), b.sizes()) << what << " " << i;
    EXPECT_EQ(a.strides(), b.strides()) << what << " " << i;
    ASSERT_EQ(a.scalar_type(), b.scalar_type()) << what << " " << i;
    EXPECT_EQ(a.is_conj(), b.is_conj()) << what << " " << i;
    const auto bytes = [](const at::Tensor& tensor) {
      const at::Tensor plain =
          tensor.resolve_conj().resolve_neg().reshape({-1}).clone(at::MemoryFormat::Contiguous);
      return plain.numel() == 0 ? at::empty({0}, at::kByte) : plain.view(at::kByte);
    };
    EXPECT_TRUE(at::equal(bytes(a), bytes(b))) << what << " " << i << ":\n" << a << "\nexpected\n" << b;
  }
}

// Random pointwise operators and views, all of which an executor treats specially.
Tensors pointwise_program(unsigned seed, const Tensors& inputs) {
  std::mt19937 random(seed);
  const auto choose = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  Tensors pool = inputs;
  const std::size_t steps = 4 + choose(12);
  for (std::size_t step = 0; step < steps; ++step) {
    // Mostly of the latest ones, so that many are used once.
    const auto any = [&] {
      return pool[choose(3) > 0 ? pool.size() - 1 - choose(std::min<std::size_t>(pool.size(), 3))
                                : choose(pool.size())];
    };
    const at::Tensor x = any();
    at::Tensor y = any();
    for (int i = 0; i < 4 && y.sizes() != x.sizes(); ++i) y = any();
    if (y.sizes() != x.sizes()) y = x;
    switch (choose(20)) {
      case 0:
        pool.push_back(x + y);
        break;
      case 1:
        pool.push_back(at::add(x, y, 0.5));
        break;
      case 2:
        pool.push_back(x * y);
        break;
      case 3:
        pool.push_back(x * 1.5);
        break;
      case 4:
        pool.push_back(x + 0.25);
        break;
      case 5:
        // The other approximation's backward is wrong for strided gradients in LibTorch 1.13.
        pool.push_back(at::gelu(x, "tanh"));
        break;
      case 6:
        pool.push_back(at::tanh(x));
        break;
      case 7:
        pool.push_back(at::sigmoid(x));
        break;
      case 8:
        pool.push_back(at::silu(x));
        break;
      case 9:
        pool.push_back(x.relu());
        break;
      case 10:
        pool.push_back(x.neg());
        break;
      case 11:
        pool.push_back(at::sin(x).exp());
        break;
      case 12:
        pool.push_back(x / (y.abs() + 1));
        break;
      case 13:
        pool.push_back(at::addcmul(x, y, y, 0.5));
        break;
      case 14:
        pool.push_back(x.pow(2));
        break;
      case 15:
        pool.push_back(x.transpose(0, 1));
        break;
      case 16:
        pool.push_back(x.slice(1, 0, x.size(1) > 1 ? x.size(1) - 1 : 1));
        break;
      case 17:
        pool.push_back(x - y);
        break;
      case 18:
        pool.push_back(x.sum(0, true).expand(x.sizes()));
        break;
      default:
        pool.push_back(x.unbind(0)[0].unsqueeze(0).expand_as(x));
    }
  }
  Tensors results;
  const std::size_t count = 1 + choose(2);
  for (std::size_t i = 0; i < count; ++i) results.push_back(pool[pool.size() - 1 - i]);
  return results;
}

using MakeInputs = std::function<Tensors()>;

// Runs a graph the plain way and, several times, the fast way.
void compare_runs(const Graph& graph, const MakeInputs& inputs, Executor::Counts* counts = nullptr) {
  const Executor plain(graph, kPlain), fast(graph);
  const Tensors given = inputs();
  Tensors written = cloned(given);
  const auto expected = plain(written);
  for (int run = 0; run < 3; ++run) {
    Tensors actual = cloned(given);
    expect_same_bits(fast(actual), expected, "run " + std::to_string(run) + ", output");
    for (std::size_t i = 0; i < actual.size(); ++i)
      EXPECT_TRUE(at::equal(actual[i], written[i])) << "run " << run << ", input " << i;
  }
  EXPECT_EQ(plain.counts().unboxed + plain.counts().views + plain.counts().reuses + plain.counts().kernels,
            0u);
  if (!counts) return;
  counts->boxed += fast.counts().boxed;
  counts->unboxed += fast.counts().unboxed;
  counts->views += fast.counts().views;
  counts->reuses += fast.counts().reuses;
  counts->kernels += fast.counts().kernels;
}

TEST(ExecutorPaths, RandomProgramsOfViewsAndWrites) {
  Executor::Counts counts;
  unsigned compared = 0;
  for (unsigned seed = 0; seed < random_programs(); ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    torch::manual_seed(seed);
    const Tensors inputs{torch::randint(-4, 5, {3, 4}).to(at::kFloat),
                         torch::randint(-4, 5, {3, 4}).to(at::kFloat),
                         torch::randint(-4, 5, {4}).to(at::kFloat)};
    const at::NoGradGuard no_grad;
    Graph graph;
    try {
      graph = capture_forward(over_tensors([&](const Tensors& in) { return random_program(seed, in); }),
                              values_of(inputs));
    } catch (const c10::Error&) {
      continue;  // not a legal program
    }
    const auto make = [&] { return cloned(inputs); };
    compare_runs(graph, make, &counts);  // with its writes
    const std::size_t outputs = graph.outputs.size();
    compare_runs(functionalize(std::move(graph), outputs), make, &counts);
    ++compared;
    if (HasFailure()) break;
  }
  EXPECT_GT(compared, random_programs() / 2);
  EXPECT_GT(counts.views, counts.boxed);
  EXPECT_GT(counts.unboxed, 30 * counts.boxed);
}

TEST(ExecutorPaths, RandomPointwisePrograms) {
  Executor::Counts counts;
  for (unsigned seed = 0; seed < random_programs(); ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    torch::manual_seed(seed);
    const std::int64_t n = 1 + seed % 9;
    const Tensors inputs{torch::randn({n, n}), torch::randn({n, n})};
    const at::NoGradGuard no_grad;
    compare_runs(
        capture_forward(over_tensors([&](const Tensors& in) { return pointwise_program(seed, in); }),
                        values_of(inputs)),
        [&] { return cloned(inputs); }, &counts);
    if (HasFailure()) break;
  }
  EXPECT_EQ(counts.boxed, 0u);
  EXPECT_GT(counts.reuses, random_programs());
}

// Forward and backward, with what forward saved moved into backward, where it may be overwritten.
TEST(ExecutorPaths, RandomBackwardsWithDonatedTensors) {
  std::size_t donated = 0;
  for (unsigned seed = 0; seed < random_programs(); ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    torch::manual_seed(seed);
    const std::int64_t n = 1 + seed % 7;
    const Tensors inputs{torch::randn({n, n}).set_requires_grad(true),
                         torch::randn({n, n}).set_requires_grad(seed % 2 == 0)};
    const PartitionedCapture capture = partition(
        capture_function(over_tensors([&](const Tensors& in) { return pointwise_program(seed, in); }),
                         values_of(inputs)),
        seed % 3 ? Partitioner::Default : Partitioner::MinCut);
    const JointGraph& joint = capture.capture.joint;
    if (joint.tangents.empty()) continue;
    const ExecutorOptions options{.donated_inputs = capture.halves.donated(joint)};
    donated += options.donated_inputs.size();
    const Executor plain_forward(capture.halves.forward, kPlain), forward(capture.halves.forward);
    const Executor plain_backward(capture.halves.backward, kPlain);
    const Executor backward(capture.halves.backward, options);
    const auto step = [&](const Executor& first, const Executor& second) {
      const at::NoGradGuard no_grad;
      std::vector<c10::IValue> results = first(cloned(inputs));
      Tensors into;
      for (std::size_t i = capture.halves.first_saved_output(); i < results.size(); ++i)
        into.push_back(std::move(results[i]).toTensor());
      results.resize(capture.halves.first_saved_output());
      for (const TangentInfo& tangent : joint.tangents)
        into.push_back(at::empty_strided(tangent.geometry.sizes, tangent.geometry.strides).fill_(0.5));
      for (c10::IValue& gradient : second(std::move(into))) results.push_back(std::move(gradient));
      return results;
    };
    const auto expected = step(plain_forward, plain_backward);
    for (int run = 0; run < 3; ++run)
      expect_same_bits(step(forward, backward), expected, "run " + std::to_string(run));
    if (HasFailure()) break;
  }
  EXPECT_GT(donated, random_programs());
}

Graph graph_of(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs) {
  const at::NoGradGuard no_grad;
  return capture_forward(over_tensors(function), values_of(inputs));
}

// Inputs of other layouts than in earlier runs: views are made anew.
TEST(ExecutorPaths, ViewsOfOtherLayoutsThanBefore) {
  const auto function = [](const Tensors& in) {
    return Tensors{in[0].transpose(0, 1).select(0, 1), in[0].slice(1, 1).unsqueeze(0),
                   in[0].unbind(1)[2] * 2};
  };
  const Executor run(graph_of(function, {torch::randn({3, 4})}));
  const at::Tensor memory = torch::randn({40});
  for (const at::Tensor& x :
       {torch::randn({3, 4}), torch::randn({4, 3}).t(), memory.as_strided({3, 4}, {8, 2}, 5),
        torch::randn({3, 4}), torch::randn({3, 4}, at::kDouble), memory.as_strided({3, 4}, {0, 1}, 2)})
    for (int i = 0; i < 2; ++i) {
      const Tensors expected = function({x});
      const auto actual = run({x});
      expect_same_bits(actual, {expected[0], expected[1], expected[2]}, "output");
      EXPECT_TRUE(actual[0].toTensor().is_alias_of(x));
    }
}

TEST(ExecutorPaths, ConjugatesAndFakeTensors) {
  const auto function = [](const Tensors& in) { return Tensors{in[0].t().select(0, 0) * 2 + 1}; };
  const at::Tensor x = torch::randn({3, 3}, at::kComplexFloat);
  const Executor run(graph_of(function, {x}));
  for (int i = 0; i < 2; ++i) {
    expect_same_bits(run({x}), {function({x})[0]}, "plain");
    expect_same_bits(run({x.conj()}), {function({x.conj()})[0]}, "conjugate");
    FakeMode mode;
    const at::Tensor fake = to_fake(x);
    {
      const ModeGuard guard(mode);
      EXPECT_TRUE(is_fake(run({fake})[0].toTensor()));
    }
    EXPECT_TRUE(is_fake(run({fake})[0].toTensor()));
  }
}

struct Recorder final : Mode {
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    seen.push_back(op.operator_name().name);
    op.callBoxed(stack);
  }
  std::vector<std::string> seen;
};

// Also after runs that nobody saw.
TEST(ExecutorPaths, ModesSeeTheOperatorsAsRecorded) {
  const auto function = [](const Tensors& in) { return Tensors{(in[0].t() + 1).exp().neg().unsqueeze(0)}; };
  const Executor run(graph_of(function, {torch::randn({2, 3})}));
  EXPECT_EQ(run.counts().views, 2u);
  EXPECT_EQ(run.counts().reuses, 2u) << "the sum may not overwrite a view of the input";
  const at::Tensor x = torch::randn({2, 3});
  for (int i = 0; i < 3; ++i) run({x});
  Recorder recorder;
  std::vector<c10::IValue> results;
  {
    const ModeGuard guard(recorder);
    results = run({x});
  }
  EXPECT_EQ(recorder.seen,
            (std::vector<std::string>{"aten::t", "aten::add", "aten::exp", "aten::neg", "aten::unsqueeze"}));
  expect_same_bits(results, {function({x})[0]}, "output");
}

std::int64_t allocations_of(const Executor& run, const at::Tensor& x) {
  for (int i = 0; i < 3; ++i) run({x});
  Tensors inputs{x};
  const std::int64_t before = g_allocations;
  const std::vector<c10::IValue> results = run(std::move(inputs));
  return g_allocations - before;
}

TEST(ExecutorMemory, NothingIsAllocatedForAViewInTheSteadyState) {
  const auto views = [](int count) {
    return [count](const Tensors& in) {
      at::Tensor x = in[0];
      for (int i = 0; i < count; ++i) x = x.transpose(0, 1).unsqueeze(0).select(0, 0).view({4, 4});
      return Tensors{x};
    };
  };
  const at::Tensor x = torch::randn({4, 4});
  const auto square = torch::randn({4, 4});
  const Graph few = graph_of(views(2), {square}), many = graph_of(views(40), {square});
  // The list of results and the tensor in it; nothing for a view in between.
  EXPECT_LE(allocations_of(Executor(few), x), 3);
  EXPECT_EQ(allocations_of(Executor(many), x), allocations_of(Executor(few), x));
  EXPECT_GT(allocations_of(Executor(many, kPlain), x), 100);
}

TEST(ExecutorMemory, NothingIsAllocatedForACallButByItsOperator) {
  const auto function = [](const Tensors& in) { return Tensors{at::addmm(in[0], in[0], in[0]).sum(0)}; };
  const at::Tensor x = torch::randn({4, 4});
  const Graph graph = graph_of(function, {x});
  for (int i = 0; i < 3; ++i) function({x});
  const at::NoGradGuard no_grad;
  const std::int64_t before = g_allocations;
  const at::Tensor product = at::addmm(x, x, x), sum = at::sum(product, 0);
  const std::int64_t of_operators = g_allocations - before;
  EXPECT_LE(allocations_of(Executor(graph), x), of_operators + 1);  // the list of results
  EXPECT_GT(allocations_of(Executor(graph, kPlain), x), of_operators + 1);
}

TEST(ExecutorMemory, ResultsOverwriteTensorsThatAreNotUsedAfterwards) {
  constexpr std::int64_t kItems = 1 << 18;
  const auto function = [](const Tensors& in) {
    return Tensors{((in[0] * 2).tanh().exp() + 1).sigmoid().view({2, -1}).neg()};
  };
  const at::Tensor x = torch::randn({kItems});
  const Graph graph = graph_of(function, {x});
  count_cpu_memory();
  const auto peak_of = [&](const Executor& run) {
    run({x});
    const std::int64_t before = cpu_memory().live;
    reset_cpu_peak();
    run({x});
    return cpu_memory().peak - before;
  };
  EXPECT_LT(peak_of(Executor(graph)), 1.1 * kItems * 4);
  EXPECT_GE(peak_of(Executor(graph, {.reuse_memory = false})), 2 * kItems * 4);
}

TEST(ExecutorMemory, DonatedInputsAreOverwrittenIfNobodyElseHoldsThem) {
  const Graph graph = graph_of([](const Tensors& in) { return Tensors{in[0].tanh()}; }, {torch::randn({8})});
  const Executor donated(graph, {.donated_inputs = {0}}), kept(graph);
  const auto overwrites = [](const Executor& run, at::Tensor x) {
    const at::Tensor expected = x.tanh();
    const void* memory = x.data_ptr();
    Tensors inputs;
    inputs.push_back(std::move(x));
    const at::Tensor result = run(std::move(inputs))[0].toTensor();
    EXPECT_TRUE(at::equal(result, expected));
    return result.data_ptr() == memory;
  };
  EXPECT_EQ(donated.counts().reuses, 1u);
  EXPECT_EQ(kept.counts().reuses, 0u);
  EXPECT_TRUE(overwrites(donated, torch::randn({8})));
  EXPECT_FALSE(overwrites(kept, torch::randn({8})));
  const at::Tensor held = torch::randn({8}), copy = held.clone();
  EXPECT_FALSE(overwrites(donated, held));
  EXPECT_FALSE(overwrites(donated, held.view({8})));
  EXPECT_TRUE(at::equal(held, copy));
  std::vector<float> lent(8, 0.5f);
  EXPECT_FALSE(overwrites(donated, torch::from_blob(lent.data(), {8})));
  EXPECT_EQ(lent, std::vector<float>(8, 0.5f));
}

// ---- operators of this test ----

std::function<at::Tensor(const at::Tensor&)>& called_by_operator() {
  static std::function<at::Tensor(const at::Tensor&)> function;
  return function;
}
at::Tensor call_back(const at::Tensor& x) { return called_by_operator()(x); }
at::Tensor call_back_in_shape(const at::Tensor& x) { return at::empty_like(x); }

TORCH_LIBRARY(penstock_executor_test, library) { library.def("call_back(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(penstock_executor_test, CPU, library) { library.impl("call_back", &call_back); }
TORCH_LIBRARY_IMPL(penstock_executor_test, Meta, library) { library.impl("call_back", &call_back_in_shape); }

at::Tensor calling_back(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock_executor_test::call_back", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

// A collective may still read its argument when it has returned.
TEST(ExecutorMemory, TensorsThatOtherOperatorsSawAreNotOverwritten) {
  const auto function = [](const Tensors& in) {
    const at::Tensor x = in[0] * 2;
    return Tensors{calling_back(x).neg(), x.exp()};
  };
  const at::Tensor x = torch::randn({4});
  called_by_operator() = [](const at::Tensor& argument) { return argument + 1; };
  const Graph graph = graph_of(function, {x});
  EXPECT_EQ(Executor(graph).counts().reuses, 0u);
  const auto results = Executor(graph)({x});
  EXPECT_TRUE(at::equal(results[1].toTensor(), (x * 2).exp()));
}

TEST(ExecutorRuns, MayRunWithinARunOfItself) {
  const auto function = [](const Tensors& in) { return Tensors{calling_back(in[0].t().exp()).t() + 1}; };
  const Executor run(graph_of(function, {torch::randn({2, 2})}));
  int depth = 0;
  called_by_operator() = [&](const at::Tensor& x) {
    if (++depth < 4) return run({x})[0].toTensor();
    return x * 2;
  };
  for (int i = 0; i < 2; ++i) {
    const at::Tensor x = torch::zeros({2, 2});
    depth = 0;
    const at::Tensor expected = function({x})[0];  // only the outermost call is not a run
    depth = 0;
    EXPECT_TRUE(at::equal(run({x})[0].toTensor(), expected));
    EXPECT_EQ(depth, 4);
  }
}

TEST(ExecutorRuns, AreUsableAndHoldNothingAfterAnOperatorThrew) {
  const auto function = [](const Tensors& in) { return Tensors{calling_back(in[0].exp()) + 1}; };
  const Executor run(graph_of(function, {torch::randn({1024})}));
  bool fails = false;
  called_by_operator() = [&](const at::Tensor& x) {
    if (fails) throw std::runtime_error("as asked");
    return x.neg();
  };
  count_cpu_memory();
  const at::Tensor x = torch::randn({1024});
  const at::Tensor expected = function({x})[0];
  run({x});
  const std::int64_t before = cpu_memory().live;
  fails = true;
  for (int i = 0; i < 3; ++i) EXPECT_THROW(run({x}), std::runtime_error);
  EXPECT_EQ(cpu_memory().live, before);
  fails = false;
  EXPECT_TRUE(at::equal(run({x})[0].toTensor(), expected));
}

TEST(ExecutorRuns, SeveralThreadsAtOnce) {
  const auto function = [](const Tensors& in) {
    at::Tensor x = in[0];
    for (int i = 0; i < 20; ++i) x = (x.t().unsqueeze(0).select(0, 0) * 1.01).tanh() + in[0];
    return Tensors{x};
  };
  const Executor run(graph_of(function, {torch::randn({5, 5})}));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const at::NoGradGuard no_grad;
      const at::Tensor x = torch::full({5, 5}, 0.1 * t);
      const at::Tensor expected = function({x})[0];
      for (int i = 0; i < 200; ++i) wrong += !at::equal(run({x})[0].toTensor(), expected);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// ---- products and copies ----

// Random values, some of them not finite, in a random layout.
at::Tensor in_random_layout(std::mt19937& random, std::vector<std::int64_t> sizes, at::ScalarType dtype) {
  const auto choose = [&](std::size_t count) { return static_cast<std::int64_t>(random() % count); };
  const auto values = [&](at::IntArrayRef of) {
    at::Tensor made = torch::randn(of, at::kDouble).mul(4).to(dtype);
    if (at::isFloatingType(dtype) && made.numel() > 0 && choose(6) == 0) {
      constexpr double kSpecial[] = {std::numeric_limits<double>::quiet_NaN(),
                                     std::numeric_limits<double>::infinity(), -0.0};
      made.view({-1})[choose(static_cast<std::size_t>(made.numel()))] = kSpecial[choose(3)];
    }
    return made;
  };
  const std::int64_t last = static_cast<std::int64_t>(sizes.size()) - 1;
  switch (sizes.size() < 2 ? 0 : choose(7)) {
    case 0:
    case 1:
      return values(sizes);
    case 2:  // transposed
      std::swap(sizes[last], sizes[last - 1]);
      return values(sizes).transpose(last, last - 1);
    case 3: {  // in the middle of larger rows
      std::vector<std::int64_t> larger = sizes;
      larger[last] += 5;
      return values(larger).slice(last, 2, 2 + sizes[last]);
    }
    case 4: {  // with gaps
      std::vector<std::int64_t> larger = sizes;
      larger[last] *= 2;
      return values(larger).slice(last, 0, larger[last], 2);
    }
    case 5: {  // the same rows
      std::vector<std::int64_t> one = sizes;
      one[choose(sizes.size())] = 1;
      return values(one).expand(sizes);
    }
    default: {  // dims in another order in memory
      std::vector<std::int64_t> order(sizes.size()), permuted(sizes.size()), back(sizes.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (std::size_t i = 0; i < order.size(); ++i) {
        permuted[i] = sizes[order[i]];
        back[order[i]] = static_cast<std::int64_t>(i);
      }
      return values(permuted).permute(back);
    }
  }
}

void expect_as_plain(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs) {
  const Graph graph = graph_of(function, inputs);
  const Executor plain(graph, kPlain), fast(graph);
  ASSERT_EQ(fast.counts().kernels, 1u) << to_text(graph);
  const auto expected = plain(inputs);
  for (int run = 0; run < 2; ++run) expect_same_bits(fast(inputs), expected, "run " + std::to_string(run));
}

TEST(ExecutorKernels, RandomProducts) {
  constexpr std::int64_t kSizes[] = {0, 1, 2, 3, 8, 16, 17, 33, 64, 70};
  constexpr at::ScalarType kDtypes[] = {at::kFloat,  at::kFloat, at::kFloat,    at::kDouble,
                                        at::kDouble, at::kLong,  at::kBFloat16, at::kComplexFloat};
  for (unsigned seed = 0; seed < 2 * random_programs(); ++seed) {
    std::mt19937 random(seed);
    torch::manual_seed(seed);
    const auto size = [&] { return kSizes[random() % std::size(kSizes)]; };
    const at::ScalarType dtype = kDtypes[random() % std::size(kDtypes)];
    const std::int64_t batches = static_cast<std::int64_t>(random() % 5), rows = size(), inner = size(),
                       columns = size();
    const auto made = [&](std::vector<std::int64_t> sizes) {
      return in_random_layout(random, std::move(sizes), dtype);
    };
    const unsigned kind = random() % 3;
    SCOPED_TRACE(fmt::format("seed {}, kind {}, {} of {} x {} x {}, {}", seed, kind, batches, rows, inner,
                             columns, c10::toString(dtype)));
    if (kind == 0) {
      expect_as_plain([](const Tensors& in) { return Tensors{at::mm(in[0], in[1])}; },
                      {made({rows, inner}), made({inner, columns})});
    } else if (kind == 1) {
      expect_as_plain([](const Tensors& in) { return Tensors{at::bmm(in[0], in[1])}; },
                      {made({batches, rows, inner}), made({batches, inner, columns})});
    } else {
      const std::vector<std::vector<std::int64_t>> added{
          {columns}, {rows, columns}, {1, columns}, {rows, 1}, {1}, {}};
      expect_as_plain([](const Tensors& in) { return Tensors{at::addmm(in[0], in[1], in[2])}; },
                      {made(added[random() % added.size()]), made({rows, inner}), made({inner, columns})});
    }
    if (HasFailure()) break;
  }
}

TEST(ExecutorKernels, RandomCopies) {
  constexpr std::int64_t kSizes[] = {0, 1, 1, 2, 3, 4, 8, 16, 65};
  constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kLong,          at::kBFloat16,
                                        at::kBool,  at::kByte,   at::kComplexDouble, at::kComplexFloat};
  for (unsigned seed = 0; seed < 2 * random_programs(); ++seed) {
    std::mt19937 random(seed);
    torch::manual_seed(seed);
    std::vector<std::int64_t> sizes(random() % 5);
    for (std::int64_t& each : sizes) each = kSizes[random() % std::size(kSizes)];
    const at::ScalarType dtype = kDtypes[random() % std::size(kDtypes)];
    SCOPED_TRACE(fmt::format("seed {}, {}", seed, c10::toString(dtype)));
    const at::Tensor x = in_random_layout(random, sizes, dtype);
    expect_as_plain([](const Tensors& in) { return Tensors{in[0].clone(at::MemoryFormat::Contiguous)}; },
                    {x});
    if (HasFailure()) break;
  }
}

// Other forms have no kernel, and whoever must see the operators sees them.
TEST(ExecutorKernels, AreLeftOutWhereTheyDoNotApply) {
  const at::Tensor x = torch::randn({8, 8});
  const auto kernels = [&](const std::function<Tensors(const Tensors&)>& function) {
    return Executor(graph_of(function, {x})).counts().kernels;
  };
  EXPECT_EQ(kernels([](const Tensors& in) { return Tensors{at::addmm(in[0], in[0], in[0], 0.5)}; }), 0u);
  EXPECT_EQ(kernels([](const Tensors& in) { return Tensors{at::addmm(in[0], in[0], in[0], 1, 2)}; }), 0u);
  EXPECT_EQ(kernels([](const Tensors& in) { return Tensors{in[0].t().clone()}; }), 0u);
  EXPECT_EQ(kernels([](const Tensors& in) { return Tensors{at::mm(in[0], in[0])}; }), 1u);
  const auto function = [](const Tensors& in) {
    return Tensors{at::mm(in[0], in[0]).t().clone(at::MemoryFormat::Contiguous)};
  };
  const Executor run(graph_of(function, {x}));
  Recorder recorder;
  {
    const ModeGuard guard(recorder);
    run({x});
  }
  EXPECT_EQ(recorder.seen, (std::vector<std::string>{"aten::mm", "aten::t", "aten::clone"}));
  // Sizes that do not fit are the operator's error.
  EXPECT_THROW(run({torch::randn({8, 7})}), c10::Error);
}

// The operator makes views of each matrix of a batch.
TEST(ExecutorKernels, ABatchOfProductsAllocatesItsResultOnly) {
  const auto function = [](const Tensors& in) { return Tensors{at::bmm(in[0], in[0])}; };
  const at::Tensor x = torch::randn({16, 16, 16});
  const Graph graph = graph_of(function, {x});
  const std::int64_t direct = allocations_of(Executor(graph), x),
                     by_operator = allocations_of(Executor(graph, {.direct_kernels = false}), x);
  if (has_blas_gemm(at::kFloat))
    EXPECT_LT(direct + 16, by_operator);
  else
    EXPECT_EQ(direct, by_operator);
}

struct SmallNetImpl : torch::nn::Module {
  SmallNetImpl()
      : embed(register_module("embed", torch::nn::Embedding(11, 8))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        batch(register_module("batch", torch::nn::BatchNorm1d(8))),
        in(register_module("in", torch::nn::Linear(8, 24))),
        out(register_module("out", torch::nn::Linear(8, 8))) {}
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = norm(embed(tokens));
    const auto parts = in(x).chunk(3, -1);
    const at::Tensor weights = torch::softmax(parts[0].matmul(parts[1].transpose(-2, -1)) * 0.3, -1);
    x = x + out(weights.matmul(parts[2]));
    x = batch(at::gelu(at::cat({x, x.relu()}, 0)).transpose(1, 2));
    return torch::mse_loss(x, torch::zeros_like(x));
  }
  torch::nn::Embedding embed;
  torch::nn::LayerNorm norm;
  torch::nn::BatchNorm1d batch;
  torch::nn::Linear in, out;
};
TORCH_MODULE(SmallNet);

TEST(ExecutorPaths, OperatorsOfCommonLayersAreCalledUnboxed) {
  SmallNet net;
  const ModuleState state(*net);
  Values inputs(state.tensors.begin(), state.tensors.end());
  inputs.emplace_back(torch::arange(10).reshape({2, 5}));
  const PartitionedCapture capture = partition(
      capture_function([&](const Values& in) -> Values { return {net->forward(in.back().toTensor())}; },
                       inputs, {state.tensors.size(), state.names}),
      Partitioner::Default);
  for (const Graph* half : {&capture.halves.forward, &capture.halves.backward}) {
    const Executor run(*half);
    EXPECT_EQ(run.counts().boxed, 0u) << to_text(*half);
    EXPECT_GT(run.counts().views, 4u);
  }
}

}  // namespace executor_test
}  // namespace penstock::graph
