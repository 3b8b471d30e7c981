// The stages from a function to a compiled call, each used alone, and wrappers and compilers of a user.
#include "penstock/graph/wrap/call_wrapper.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/run/compiled_call.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace call_wrapper_test {

using test::has_text;
using test::message_of;

// Writes its first input and adds the second.
Values write_and_add(const Values& in) {
  in[0].toTensor().mul_(2);
  return {in[0].toTensor() + in[1].toTensor()};
}

CompiledCall compiled_with(const Function& function, const Values& inputs,
                           const CallWrappers& wrappers = default_call_wrappers()) {
  return {partition(capture_function(function, inputs, {}, wrappers), Partitioner::Default),
          graph_compiler(kExecutorCompiler)};
}

using Names = std::vector<std::string>;

TEST(CallWrappers, AreInUseOnlyWhereNeeded) {
  const at::Tensor x = torch::randn({4}), y = torch::randn({4});
  EXPECT_EQ(compiled_with(write_and_add, {x, y}).wrappers(), Names{"epilogue"});
  EXPECT_EQ(compiled_with(write_and_add, {x, x}).wrappers(), (Names{"duplicate inputs", "epilogue"}));
  EXPECT_EQ(compiled_with(write_and_add, {x.slice(0, 0, 3), x.slice(0, 1, 4)}).wrappers(),
            (Names{"synthetic bases", "epilogue"}));
  const at::Tensor z = torch::randn({4}, at::kComplexFloat);
  EXPECT_EQ(compiled_with(write_and_add, {z, z.clone().conj()}).wrappers(),
            (Names{"lazy inputs", "epilogue"}));
}

// All of them at once: the first two are one tensor, which overlaps the third; the last is a conjugate.
TEST(CallWrappers, Compose) {
  const auto function = [](const Values& in) -> Values {
    in[0].toTensor().mul_(3);
    return {in[1].toTensor() + in[2].toTensor(), in[0], in[2].toTensor().view({-1}), in[3].toTensor() * 2};
  };
  const auto inputs = [] {
    torch::manual_seed(7);
    const at::Tensor memory = torch::randn({5}, at::kComplexFloat);
    const at::Tensor a = memory.slice(0, 0, 4);
    return Values{a, a, memory.slice(0, 1, 5), torch::randn({3}, at::kComplexFloat).conj()};
  };
  const Values expected_inputs = inputs(), ours_inputs = inputs();
  const CompiledCall call = compiled_with(function, inputs());
  EXPECT_EQ(call.wrappers(), (Names{"duplicate inputs", "synthetic bases", "lazy inputs", "epilogue"}));
  const Values expected = function(expected_inputs), ours = call.run(ours_inputs);
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(ours[i].toTensor(), expected[i].toTensor())) << i;
  for (std::size_t i = 0; i < expected_inputs.size(); ++i)
    EXPECT_TRUE(at::equal(ours_inputs[i].toTensor(), expected_inputs[i].toTensor())) << i;
  EXPECT_TRUE(ours[1].toTensor().is_same(ours_inputs[0].toTensor()));
  EXPECT_TRUE(ours[2].toTensor().is_alias_of(ours_inputs[2].toTensor()));
}

TEST(CallWrappers, MessagesNameInputsOfTheOriginalCall) {
  const at::Tensor memory = torch::randn({5}), other = torch::randn({2});
  const at::Tensor written = memory.slice(0, 0, 4);
  // The second is a duplicate; what overlaps is input 2, which was input 1 without it.
  const std::string message = message_of<NotImplemented>([&] {
    compiled_with(
        [](const Values& in) -> Values {
          in[0].toTensor().mul_(2);
          in[2].toTensor().t_();
          return {in[2].toTensor() + 1};
        },
        {written, written, memory.slice(0, 1, 5).view({2, 2})});
  });
  EXPECT_TRUE(has_text(message, "input 2 overlaps other inputs"));
}

// A user's wrapper: the function computes in double, whatever the dtype of its first input.
class ComputeInDouble final : public CallWrapper {
 public:
  class Applied final : public AppliedWrapper {
   public:
    std::string_view name() const override { return "compute in double"; }
    Call around(Call inner, const ViewAndMutationMeta&) const override {
      return [inner = std::move(inner)](Values inputs, const CallSizes& sizes) {
        inputs[0] = inputs[0].toTensor().to(at::kDouble);
        return inner(inputs, sizes);
      };
    }
    bool same_but_for_sizes(const AppliedWrapper& other) const override {
      return dynamic_cast<const Applied*>(&other) != nullptr;
    }
  };
  std::string_view name() const override { return "compute in double"; }
  std::shared_ptr<const AppliedWrapper> apply(FunctionForm& form) const override {
    if (form.inputs()[0].toTensor().scalar_type() == at::kDouble) return nullptr;
    Values inputs = form.inputs();
    inputs[0] = inputs[0].toTensor().to(at::kDouble);
    form.replace(form.function(), std::move(inputs), form.convention(), {0});
    return std::make_shared<const Applied>();
  }
};

