// Compilers of a user: how options choose them, and what they are told.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph_compiler.h"
#include "tests/graph/registered_wrappers.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace compiler_choice_test {

using test::has_text;
using test::message_of;

// What a compiler was told.
struct Told {
  std::string role;
  std::vector<std::string> static_inputs, donated_inputs;  // names of inputs
  std::vector<std::string> inputs;                         // names of all
};

// Remembers what it was told, and leaves the work to the executor.
class Listening final : public GraphCompiler {
 public:
  explicit Listening(std::string name) : name_(std::move(name)) {}
  std::string_view name() const override { return name_; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                               const CompileRequest& request) const override {
    Told told{std::string(to_text(request.role)), {}, {}, {}};
    for (const Placeholder& input : graph.inputs) told.inputs.push_back(input.name);
    for (const std::size_t input : request.static_inputs)
      told.static_inputs.push_back(graph.inputs.at(input).name);
    for (const std::size_t input : request.donated_inputs)
      told.donated_inputs.push_back(graph.inputs.at(input).name);
    const std::lock_guard lock(mutex_);
    told_.push_back(std::move(told));
    return graph_compiler(kExecutorCompiler)->compile(graph, request);
  }
  std::vector<Told> take() const {
    const std::lock_guard lock(mutex_);
    return std::exchange(told_, {});
  }

 private:
  std::string name_;
  mutable std::mutex mutex_;
  mutable std::vector<Told> told_;
};

const Listening& listening(const std::string& name) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const std::vector<std::string> names = graph_compiler_names();
  if (std::find(names.begin(), names.end(), name) == names.end())
    register_graph_compiler(std::make_shared<Listening>(name));
  return dynamic_cast<const Listening&>(*graph_compiler(name));
}

torch::nn::Sequential net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::GELU(), torch::nn::Linear(8, 2));
}

std::vector<std::string> roles(const std::vector<Told>& all) {
  std::vector<std::string> roles;
  for (const Told& told : all) roles.push_back(told.role);
  return roles;
}

using Names = std::vector<std::string>;

TEST(CompilerChoice, IsByNameForEachRole) {
  const Listening &one = listening("listening 1"), &two = listening("listening 2"),
                  &three = listening("listening 3");
  const at::Tensor x = torch::randn({3, 4});
  const auto train = [&](auto& module) { module->forward(x).sum().backward(); };
  {
    auto fast = compile(net(), {.compiler = "listening 1"});
    train(fast);
    const at::NoGradGuard no_grad;
    fast->forward(x);
    EXPECT_EQ(roles(one.take()), (Names{"forward", "backward", "inference"}));
  }
  auto fast = compile(
      net(),
      {.compiler = "listening 1", .backward_compiler = "listening 2", .inference_compiler = "listening 3"});
  train(fast);
  const at::NoGradGuard no_grad;
  fast->forward(x);
  EXPECT_EQ(roles(one.take()), Names{"forward"});
  EXPECT_EQ(roles(two.take()), Names{"backward"});
  EXPECT_EQ(roles(three.take()), Names{"inference"});
}

TEST(CompilerChoice, OfAnUnknownNameIsAnErrorThatSuggestsTheNearest) {
  const auto message = [](const CompileOptions& options) {
    return message_of<ValueError>([&] { compile(net(), options); });
  };
  EXPECT_TRUE(has_text(message({.compiler = "excutor"}), "did you mean 'executor'"));
  EXPECT_TRUE(has_text(message({.backward_compiler = "zzzzzzzzz"}), "one of executor"));
  EXPECT_TRUE(has_text(message({.inference_compiler = "zzzzzzzzz"}), "\"zzzzzzzzz\""));
  EXPECT_TRUE(
      has_text(message_of<ValueError>([] { register_graph_compiler(std::make_shared<Listening>("")); }),
               "without a name"));
}

