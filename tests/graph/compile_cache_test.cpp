// Captured calls that are kept between runs: the call level, the graph level, artifacts, and several
// processes.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "penstock/base/files.h"
#include "penstock/base/warnings.h"
#include "penstock/compile.h"
#include "penstock/compile_artifact.h"
#include "penstock/context_codec.h"
#include "penstock/errors.h"
#include "penstock/graph/cache/entry_lock.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph_compiler.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/constant_tensor.h"
#include "penstock/value_wrapper.h"
#include "tests/graph/cache_folder.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace compile_cache_test {

using test::has_text;
using test::message_of;
namespace fs = std::filesystem;

// Counts how often it runs.
struct Counted {
  std::shared_ptr<int> runs = std::make_shared<int>(0);
  Values operator()(const Values& in) const {
    ++*runs;
    const at::Tensor x = in[0].toTensor(), w = in[1].toTensor();
    in[2].toTensor().mul_(0.5);
    const at::Tensor y = torch::mm(x, w).relu();
    return {y, in[2].toTensor().t(), y.sum() * in[3].toInt()};
  }
};

Values inputs_of(unsigned seed) {
  torch::manual_seed(seed);
  return {torch::randn({3, 4}), torch::randn({4, 2}).requires_grad_(), torch::randn({2, 5}), 3};
}

// Results, written input and gradient of one call.
std::vector<at::Tensor> outcome(const std::function<Values(const Values&)>& call, unsigned seed) {
  Values inputs = inputs_of(seed);
  const Values results = call(inputs);
  results[2].toTensor().backward();
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor(), inputs[1].toTensor().grad(),
          inputs[2].toTensor()};
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(CallCache, AWarmCallDoesNotRunTheFunction) {
  const CacheFolder folder;
  const std::vector<at::Tensor> eager = outcome(Counted(), 1);
  Counted first, second;
  Compiled cold(first, folder.options());
  expect_equal(outcome([&](const Values& in) { return cold(in); }, 1), eager);
  EXPECT_GT(*first.runs, 0);
  EXPECT_EQ(cold.loaded(), 0U);
  EXPECT_EQ(cold.cache_counts().stored, 2U);  // the call, and its halves
  Compiled warm(second, folder.options());
  expect_equal(outcome([&](const Values& in) { return warm(in); }, 1), eager);
  expect_equal(outcome([&](const Values& in) { return warm(in); }, 2), outcome(Counted(), 2));
  EXPECT_EQ(*second.runs, 0);
  EXPECT_EQ(warm.loaded(), 1U);
  EXPECT_EQ(warm.captures(), 1U);
  EXPECT_EQ(to_text(warm.joint(0).graph), to_text(cold.joint(0).graph));
  EXPECT_EQ(warm.meta(0), cold.meta(0));
}

TEST(CallCache, AnotherIdentityGuardOrOptionIsAnotherCall) {
  const CacheFolder folder;
  Counted function;
  const auto runs = [&](const CompileOptions& options, const Values& inputs) {
    Compiled compiled(function, options);
    const int before = *function.runs;
    compiled(inputs);
    return *function.runs - before;
  };
  const CompileOptions options = folder.options();
  EXPECT_GT(runs(options, inputs_of(1)), 0);
  EXPECT_EQ(runs(options, inputs_of(1)), 0);
  EXPECT_GT(runs(folder.options("another"), inputs_of(1)), 0);
  CompileOptions min_cut = options;
  min_cut.cache.name = "another module";
  EXPECT_GT(runs(min_cut, inputs_of(1)), 0);
  Values other = inputs_of(1);
  other[3] = 4;
  EXPECT_GT(runs(options, other), 0);
  other = inputs_of(1);
  other[0] = torch::randn({5, 4});
  EXPECT_GT(runs(options, other), 0);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_GT(runs(options, inputs_of(1)), 0);
  }
  EXPECT_EQ(runs(options, inputs_of(7)), 0);
}

// Keeps code: the name of the half.
class Keeping final : public GraphCompiler {
 public:
  explicit Keeping(std::string name) : name_(std::move(name)) {}
  std::string_view name() const override { return name_; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph, const CompileRequest& how) const override {
    ++compiled;
    return wrapped(graph, how);
  }
  std::optional<std::vector<std::uint8_t>> artifact(const CompiledGraph& graph) const override {
    const std::string& role = dynamic_cast<const Run&>(graph).role;
    return std::vector<std::uint8_t>(role.begin(), role.end());
  }
  std::shared_ptr<const CompiledGraph> load(const Graph& graph, const CompileRequest& how,
                                            std::span<const std::uint8_t> code) const override {
    EXPECT_EQ(std::string(code.begin(), code.end()), to_text(how.role));
    ++loaded;
    return wrapped(graph, how);
  }
  mutable std::atomic<int> compiled = 0, loaded = 0;

