// The compiler "fused": which groups it chooses, how it calls them, and what happens without a compiler, with
// one that fails, and with one that makes wrong code.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/files.h"
#include "penstock/base/warnings.h"
#include "penstock/compile.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/fused/fused_graph.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/trace/capture.h"
#include "penstock/mode.h"
#include "tests/graph/cache_folder.h"
#include "tests/graph/call_trace.h"
#include "tests/has_text.h"

namespace penstock::graph {
namespace fused_compiler_test {

using namespace penstock::test;
namespace fs = std::filesystem;

Graph graph_of(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs) {
  const at::NoGradGuard no_gradients;
  return capture_forward(over_tensors(function), values_of(inputs));
}

std::vector<std::string> operators_of(const FusionPlan& plan) {
  std::vector<std::string> texts;
  for (const FusedGroup& group : plan.groups) texts.push_back(group.operators);
  return texts;
}
std::vector<std::string> groups_of(const std::function<Tensors(const Tensors&)>& function,
                                   const Tensors& inputs, bool exact = false) {
  FusionOptions options;
  options.lowering.exact = exact;
  return operators_of(plan_fusion(graph_of(function, inputs), options));
}
using Texts = std::vector<std::string>;

// ---- which groups ----

TEST(FusionChoice, PointwiseOperatorsAreOneGroup) {
  EXPECT_EQ(groups_of([](const Tensors& in) -> Tensors { return {at::silu(in[0] * in[1] + in[2]) * in[1]}; },
                      {torch::randn({8, 16}), torch::randn({8, 16}), torch::randn({16})}),
            (Texts{"aten::mul x2, aten::add, aten::silu"}));
}

TEST(FusionChoice, SingleOperatorsProductsAndUnknownOnesStay) {
  EXPECT_EQ(groups_of([](const Tensors& in) -> Tensors { return {at::relu(in[0].mm(in[1])).mm(in[1])}; },
                      {torch::randn({8, 8}), torch::randn({8, 8})}),
            Texts{});
  EXPECT_EQ(groups_of([](const Tensors& in) -> Tensors { return {at::relu(in[0].cumsum(0))}; },
                      {torch::randn({8, 8})}),
            Texts{});
}

TEST(FusionChoice, ExactModeLeavesOutWhatRoundsElsewhere) {
  const auto function = [](const Tensors& in) -> Tensors { return {at::exp(in[0] * 2 + 1).relu() - in[0]}; };
  const Tensors inputs{torch::randn({8, 16})};
  EXPECT_EQ(groups_of(function, inputs), (Texts{"aten::mul, aten::add, aten::exp, aten::relu, aten::sub"}));
#if defined(__aarch64__)
  EXPECT_EQ(groups_of(function, inputs, true), (Texts{"aten::mul, aten::add"}));  // no exact relu
#else
  EXPECT_EQ(groups_of(function, inputs, true), (Texts{"aten::mul, aten::add", "aten::relu, aten::sub"}));
#endif
  EXPECT_EQ(groups_of([](const Tensors& in) -> Tensors { return {(in[0] * 2).sum(-1)}; }, inputs, true),
            Texts{});
}

TEST(FusionChoice, RowsAreReducedAndUsedInOneKernel) {
  const auto norm = [](const Tensors& in) -> Tensors {
    return {in[0] * at::rsqrt(at::mean(in[0] * in[0], -1, true) + 1e-5) * in[1]};
  };
  const Graph graph = graph_of(norm, {torch::randn({4, 6, 16}), torch::randn({16})});
  const FusionPlan plan = plan_fusion(graph, {});
  EXPECT_EQ(operators_of(plan), (Texts{"aten::mul x3, aten::mean, aten::add, aten::rsqrt"}));
  EXPECT_EQ(plan.groups.at(0).kernel.form, LoopForm::Rows);
  EXPECT_EQ(plan.groups[0].kernel.sizes, (std::vector<std::int64_t>{24, 16}));
}

TEST(FusionChoice, AValueBetweenTwoPartsOfAGroupSplitsIt) {
  // The product needs the first part, and the second part the product.
  EXPECT_EQ(groups_of(
                [](const Tensors& in) -> Tensors {
                  const at::Tensor first = (in[0] + 1) * in[0];
                  return {(first.mm(in[1]) + first) * 2 - first};
                },
                {torch::randn({8, 8}), torch::randn({8, 8})}),
            (Texts{"aten::add, aten::mul", "aten::add, aten::mul, aten::sub"}));
}

TEST(FusionChoice, SumsOverLeadingDimsComputeCheapArgumentsAgain) {
  const Graph graph = graph_of(
      [](const Tensors& in) -> Tensors {
        const at::Tensor scaled = in[0] * in[1];
        return {at::softmax(scaled, -1) * in[2], scaled.sum(0)};
      },
      {torch::randn({64, 16}), torch::randn({16}), torch::randn({64, 16})});
  const FusionPlan plan = plan_fusion(graph, {});
  EXPECT_EQ(operators_of(plan), (Texts{"aten::mul x2, aten::_softmax", "aten::mul, aten::sum"}));
  for (const FusedGroup& group : plan.groups) EXPECT_EQ(group.outputs.size(), 1u) << group.operators;
}

TEST(FusionChoice, NothingWithSymbolsAndNothingThatIsEmpty) {
  EXPECT_EQ(groups_of([](const Tensors& in) -> Tensors { return {in[0] * 2 + 1}; }, {torch::randn({0, 16})}),
            Texts{});
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::SiLU(), torch::nn::Tanh());
  CompileOptions options{.dynamic = {.dims = {{"args[0]", 0, "B"}}}};
  options.compiler = "fused";
  auto fast = graph::compile(net, options);
  for (const std::int64_t rows : {3, 5, 8}) {
    const at::Tensor x = torch::randn({rows, 4});
    EXPECT_TRUE(at::allclose(fast->forward(x), net->forward(x), 1e-5, 1e-6));
  }
}

// ---- runs ----

const auto kChain = [](const Tensors& in) -> Tensors {
  const at::Tensor y = (in[0] + in[1]) * in[0];
  return {y.relu() - in[1], y};
};
Tensors chain_inputs() { return {torch::randn({33, 20}), torch::randn({20})}; }

std::shared_ptr<const CompiledGraph> compiled_chain(const FusedKernelOptions& kernels = {},
                                                    bool donates = false) {
  torch::manual_seed(3);
  FusedCompileOptions options;
  options.fusion.lowering.exact = kernels.exact;
  options.kernels = kernels;
  if (donates) options.donated_inputs = {0};
  return compile_fused(graph_of(kChain, chain_inputs()), options);
}

void expect_chain(const CompiledGraph& compiled) {
  const Tensors inputs = chain_inputs(), expected = kChain(inputs);
  const auto results = compiled.run(inputs, nullptr);
  ASSERT_EQ(results.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(results[i].toTensor(), expected[i]));
}

TEST(FusedRuns, AKernelIsCalledAndReported) {
  const auto compiled = compiled_chain();
  const FusedGraph* fused = fused_graph(*compiled);
  ASSERT_NE(fused, nullptr);
  fused->measure(true);
  for (int i = 0; i < 3; ++i) expect_chain(*compiled);
  const auto kernels = fused->kernels();
  ASSERT_EQ(kernels.size(), 1u);
  EXPECT_EQ(kernels[0].operators, "aten::add, aten::mul, aten::relu, aten::sub");
  EXPECT_EQ(kernels[0].calls, 3u);
  EXPECT_EQ(kernels[0].bytes, 4 * (3 * 33 * 20 + 20));
  EXPECT_GT(kernels[0].seconds, 0);
  EXPECT_TRUE(has_text(kernels[0].source, "extern \"C\" void k0("));
  EXPECT_EQ(fused->counts().generated, 1u);
}

TEST(FusedRuns, TensorsOfAnotherLayoutAreLeftToTheOperators) {
  const auto compiled = compiled_chain();
  Tensors inputs = chain_inputs();
  inputs[0] = torch::randn({20, 33}).t();
  const auto results = compiled->run(inputs, nullptr);
  EXPECT_TRUE(at::equal(results[0].toTensor(), kChain(inputs)[0]));
  EXPECT_EQ(fused_graph(*compiled)->kernels()[0].calls, 0u);
  EXPECT_EQ(fused_graph(*compiled)->kernels()[0].calls_of_operators, 1u);
}

TEST(FusedRuns, ResultsTakeTheMemoryOfDonatedInputs) {
  const auto compiled = compiled_chain({}, true);
  Tensors inputs = chain_inputs();
  const Tensors expected = kChain(inputs);
  const at::Tensor kept = inputs[0].clone(), other = inputs[1];
  std::vector<at::Tensor> given{kept.clone(), other};
  const void* memory = given[0].data_ptr();
  const auto results = compiled->run(std::move(given), nullptr);
  EXPECT_TRUE(results[0].toTensor().data_ptr() == memory || results[1].toTensor().data_ptr() == memory);
  EXPECT_TRUE(at::equal(results[0].toTensor(), expected[0]));
  EXPECT_TRUE(at::equal(results[1].toTensor(), expected[1]));
  // Somebody else holds it: it stays.
  compiled->run({inputs[0], other}, nullptr);
  EXPECT_TRUE(at::equal(inputs[0], kept));
}

TEST(FusedRuns, ThreadsAndManyElements) {
  const auto function = [](const Tensors& in) -> Tensors {
    return {(in[0] * 2 + in[1]).relu(), at::softmax(in[0] * 3, -1)};
  };
  const Tensors inputs{torch::randn({700, 300}), torch::randn({300})};
  const auto compiled = compile_fused(graph_of(function, inputs), {});
  ASSERT_NE(fused_graph(*compiled), nullptr);
  const Tensors expected = function(inputs);
  std::vector<std::thread> threads;
  std::vector<int> good(4, 0);
  for (std::size_t t = 0; t < good.size(); ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) {
        const auto results = compiled->run(inputs, nullptr);
        good[t] += at::equal(results[0].toTensor(), expected[0]) &&
                   at::allclose(results[1].toTensor(), expected[1], 1e-5, 1e-7);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, std::vector<int>(4, 5));
}

// Counts the operators that it sees.
struct CountingMode final : Mode {
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    ++operators;
    op.callBoxed(stack);
  }
  int operators = 0;
};