TEST(CompilerChoice, CompilersAreToldWhichInputsStayAndWhichMayBeOverwritten) {
  const Listening& compiler = listening("listening 4");
  torch::nn::Sequential plain = net();
  auto fast = compile(plain, {.compiler = "listening 4"});
  const at::Tensor x = torch::randn({3, 4});
  fast->forward(x).sum().backward();
  const std::vector<Told> told = compiler.take();
  ASSERT_EQ(roles(told), (Names{"forward", "backward"}));
  EXPECT_EQ(told[0].static_inputs, (Names{"0.weight", "0.bias", "2.weight", "2.bias"}));
  EXPECT_TRUE(told[0].donated_inputs.empty());
  EXPECT_LE(told[1].static_inputs.size() + told[1].donated_inputs.size(), told[1].inputs.size() - 2)
      << "neither x nor the tangent";
  EXPECT_FALSE(told[1].donated_inputs.empty());
}

// Inputs of the function are tensors, those of the graph the tensors inside: here 1 is b of the function, and
// w.b of the graph.
TEST(CompilerChoice, CompilersAreToldOfTheTensorsInsideSubclasses) {
  test::register_sample_kinds();
  const Listening& compiler = listening("listening 5");
  const auto numbers = [](int seed) { return torch::linspace(seed, seed + 1, 12).view({3, 4}).contiguous(); };
  // The product needs w and b in backward, and b is written.
  const Function function = [](const Values& in) -> Values {
    const at::Tensor w = in[0].toTensor(), b = in[1].toTensor(), x = in[2].toTensor();
    const at::Tensor y = x.sin() * w * b.sin() * b.cos();
    b.add_(1);
    return {y};
  };
  const auto inputs = [&] {
    return Values{sample::Two::make(numbers(1), numbers(2)).set_requires_grad(true), numbers(3),
                  numbers(4).requires_grad_(true)};
  };
  const CompiledCall call(
      partition(capture_function(function, inputs(), {.found = 2, .names = {"w", "b", "x"}}),
                Partitioner::MinCut),
      CompilerChoice(graph_compiler("listening 5")));
  const std::vector<Told> told = compiler.take();
  ASSERT_EQ(roles(told), (Names{"forward", "backward"}));
  EXPECT_EQ(told[0].inputs, (Names{"w.a", "w.b", "b", "x"}));
  EXPECT_EQ(told[0].static_inputs, (Names{"w.a", "w.b", "b"}));
  // What backward calls an input of forward that is saved.
  const auto saved = [&](std::size_t input) {
    return "saved_" + std::to_string(index_of(call.capture().joint.graph.inputs.at(input).value));
  };
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_EQ(std::count(told[1].inputs.begin(), told[1].inputs.end(), saved(i)), 1) << i;
  // b is saved as a copy, because it is written.
  Names names = told[1].static_inputs;
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (Names{saved(0), saved(1)}));
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_EQ(std::count(told[1].donated_inputs.begin(), told[1].donated_inputs.end(), saved(i)), 0) << i;
  const Values ours = inputs(), plain = inputs();
  const auto sum_of = [](const Values& results) { return results[0].toTensor().sum(); };
  sum_of(call.run(ours)).backward();
  sum_of(function(plain)).backward();
  for (const std::size_t i : {0u, 2u})
    EXPECT_TRUE(test::same_tensor(ours[i].toTensor().grad(), plain[i].toTensor().grad())) << i;
  EXPECT_TRUE(at::equal(ours[1].toTensor(), plain[1].toTensor()));
}

// Donated tensors are overwritten by the executor, but not if another backward needs them.
TEST(CompilerChoice, ARetainedGraphKeepsWhatItSaved) {
  torch::nn::Sequential plain = net();
  auto fast = compile(plain);
  const at::Tensor x = torch::randn({3, 4});
  for (int step = 0; step < 3; ++step) {
    const auto gradients = [&](const at::Tensor& result, bool retain) {
      return torch::autograd::grad({result.square().sum()}, plain->parameters(), {}, retain);
    };
    const auto expected = gradients(plain->forward(x), false);
    const at::Tensor result = fast->forward(x);
    for (const bool retain : {true, true, false}) {
      const at::Tensor loss = result.square().sum();
      const auto actual = torch::autograd::grad({loss}, plain->parameters(), {}, retain);
      for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
    }
  }
}

}  // namespace compiler_choice_test
}  // namespace penstock::graph