 private:
  struct Run final : CompiledGraph {
    std::string role;
    std::shared_ptr<const CompiledGraph> inner;
    std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
      return inner->run(std::move(inputs), sizes);
    }
  };
  static std::shared_ptr<const CompiledGraph> wrapped(const Graph& graph, const CompileRequest& how) {
    auto run = std::make_shared<Run>();
    run->role = to_text(how.role);
    run->inner = graph_compiler(kExecutorCompiler)->compile(graph, how);
    return run;
  }
  std::string name_;
};

const Keeping& keeping_compiler() {
  static const auto compiler = [] {
    auto made = std::make_shared<const Keeping>("keeping");
    register_graph_compiler(made);
    return made;
  }();
  return *compiler;
}

struct AsTheyAre final : ValueWrapper {
  std::string name() const override { return "as they are"; }
};

TEST(CallCache, EveryOptionIsPartOfTheKey) {
  keeping_compiler();
  using Options = CompileOptions;
  const std::vector<std::pair<std::string, std::function<void(Options&)>>> changes{
      {"partitioner", [](Options& o) { o.partitioner = Partitioner::MinCut; }},
      {"activation budget", [](Options& o) { o.activations.budget = "0"; }},
      {"activation policy", [](Options& o) { o.activations.policy = {"*: recompute"}; }},
      {"specialize", [](Options& o) { o.dynamic.specialize = true; }},
      {"trust", [](Options& o) { o.dynamic.trust = true; }},
      {"joint_checks", [](Options& o) { o.joint_checks = true; }},
      {"second_derivatives", [](Options& o) { o.second_derivatives = SecondDerivatives::Refuse; }},
      {"compile_backward", [](Options& o) { o.compile_backward = CompileBackward::FirstUse; }},
      {"keep_input_mutations", [](Options& o) { o.keep_input_mutations = true; }},
      {"explicit_random_states", [](Options& o) { o.explicit_random_states = true; }},
      {"effect_tokens", [](Options& o) { o.effect_tokens = true; }},
      {"argument_names", [](Options& o) { o.argument_names = {"x"}; }},
      {"compiler", [](Options& o) { o.compiler = "keeping"; }},
      {"backward_compiler", [](Options& o) { o.backward_compiler = "keeping"; }},
      {"inference_compiler", [](Options& o) { o.inference_compiler = "keeping"; }},
      {"identity", [](Options& o) { o.cache.identity = "another"; }},
      {"name", [](Options& o) { o.cache.name = "another"; }}};
  const CacheFolder folder;
  const std::vector<at::Tensor> eager = outcome(Counted(), 1);
  const auto runs = [&](const Options& options) {
    const Counted function;
    Compiled compiled(function, options);
    expect_equal(outcome([&](const Values& in) { return compiled(in); }, 1), eager);
    return *function.runs;
  };
  EXPECT_GT(runs(folder.options()), 0);
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    Options options = folder.options();
    change(options);
    EXPECT_GT(runs(options), 0);
    EXPECT_EQ(runs(options), 0);
  }
  EXPECT_EQ(runs(folder.options()), 0);
}

// They are code: no identity says what they do.
TEST(CallCache, WithDecompositionsAndWrappersEveryRunCaptures) {
  const CacheFolder folder;
  const Function function = [](const Values& in) -> Values { return {torch::silu(in[0].toTensor())}; };
  const at::Tensor x = torch::randn({5});
  const auto silu_times = [](double factor) {
    return [factor](const std::vector<c10::IValue>& in) -> std::vector<at::Tensor> {
      return {in[0].toTensor() * torch::sigmoid(in[0].toTensor()) * factor};
    };
  };
  for (const double factor : {1., 2.}) {
    CompileOptions options = folder.options();
    options.decompositions = {{"aten::silu", silu_times(factor)}};
    Compiled compiled(function, options);
    EXPECT_TRUE(at::allclose(compiled({x})[0].toTensor(), torch::silu(x) * factor));
    EXPECT_EQ(compiled.loaded(), 0U);
    EXPECT_TRUE(has_text(compiled.cache_counts().text(), "the decomposition of aten::silu is code"))
        << compiled.cache_counts().text();
    options.cache = {.name = "step", .artifact = Artifact::create(folder.path / std::to_string(factor), {})};
    EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { Compiled(function, options); }),
                         "the decomposition of aten::silu cannot be stored"));
  }
  for (int run = 0; run < 2; ++run) {
    CompileOptions options = folder.options();
    options.wrappers = {std::make_shared<AsTheyAre>()};
    Compiled compiled(function, options);
    EXPECT_TRUE(at::equal(compiled({x})[0].toTensor(), torch::silu(x)));
    EXPECT_EQ(compiled.loaded(), 0U);
    EXPECT_TRUE(has_text(compiled.cache_counts().text(), "wrapper 'as they are' is code"));
  }
}