TEST(FusedRuns, ModesSeeTheOperators) {
  const auto compiled = compiled_chain();
  CountingMode mode;
  {
    const ModeGuard guard(mode);
    static_cast<void>(compiled->run(chain_inputs(), nullptr));
  }
  EXPECT_GE(mode.operators, 4);
  EXPECT_EQ(fused_graph(*compiled)->kernels()[0].calls, 0u);
}

// ---- trouble ----

// Sets a variable until the end of the scope.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before, was_set_ = true;
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() { was_set_ ? ::setenv(name_, before_.c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::string before_;
  bool was_set_ = false;
};

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("fused_compiler_test_" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() { remove_tree(path_); }
  std::string script(const std::string& name, const std::string& text) const {
    const fs::path file = path_ / name;
    std::ofstream(file) << "#!/bin/sh\n" << text;
    fs::permissions(file, fs::perms::owner_all);
    return file.string();
  }
  fs::path path() const { return path_; }

 private:
  fs::path path_;
};

// The folder that a message names.
fs::path saved_in(const std::string& message) {
  const std::string before = "source and output are in ";
  const std::size_t at = message.find(before);
  EXPECT_NE(at, std::string::npos) << message;
  return at == std::string::npos ? fs::path() : fs::path(message.substr(at + before.size()));
}
std::string text_of(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(FusedTrouble, WithoutACompilerTheOperatorsRunWithOneMessage) {
  const Variable none("PENSTOCK_CXX", "/nowhere/c++");
  const WarningCapture warnings;
  for (int i = 0; i < 3; ++i) {
    const auto compiled = compiled_chain();
    EXPECT_EQ(fused_graph(*compiled), nullptr);
    expect_chain(*compiled);
  }
  ASSERT_EQ(warnings.warnings().size(), 1u);
  EXPECT_TRUE(has_text(warnings.warnings()[0].message, "runs the operators instead"));
  EXPECT_TRUE(has_text(warnings.warnings()[0].message, "/nowhere/c++"));
  EXPECT_TRUE(has_text(graph_compiler("fused")->version(), "none"));
}

TEST(FusedTrouble, ACompilerThatFailsIsNamedWithWhereItsOutputIs) {
  const Folder folder;
  // It compiles what host_compiler() tries, and no kernel.
  const Variable failing("PENSTOCK_CXX",
                         folder.script("c++",
                                       "for a in \"$@\"; do case $a in *.cpp) grep -q 'void k0' $a && { echo "
                                       "cannot do that >&2; exit 3; };; esac; done\nexec g++ \"$@\"\n"));
  const WarningCapture warnings;
  for (int i = 0; i < 2; ++i) {
    const auto compiled = compile_fused(
        graph_of([](const Tensors& in) -> Tensors { return {(in[0] - 3) * in[0]}; }, {torch::randn({11})}),
        {});
    EXPECT_EQ(fused_graph(*compiled), nullptr);
    const at::Tensor x = torch::randn({11});
    EXPECT_TRUE(at::equal(compiled->run({x}, nullptr)[0].toTensor(), (x - 3) * x));
  }
  ASSERT_EQ(warnings.warnings().size(), 1u);
  const std::string message = warnings.warnings()[0].message;
  EXPECT_TRUE(has_text(message, "cannot do that"));
  EXPECT_TRUE(has_text(message, "status 3"));
  const fs::path saved = saved_in(message);
  EXPECT_TRUE(has_text(text_of(saved / "kernels.cpp"), "void k0"));
  EXPECT_TRUE(has_text(text_of(saved / "output.txt"), "cannot do that"));
  remove_tree(saved);
}

// A compiler that makes sums differences.
std::string wrong_compiler(const Folder& folder) {
  return folder.script(
      "wrong",
      "for a in \"$@\"; do case $a in *.cpp) sed -i 's/= v\\([0-9]*\\) + v/= v\\1 - v/' $a;; esac; "
      "done\nexec g++ \"$@\"\n");
}

TEST(FusedTrouble, TheCheckFindsAWrongKernel) {
  const Folder folder;
  const Variable wrong("PENSTOCK_CXX", wrong_compiler(folder));
  {
    const auto unchecked = compiled_chain();
    ASSERT_NE(fused_graph(*unchecked), nullptr);
    const Tensors inputs = chain_inputs();
    EXPECT_FALSE(at::equal(unchecked->run(inputs, nullptr)[1].toTensor(), kChain(inputs)[1]))
        << "nothing is wrong";
  }
  for (const bool exact : {false, true}) {
    const WarningCapture warnings;
    const auto compiled = compiled_chain({.exact = exact, .check = true}, true);
    ASSERT_NE(fused_graph(*compiled), nullptr);
    for (int i = 0; i < 3; ++i) expect_chain(*compiled);
    EXPECT_EQ(fused_graph(*compiled)->kernels()[0].calls, 1u);
    EXPECT_EQ(fused_graph(*compiled)->kernels()[0].calls_of_operators, 3u);
    ASSERT_EQ(warnings.warnings().size(), 1u);
    const std::string message = warnings.warnings()[0].message;
    EXPECT_TRUE(has_text(message, "training.compile_check"));
    EXPECT_TRUE(has_text(message, "aten::add, aten::mul"));
    const fs::path saved = saved_in(message);
    EXPECT_TRUE(has_text(text_of(saved / "kernels.cpp"), "void k0"));
    remove_tree(saved);
  }
}

TEST(FusedTrouble, TheCheckAcceptsRightKernelsAndComparesOnce) {
  const WarningCapture warnings;
  const auto compiled = compiled_chain({.exact = false, .check = true});
  ASSERT_NE(fused_graph(*compiled), nullptr);
  for (int i = 0; i < 3; ++i) expect_chain(*compiled);
  EXPECT_EQ(fused_graph(*compiled)->kernels()[0].calls, 3u);
  EXPECT_EQ(fused_graph(*compiled)->kernels()[0].calls_of_operators, 1u);
  EXPECT_TRUE(warnings.warnings().empty());
}

TEST(FusedTrouble, WhatCountsAsADifference) {
  const at::Tensor x = torch::randn({1000});
  EXPECT_EQ(difference_from_operators(x, x, true, false), "");
  EXPECT_EQ(difference_from_operators(x * (1 + 1e-6), x, false, false), "");
  EXPECT_NE(difference_from_operators(x * (1 + 1e-6), x, true, false), "");
  EXPECT_NE(difference_from_operators(x * (1 + 1e-3), x, false, false), "");
  EXPECT_EQ(difference_from_operators(x * (1 + 1e-3), x, false, false, at::kBFloat16), "");
  EXPECT_NE(difference_from_operators(x * (1 + 1e-1), x, false, false, at::kBFloat16), "");
  at::Tensor one = x.clone();
  one[500] += 1;
  EXPECT_TRUE(has_text(difference_from_operators(one, x, false, false),
                       "1 of 1000 elements differ, the first is element 500"));
  EXPECT_EQ(difference_from_operators(one, x, false, true), "");  // a comparison may have decided otherwise
  at::Tensor nan = x.clone();
  nan[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(difference_from_operators(nan, x, false, false), "");
  EXPECT_EQ(difference_from_operators(nan, nan, true, false), "");
  const at::Tensor zero = torch::zeros({2});
  EXPECT_NE(difference_from_operators(-zero, zero, true, false), "");
  EXPECT_EQ(difference_from_operators(-zero, zero, false, false), "");
}

// ---- code that is kept ----

CompileOptions kept_options(const CacheFolder& folder) {
  CompileOptions options = folder.options("fused");
  options.compiler = "fused";
  return options;
}

TEST(FusedCode, IsKeptInTheCache) {
  const CacheFolder cache;
  const Folder folder;
  const Variable counting("PENSTOCK_CXX", folder.script("counting",
                                                        "for a in \"$@\"; do case $a in *.cpp) grep -q 'void "
                                                        "k0' $a && echo >> '" +
                                                            (folder.path() / "runs").string() +
                                                            "';; esac; done\nexec g++ \"$@\"\n"));
  const auto compiles = [&] {
    const std::string text = text_of(folder.path() / "runs");
    return std::count(text.begin(), text.end(), '\n');
  };
  const Tensors inputs{torch::randn({9, 13}).set_requires_grad(true), torch::randn({13})};
  for (int run = 0; run < 3; ++run) {
    Compiled compiled(
        over_tensors([](const Tensors& in) -> Tensors { return {at::tanh(in[0] * in[1] + 0.25) * in[0]}; }),
        kept_options(cache));
    const at::Tensor result = compiled(values_of(inputs))[0].toTensor();
    EXPECT_TRUE(at::allclose(result, at::tanh(inputs[0] * inputs[1] + 0.25) * inputs[0], 1e-5, 1e-6));
    result.sum().backward();
    EXPECT_EQ(compiled.loaded(), run == 0 ? 0u : 1u) << compiled.cache_counts().text();
  }
  EXPECT_EQ(compiles(), 2) << "forward and backward are compiled once each";
}

TEST(FusedCode, DamagedCodeIsCompiledAgain) {
  const auto compiler = graph_compiler("fused");
  const Graph graph =
      graph_of([](const Tensors& in) -> Tensors { return {(in[0] * 7 + 2).neg()}; }, {torch::randn({15})});
  const auto compiled = compiler->compile(graph, {});
  const auto code = compiler->artifact(*compiled);
  ASSERT_TRUE(code);
  EXPECT_NE(compiler->load(graph, {}, *code), nullptr);
  const Graph other =
      graph_of([](const Tensors& in) -> Tensors { return {(in[0] * 7 + 3).neg()}; }, {torch::randn({15})});
  EXPECT_EQ(compiler->load(other, {}, *code), nullptr);
  for (std::size_t length : {std::size_t{0}, std::size_t{9}, code->size() / 2}) {
    const std::vector<std::uint8_t> cut(code->begin(), code->begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_EQ(compiler->load(graph, {}, cut), nullptr) << length;
  }
}

TEST(FusedCode, ReadOnlyCachesAreNoTrouble) {
  const CacheFolder cache;
  CompileOptions options = kept_options(cache);
  options.cache.folder = "/proc/no/such/folder";
  const WarningCapture warnings;
  Compiled compiled(over_tensors([](const Tensors& in) -> Tensors { return {(in[0] + 0.5) * in[0]}; }),
                    options);
  const at::Tensor x = torch::randn({21});
  EXPECT_TRUE(at::equal(compiled(values_of({x}))[0].toTensor(), (x + 0.5) * x));
}

}  // namespace fused_compiler_test
}  // namespace penstock::graph