TEST(CallWrappers, OfAUserAreApplied) {
  CallWrappers wrappers = default_call_wrappers();
  wrappers.insert(wrappers.begin(), std::make_shared<ComputeInDouble>());
  const Function function = [](const Values& in) -> Values { return {in[0].toTensor().exp().sum()}; };
  const at::Tensor x = torch::randn({10}).set_requires_grad(true);
  const CompiledCall call = compiled_with(function, {x}, wrappers);
  EXPECT_EQ(call.wrappers(), (Names{"compute in double", "epilogue"}));
  const at::Tensor sum = call.run({x})[0].toTensor();
  EXPECT_EQ(sum.scalar_type(), at::kDouble);
  EXPECT_TRUE(at::equal(sum, x.to(at::kDouble).exp().sum()));
  sum.backward();
  EXPECT_TRUE(at::equal(x.grad(), x.to(at::kDouble).exp().to(at::kFloat)));
  EXPECT_EQ(compiled_with(function, {x.detach().to(at::kDouble)}, wrappers).wrappers(), Names{"epilogue"});
}

TEST(FunctionCapture, ItsGraphCanBeReplaced) {
  const Function function = [](const Values& in) -> Values { return {in[0].toTensor().sin()}; };
  const at::Tensor x = torch::randn({6});
  FunctionCapture capture = capture_function(function, {x});
  ASSERT_EQ(capture.joint.graph.nodes.size(), 1u);
  capture.joint.graph.nodes[0].op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::cos", "");
  const CompiledCall call(partition(std::move(capture), Partitioner::Default),
                          graph_compiler(kExecutorCompiler));
  EXPECT_TRUE(at::equal(call.run({x})[0].toTensor(), x.cos()));
}

// No stage changes what it gets: the inputs of a function that changes theirs are untouched, and one capture
// can be partitioned and compiled at any time, and several times.
TEST(FunctionCapture, StagesLeaveWhatTheyAreGivenAlone) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor(), w = in[1].toTensor();
    x.t_();
    x.mul_(2);
    return {x.mm(w).tanh()};
  };
  torch::manual_seed(3);
  const at::Tensor x = torch::randn({3, 4}), before = x.clone(), w = torch::randn({3, 2}).requires_grad_();
  const FunctionCapture capture = capture_function(function, {x, w});
  EXPECT_EQ(x.sizes(), before.sizes());
  EXPECT_TRUE(at::equal(x, before));
  const std::string text = to_text(capture.joint.graph);
  const ViewAndMutationMeta meta = capture.user_meta();
  at::Tensor plain_x = before.clone();
  const at::Tensor expected = function({plain_x, w})[0].toTensor();
  expected.sum().backward();
  const at::Tensor gradient = w.grad().clone();
  for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut, Partitioner::Default}) {
    const CompiledCall call(partition(FunctionCapture(capture), partitioner),
                            graph_compiler(kExecutorCompiler));
    EXPECT_TRUE(at::equal(x, before));
    w.mutable_grad() = at::Tensor();
    const at::Tensor input = before.clone(), result = call.run({input, w})[0].toTensor();
    result.sum().backward();
    EXPECT_TRUE(at::equal(result, expected));
    EXPECT_TRUE(input.sizes() == plain_x.sizes() && at::equal(input, plain_x));
    EXPECT_TRUE(at::equal(w.grad(), gradient));
    EXPECT_EQ(to_text(capture.joint.graph), text);
    EXPECT_TRUE(capture.user_meta().same_in_every_field(meta));
  }
}

// A user's compiler: runs graphs like the built-in one, and counts what it was asked for.
class CountingCompiler final : public GraphCompiler {
 public:
  std::string_view name() const override { return "counting"; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                               const CompileRequest& request) const override {
    asked.emplace_back(to_text(request.role));
    return std::make_shared<const Executor>(graph);
  }
  mutable std::vector<std::string> asked;
};

TEST(GraphCompilers, AreFoundByName) {
  const auto counting = std::make_shared<CountingCompiler>();
  register_graph_compiler(counting);
  EXPECT_EQ(graph_compiler("counting"), counting);
  const Names names = graph_compiler_names();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  for (const char* name : {"counting", "executor"})
    EXPECT_TRUE(std::binary_search(names.begin(), names.end(), name)) << name;
  EXPECT_TRUE(has_text(message_of<ValueError>([] { register_graph_compiler(nullptr); }), "got no compiler"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { register_graph_compiler(counting); }),
                       "already a compiler named 'counting'"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { graph_compiler("excutor"); }), "one of counting"));

  const Function function = [](const Values& in) -> Values { return {in[0].toTensor().square().sum()}; };
  const at::Tensor x = torch::randn({3}).set_requires_grad(true);
  const CompiledCall training(partition(capture_function(function, {x}), Partitioner::Default),
                              CompilerChoice(counting));
  EXPECT_EQ(counting->asked, (Names{"forward", "backward"}));
  training.run({x})[0].toTensor().backward();
  EXPECT_TRUE(at::equal(x.grad(), 2 * x.detach()));
  counting->asked.clear();
  const CompiledCall inference(partition(capture_function(function, {x.detach()}), Partitioner::Default),
                               CompilerChoice(counting));
  EXPECT_EQ(counting->asked, Names{"inference"});
}

}  // namespace call_wrapper_test
}  // namespace penstock::graph