// The function of the program runs again, for the first time in a run that has loaded the call.
// SecondDerivatives.* compares loaded calls with plain ones.
TEST(CallCache, SecondDerivativesOfLoadedCallsRunTheFunction) {
  const CacheFolder folder;
  const auto runs = std::make_shared<int>(0);
  const Function function = [runs](const Values& in) -> Values {
    ++*runs;
    return {in[0].toTensor().pow(3)};
  };
  for (const char* identity : {"a test", "", "a test", ""}) {
    SCOPED_TRACE(identity);
    Compiled compiled(function, folder.options(identity));
    const at::Tensor x = torch::tensor({2.F, 3.F}).requires_grad_();
    const at::Tensor y = compiled({x})[0].toTensor().sum();
    *runs = 0;
    EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {x}, {}, true)[0], torch::tensor({12.F, 27.F})));
    EXPECT_EQ(*runs, 0);
    const at::Tensor first =
        torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    EXPECT_EQ(*runs, 1);
    EXPECT_TRUE(at::equal(torch::autograd::grad({first.sum()}, {x})[0], torch::tensor({12.F, 18.F})));
  }
}

// ---- a tensor subclass of the user ----

// Has a name, which results inherit.
class Named final : public Payload {
 public:
  static constexpr std::string_view kKind = "Named";
  Named(at::Tensor inner, std::string name) : inner(std::move(inner)), name(std::move(name)) {}
  static at::Tensor make(const at::Tensor& inner, const std::string& name,
                         const at::Tensor* viewed = nullptr) {
    return make_wrapper_like(c10::make_intrusive<Named>(inner, name), inner, viewed);
  }
  std::string_view kind() const override { return kKind; }
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    WrapperCall<Named> call(op, stack);
    const Stack results = call.run([](const Named& named) { return named.inner; });
    call.finish(results, [&](const at::Tensor& inner, ResultPlace, const at::Tensor* viewed) {
      return make(inner, name, viewed);
    });
  }
  std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const override {
    return {{"inner", inner}};
  }
  c10::IValue context() const override { return name; }

  at::Tensor inner;
  std::string name;
};

void register_named() {
  static const bool registered = [] {
    register_wrapper_kind("Named", [](const FlatWrapper& flat) {
      return Named::make(flat.tensors.at(0).second, flat.context.toStringRef());
    });
    register_context_codec("Named", {.encode =
                                         [](const Payload& payload) {
                                           const std::string name = payload.context().toStringRef();
                                           return std::vector<std::uint8_t>(name.begin(), name.end());
                                         },
                                     .decode =
                                         [](const std::vector<std::uint8_t>& context, const FlatWrapper& flat,
                                            const std::vector<at::Tensor>&) {
                                           FlatWrapper named = flat;
                                           named.context = std::string(context.begin(), context.end());
                                           return unflatten_wrapper(named);
                                         }});
    return true;
  }();
  static_cast<void>(registered);
}

TEST(CallCache, SubclassesOfTheUserInEntriesAndArtifacts) {
  register_named();
  const CacheFolder folder;
  const auto runs = std::make_shared<int>(0);
  const Function function = [runs](const Values& in) -> Values {
    ++*runs;
    return {in[0].toTensor().sin() * in[1].toTensor()};
  };
  // Whether the function ran.
  const auto run = [&](const CompileOptions& options, const std::string& name) {
    Compiled compiled(function, options);
    torch::manual_seed(3);
    const at::Tensor x = torch::randn({4}), y = torch::randn({4}).requires_grad_();
    const at::Tensor named = Named::make(x, name).set_requires_grad(true);
    *runs = 0;
    const at::Tensor result = compiled({named, y})[0].toTensor();
    const bool ran = *runs > 0;
    result.sum().backward();
    EXPECT_EQ(compiled.cache_counts().refused.size(), 0U) << compiled.cache_counts().text();
    for (const auto& [tensor, expected] :
         {std::pair(result.detach(), x.sin() * y.detach()), std::pair(named.grad(), x.cos() * y.detach())}) {
      const Named* payload = payload_as<Named>(tensor);
      if (!payload) {
        ADD_FAILURE() << "it is not of this kind";
        continue;
      }
      EXPECT_EQ(payload->name, name);
      EXPECT_TRUE(at::equal(payload->inner, expected));
    }
    return ran;
  };
  EXPECT_TRUE(run(folder.options(), "one"));
  EXPECT_TRUE(run(folder.options(), "two"));
  EXPECT_FALSE(run(folder.options(), "one"));
  EXPECT_FALSE(run(folder.options(), "two"));
  CompileOptions options;
  options.cache = {.name = "step", .artifact = Artifact::create(folder.path / "artifact", {})};
  EXPECT_TRUE(run(options, "one"));
  options.cache.artifact->finish();
  options.cache.artifact = Artifact::open(folder.path / "artifact", {});
  EXPECT_FALSE(run(options, "one"));
  EXPECT_TRUE(has_text(message_of<StateError>([&] { run(options, "two"); }), "input 0 is Named two"));
}

TEST(CallCache, CodeOfCompilersIsLoaded) {
  const Keeping& compiler = keeping_compiler();
  for (const CompileBackward when : {CompileBackward::AtOnce, CompileBackward::FirstUse})
    for (const char* identity : {"", "an identity"}) {
      SCOPED_TRACE(identity);
      const CacheFolder folder;
      CompileOptions options = folder.options(identity);
      options.compiler = "keeping";
      options.compile_backward = when;
      const bool at_once = when == CompileBackward::AtOnce;
      const auto run = [&](int compiled, int loaded) {
        compiler.compiled = compiler.loaded = 0;
        Compiled fast(Counted(), options);
        expect_equal(outcome([&](const Values& in) { return fast(in); }, 1), outcome(Counted(), 1));
        EXPECT_EQ(compiler.compiled, compiled);
        EXPECT_EQ(compiler.loaded, loaded);
      };
      run(2, 0);
      // A backward that is compiled later is not there when the call is stored.
      run(at_once ? 0 : 1, at_once ? 2 : 1);
    }
}

TEST(CallCache, NothingIsKeptUnlessItIsAskedFor) {
  const CacheFolder folder;
  ::setenv("PENSTOCK_CACHE", "off", 1);
  Compiled off(Counted(), folder.options());
  off(inputs_of(1));
  EXPECT_TRUE(fs::is_empty(folder.path));
  ::setenv("PENSTOCK_CACHE", folder.path.c_str(), 1);
  CompileOptions never;
  never.cache.use = CacheOptions::Use::Off;
  Compiled(Counted(), never)(inputs_of(1));
  EXPECT_TRUE(fs::is_empty(folder.path));
  // Without an identity, only what follows the capture.
  Counted function;
  Compiled cold(function);
  cold(inputs_of(1));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 1);
  Compiled warm(function);
  warm(inputs_of(1));
  EXPECT_EQ(warm.cache_counts().text(), "1 hit, 0 misses, 0 stored");
  EXPECT_EQ(warm.loaded(), 0U);
  ::unsetenv("PENSTOCK_CACHE");
}

TEST(CallCache, DamagedContentsAreCompiledAgain) {
  const CacheFolder folder;
  const CompileOptions options = folder.options();
  Compiled(Counted(), options)(inputs_of(1));
  for (const auto& item : fs::directory_iterator(folder.path)) {
    std::string bytes = read_file(item.path(), "test", "");
    bytes[bytes.size() / 2] ^= 4;
    std::ofstream(item.path(), std::ios::binary) << bytes;
  }
  const WarningCapture capture;
  Compiled again(Counted(), options);
  expect_equal(outcome([&](const Values& in) { return again(in); }, 1), outcome(Counted(), 1));
  EXPECT_EQ(again.cache_counts().damaged, 2U);
  Compiled warm(Counted(), options);
  warm(inputs_of(1));
  EXPECT_EQ(warm.loaded(), 1U);
}

// Its value may change before the next run: an entry would go on with the old one.
// A process that was stopped never releases the locks of the call and of its graph. Only the first one is
// waited for, and not until a rank that waits for this one would time out.
TEST(CallCache, AStuckLockIsWaitedForOnceAndNotForLong) {
  using namespace std::chrono_literals;
  const CacheFolder folder;
  Compiled(Counted(), folder.options())(inputs_of(1));
  std::vector<fs::path> entries;
  for (const auto& item : fs::directory_iterator(folder.path)) entries.push_back(item.path());
  std::vector<EntryLock> locks;
  for (const fs::path& entry : entries) {
    fs::remove(entry);
    locks.push_back(
        EntryLock::acquire(fs::path(entry).replace_extension(".lock"), 0ms, [] { return false; }));
    ASSERT_TRUE(locks.back().held());
  }
  ASSERT_EQ(locks.size(), 2U);
  CompileOptions with_limit = folder.options();
  with_limit.cache.longest_wait = 200ms;
  const std::vector<at::Tensor> eager = outcome(Counted(), 1);
  for (const auto& [options, timeout, waited] :
       {std::tuple(with_limit, "60", "0.2 s"), std::tuple(folder.options(), "1", "0.3 s")}) {
    SCOPED_TRACE(waited);
    ::setenv("PENSTOCK_TIMEOUT_S", timeout, 1);
    const WarningCapture capture;
    Compiled stuck(Counted(), options);
    ::unsetenv("PENSTOCK_TIMEOUT_S");
    expect_equal(outcome([&](const Values& in) { return stuck(in); }, 1), eager);
    EXPECT_EQ(stuck.captures(), 1U);
    EXPECT_EQ(stuck.cache_counts().stored, 0U);
    const std::vector<Warning> warnings = capture.warnings();
    ASSERT_EQ(warnings.size(), 1U);
    EXPECT_TRUE(has_text(warnings[0].message, std::string("has held the lock for ") + waited));
    EXPECT_TRUE(has_text(warnings[0].message, "step is compiled without the cache"));
  }
}

TEST(CallCache, AFunctionThatUsesATensorOfTheProgramIsNotKept) {
  const CacheFolder folder;
  const at::Tensor table = torch::arange(8.).to(at::kFloat).view({4, 2});  // adding 1 is exact
  const Function function = [table](const Values& in) -> Values {
    return {torch::mm(in[0].toTensor(), table)};
  };
  for (int run = 0; run < 2; ++run) {
    const WarningCapture capture;
    Compiled compiled(function, folder.options());
    const at::Tensor x = torch::randn({3, 4});
    EXPECT_TRUE(at::equal(compiled({x})[0].toTensor(), torch::mm(x, table)));
    EXPECT_EQ(compiled.loaded(), 0U);
    EXPECT_TRUE(has_text(compiled.cache_counts().text(), "without it being an input, parameter or buffer"))
        << compiled.cache_counts().text();
    // The graph level finds the halves; they use the tensor itself.
    EXPECT_EQ(compiled.cache_counts().hits, static_cast<std::size_t>(run));
    table.add_(1);
    EXPECT_TRUE(at::equal(compiled({x})[0].toTensor(), torch::mm(x, table)));
    table.sub_(1);
  }
  // One that only the graph has does not change.
  const Function own = [](const Values& in) -> Values {
    return {torch::mm(in[0].toTensor(), torch::tensor({{1.5F, 2.0F}, {0.25F, 1.0F}}))};
  };
  Compiled(own, folder.options("own"))({torch::randn({3, 2})});
  Compiled warm(own, folder.options("own"));
  const at::Tensor x = torch::randn({3, 2});
  EXPECT_TRUE(at::equal(warm({x})[0].toTensor(), own({x})[0].toTensor()));
  EXPECT_EQ(warm.loaded(), 1U);
}

// A table that never changes is stored with its values.
TEST(CallCache, AConstantOfTheProgramIsKept) {
  const CacheFolder folder;
  const at::Tensor table = constant_tensor(torch::randn({4}));
  const at::Tensor part = table.narrow(0, 1, 2);
  const Function function = [&](const Values& in) -> Values {
    return {in[0].toTensor() * table, in[0].toTensor().narrow(0, 0, 2) + part};
  };
  const Values inputs{torch::randn({4})};
  const Values expected = function(inputs);
  for (const std::size_t loaded : {0U, 1U}) {
    Compiled compiled(function, options_in(folder.path));
    const Values results = compiled(inputs);
    for (std::size_t i = 0; i < results.size(); ++i)
      EXPECT_TRUE(at::equal(results[i].toTensor(), expected[i].toTensor()));
    EXPECT_EQ(compiled.loaded(), loaded);
    EXPECT_TRUE(compiled.cache_counts().refused.empty());
  }
  EXPECT_TRUE(is_constant_tensor(table.t().detach()));
  table.add_(1);  // no constant any more
  EXPECT_FALSE(is_constant_tensor(table));
  EXPECT_FALSE(is_constant_tensor(torch::randn({4})));
  EXPECT_FALSE(is_constant_tensor(at::Tensor()));
}

TEST(CallCache, VerificationNamesWhatTheIdentityLeavesOut) {
  const CacheFolder folder;
  const auto scaled = [](double factor) {
    return [factor](const Values& in) -> Values { return {in[0].toTensor() * factor}; };
  };
  const at::Tensor x = torch::randn({3});
  Compiled(scaled(2), folder.options())({x});
  CompileOptions options = folder.options();
  options.cache.verify = true;
  Compiled same(scaled(2), options);
  EXPECT_TRUE(at::equal(same({x})[0].toTensor(), x * 2));
  EXPECT_EQ(same.loaded(), 1U);
  const std::string error = message_of<StateError>([&] { Compiled(scaled(3), options)({x}); });
  EXPECT_TRUE(has_text(error, "the entry of step is that of another function"));
  EXPECT_TRUE(has_text(error, "aten::mul.Scalar(%0, 3.)")) << error;
  EXPECT_TRUE(has_text(error, "add to the identity what decides this"));
}

TEST(CallCache, CallsForAllSizes) {
  const CacheFolder folder;
  CompileOptions options = folder.options();
  options.dynamic.dims = {{0, 0, "B"}};
  auto runs = std::make_shared<int>(0);
  const Function function = [runs](const Values& in) -> Values {
    ++*runs;
    const at::Tensor x = in[0].toTensor();
    return {x.softmax(1) / x.size(0)};
  };
  Compiled cold(function, options);
  for (const std::int64_t size : {5, 8}) cold({torch::randn({size, 3})});
  ASSERT_TRUE(cold.is_dynamic(0)) << cold.why_not_dynamic();
  *runs = 0;
  Compiled warm(function, options);
  for (const std::int64_t size : {8, 5, 8}) {
    const at::Tensor x = torch::randn({size, 3});
    EXPECT_TRUE(at::equal(warm({x})[0].toTensor(), x.softmax(1) / size));
  }
  EXPECT_EQ(*runs, 0);  // both sizes were checked in the first run
  EXPECT_TRUE(warm.is_dynamic(0));
  const at::Tensor x = torch::randn({6, 3});
  EXPECT_TRUE(at::equal(warm({x})[0].toTensor(), x.softmax(1) / 6));
  EXPECT_GT(*runs, 0);
  *runs = 0;
  Compiled(function, options)({torch::randn({6, 3})});
  EXPECT_EQ(*runs, 0);
}

// In the cache and in an artifact, also after sizes were added to the entry.
TEST(CallCache, EntriesHaveTheTimeThatMakingThemTook) {
  using namespace std::chrono_literals;
  const CacheFolder folder;
  auto runs = std::make_shared<int>(0);
  const Function slow = [runs](const Values& in) -> Values {
    if (++*runs == 1) std::this_thread::sleep_for(20ms);
    return {in[0].toTensor().softmax(1)};
  };
  for (const bool dynamic : {false, true}) {
    SCOPED_TRACE(dynamic);
    CompileOptions options = folder.options(dynamic ? "for all sizes" : "fixed");
    if (dynamic) options.dynamic.dims = {{0, 0, "B"}};
    *runs = 0;
    Compiled cold(slow, options);
    cold({torch::randn({5, 3})});
    EXPECT_GE(cold.made_in(0), 20ms);
    EXPECT_EQ(cold.cache_counts().time_saved, 0us);
    std::vector<std::string> lines;
    options.log = [&](const std::string& line) { lines.push_back(line); };
    for (int start = 0; start < 2; ++start) {
      Compiled warm(slow, options);
      warm({torch::randn({5, 3})});
      ASSERT_EQ(warm.loaded(), 1U);
      EXPECT_EQ(warm.made_in(0), cold.made_in(0));
      EXPECT_EQ(warm.cache_counts().time_saved, cold.made_in(0));
      if (dynamic) warm({torch::randn({6, 3})});  // is stored again
    }
    ASSERT_EQ(lines.size(), 2U);
    EXPECT_TRUE(has_text(lines[0], "capture 1 was loaded: 1 nodes in ")) << lines[0];
  }
  CompileOptions options;
  options.cache = {.name = "step", .artifact = Artifact::create(folder.path / "artifact", {})};
  *runs = 0;
  Compiled cold(slow, options);
  cold({torch::randn({5, 3})});
  options.cache.artifact->finish();
  options.cache.artifact = Artifact::open(folder.path / "artifact", {});
  Compiled warm(slow, options);
  warm({torch::randn({5, 3})});
  EXPECT_GE(warm.made_in(0), 20ms);
  EXPECT_EQ(warm.made_in(0), cold.made_in(0));
  EXPECT_EQ(warm.cache_counts().time_saved, cold.made_in(0));
}

// Those of the halves tell what partitioning and compiling took.
TEST(CallCache, HalvesHaveTheTimeThatMakingThemTook) {
  using namespace std::chrono_literals;
  struct Slow final : GraphCompiler {
    std::string_view name() const override { return "slow"; }
    std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                                 const CompileRequest& how) const override {
      std::this_thread::sleep_for(20ms);
      return graph_compiler(kExecutorCompiler)->compile(graph, how);
    }
  };
  static const bool registered = (register_graph_compiler(std::make_shared<const Slow>()), true);
  ASSERT_TRUE(registered);
  const CacheFolder folder;
  CompileOptions options = folder.options(/*identity=*/"");
  options.compiler = "slow";
  Compiled(Counted(), options)(inputs_of(1));
  Compiled warm(Counted(), options);
  warm(inputs_of(1));
  EXPECT_EQ(warm.cache_counts().hits, 1U);
  EXPECT_GE(warm.cache_counts().time_saved, 40ms);
  EXPECT_EQ(warm.loaded(), 0U);
}

// ---- modules ----

struct NetImpl : torch::nn::Module {
  NetImpl() {
    linear = register_module("linear", torch::nn::Linear(4, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
  }
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    ++runs;
    const at::Tensor y = norm->forward(linear->forward(x)).relu();
    return {y, {y.sum(), y.t()}};
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  int runs = 0;
};
TORCH_MODULE(Net);

TEST(CallCache, ModulesReturnTheirStructures) {
  const CacheFolder folder;
  const at::Tensor x = torch::randn({6, 4});
  std::vector<std::vector<at::Tensor>> seen;
  for (int run = 0; run < 3; ++run) {
    torch::manual_seed(1);
    Net net;
    std::vector<at::Tensor> got;
    const auto record = [&](const std::tuple<at::Tensor, std::vector<at::Tensor>>& result) {
      const auto& [y, others] = result;
      others.at(0).backward();
      got = {y, others.at(0), others.at(1), net->linear->weight.grad(), net->norm->running_mean};
    };
    if (run == 0) {
      record(net->forward(x));
    } else {
      const auto fast = compile(net, folder.options());
      record(fast->forward(x));
      EXPECT_EQ(net->runs > 0, run == 1);
      fast->eval();
      fast->forward(x);
      EXPECT_EQ(net->runs > 0, run == 1);
    }
    for (at::Tensor& tensor : got) tensor = tensor.detach().clone();
    seen.push_back(std::move(got));
  }
  expect_equal(seen[1], seen[0]);
  expect_equal(seen[2], seen[0]);
}

// ---- artifacts ----

TEST(Artifact, CompilesNothing) {
  const CacheFolder folder;
  const std::vector<ArtifactField> configuration{{"model.width", "4"}, {"layout.stages", "1"}};
  const at::Tensor x = torch::randn({6, 4});
  const auto run = [&](Net& net, const std::shared_ptr<Artifact>& artifact, const at::Tensor& input,
                       const std::string& name = "stage 0") {
    CompileOptions options;
    options.cache = {.name = name, .artifact = artifact};
    return std::get<0>(compile(net, options)->forward(input));
  };
  torch::manual_seed(1);
  Net net;
  const at::Tensor eager = std::get<0>(net->forward(x));
  {
    const auto artifact = Artifact::create(folder.path / "a", configuration);
    EXPECT_TRUE(artifact->is_writable());
    run(net, artifact, x);
    run(net, artifact, x, "stage 1");
    artifact->finish();
    EXPECT_EQ(artifact->calls(), (std::vector<std::string>{"stage 0", "stage 1"}));
  }
  const auto artifact = Artifact::open(folder.path / "a", configuration);
  net->runs = 0;
  EXPECT_TRUE(at::equal(run(net, artifact, x), eager));
  EXPECT_EQ(net->runs, 0);
  const std::string missing = message_of<StateError>([&] { run(net, artifact, torch::randn({7, 4})); });
  EXPECT_TRUE(has_text(missing, "stage 0 has no call like this one")) << missing;
  EXPECT_TRUE(has_text(missing, "args[0] has sizes [7, 4], in the capture [6, 4]")) << missing;
  EXPECT_TRUE(has_text(message_of<StateError>([&] { run(net, artifact, x, "stage 2"); }),
                       "it has none of this module"));
  EXPECT_EQ(net->runs, 0);
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] {
                         Artifact::open(folder.path / "a", {{"model.width", "8"}, {"layout.stages", "1"}});
                       }),
                       "it is stale: model.width is \"8\", in the artifact \"4\""));
  for (const char* field : {"penstock", "format", "libtorch", "device", "compiler", "program"})
    EXPECT_TRUE(
        std::any_of(artifact->fields().begin(), artifact->fields().end(),
                    [&](const ArtifactField& each) { return each.name == field && !each.value.empty(); }))
        << field;
  // Each of Penstock's fields, changed in the manifest.
  const std::string manifest = read_file(folder.path / "a" / "manifest.json", "test", "");
  for (const ArtifactField& field : artifact->fields()) {
    std::string changed = manifest;
    const std::string value = "\"value\": \"" + field.value + "\"";
    const std::size_t name = changed.find("\"name\": \"" + field.name + "\"");
    ASSERT_NE(name, std::string::npos) << manifest;
    const std::size_t end = changed.find(value, name);
    ASSERT_NE(end, std::string::npos);
    changed.insert(end + value.size() - 1, "x");
    std::ofstream(folder.path / "a" / "manifest.json") << changed;
    EXPECT_TRUE(has_text(message_of<ConfigError>([&] { Artifact::open(folder.path / "a", configuration); }),
                         "it is stale: " + field.name + " is"))
        << field.name;
  }
}

// ---- several processes ----

// A process of the test below: run by it with the variables it needs.
TEST(CacheWorker, DISABLED_Run) {
  const char* folder = std::getenv("PENSTOCK_TEST_CACHE_FOLDER");
  ASSERT_NE(folder, nullptr) << "run by CallCache.EightProcessesAtOnce";
  const std::string log = std::getenv("PENSTOCK_TEST_CACHE_LOG");
  const bool dies = std::getenv("PENSTOCK_TEST_CACHE_DIES") != nullptr;
  torch::set_num_threads(1);
  const Counted function;
  const Function slow = [&](const Values& in) {
    if (*function.runs == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      if (dies) ::kill(::getpid(), SIGKILL);
    }
    return function(in);
  };
  Compiled compiled(slow, options_in(folder));
  expect_equal(outcome([&](const Values& in) { return compiled(in); }, 5), outcome(Counted(), 5));
  std::ofstream(log + "." + std::to_string(::getpid())) << (*function.runs > 0 ? "captured" : "loaded");
}

TEST(CallCache, EightProcessesAtOnce) {
  const CacheFolder folder;
  const fs::path cache = folder.path / "cache";
  std::vector<pid_t> processes;
  for (int i = 0; i < 8; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("PENSTOCK_TEST_CACHE_FOLDER", cache.c_str(), 1);
      ::setenv("PENSTOCK_TEST_CACHE_LOG", (folder.path / "log").c_str(), 1);
      ::setenv("OMP_NUM_THREADS", "1", 1);
      if (i % 4 == 1) ::setenv("PENSTOCK_TEST_CACHE_DIES", "1", 1);
      if (::freopen((folder.path / ("out" + std::to_string(i))).c_str(), "w", stdout) == nullptr) ::_exit(8);
      ::execl("/proc/self/exe", "worker", "--gtest_also_run_disabled_tests", "--gtest_filter=CacheWorker.*",
              nullptr);
      ::_exit(9);
    }
    processes.push_back(child);
  }
  int killed = 0;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    int status = 0;
    ASSERT_EQ(::waitpid(processes[i], &status, 0), processes[i]);
    const bool died = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    killed += died ? 1 : 0;
    EXPECT_TRUE(died ? i % 4 == 1 : status == 0) << i << ": " << status;
  }
  int captured = 0, loaded = 0;
  for (const auto& item : fs::directory_iterator(folder.path))
    if (item.path().filename().string().starts_with("log."))
      ++(read_file(item.path(), "test", "") == "captured" ? captured : loaded);
  EXPECT_EQ(captured, 1);
  EXPECT_EQ(captured + loaded + killed, 8);
}

}  // namespace compile_cache_test
}  // namespace penstock::graph
