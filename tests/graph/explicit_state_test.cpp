// States outside of a graph as its inputs and outputs: of random generators, and tokens of side effects. Bit
// for bit against the plain function, which draws from the same generators, calls and draws of others
// between.
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/rewrite.h"
#include "penstock/graph/ir/state_operator.h"
#include "penstock/graph/run/capture_codec.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph/tools/graph_file.h"
#include "penstock/graph/tools/signature.h"
#include "penstock/graph/wrap/effect_tokens.h"
#include "penstock/graph/wrap/random_numbers.h"
#include "penstock/graph/wrap/state_chains.h"
#include "penstock/recompute.h"
#include "penstock/torch/random/generator_state.h"
#include "tests/graph/cache_folder.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/registered_wrappers.h"
#include "tests/has_text.h"
#include "tests/throws.h"

// ---- operators with side effects ----

namespace penstock::graph {
namespace explicit_state_test {

using Tags = std::vector<std::int64_t>;
Tags& seen() {
  static Tags tags;
  return tags;
}

void note_on_cpu(const at::Tensor&, std::int64_t tag) { seen().push_back(tag); }
at::Tensor send_on_cpu(const at::Tensor& x, std::int64_t tag) {
  seen().push_back(tag);
  return x + 0;
}
void note_in_shape(const at::Tensor&, std::int64_t) {}
at::Tensor send_in_shape(const at::Tensor& x, std::int64_t) { return at::empty_like(x); }

TORCH_LIBRARY_FRAGMENT(penstock_state_test, library) {
  library.def("note(Tensor x, int tag) -> ()");
  library.def("send(Tensor x, int tag) -> Tensor");
  library.def("log(Tensor x, int tag) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock_state_test, CPU, library) {
  library.impl("note", note_on_cpu);
  library.impl("send", send_on_cpu);
  library.impl("log", send_on_cpu);
}
TORCH_LIBRARY_IMPL(penstock_state_test, Meta, library) {
  library.impl("note", note_in_shape);
  library.impl("send", send_in_shape);
  library.impl("log", send_in_shape);
}

// The operators have no derivatives: for tensors without gradients.
template <class Result>
Result call(const char* name, const at::Tensor& x, std::int64_t tag) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Result(const at::Tensor&, std::int64_t)>()
      .call(x, tag);
}
void note(const at::Tensor& x, std::int64_t tag) { call<void>("penstock_state_test::note", x, tag); }
at::Tensor send(const at::Tensor& x, std::int64_t tag) {
  return call<at::Tensor>("penstock_state_test::send", x, tag);
}
at::Tensor log(const at::Tensor& x, std::int64_t tag) {
  return call<at::Tensor>("penstock_state_test::log", x, tag);
}

void register_effects() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_side_effect("penstock_state_test::send");
    register_side_effect("penstock_state_test::log", "log");
  });
}

// ---- states, and the plain function ----

using sample::Boxed;
using test::has_text;
using test::message_of;
using Names = std::vector<std::string>;

at::Tensor state_now() { return generator_state(default_generator(at::kCPU)); }
void set_state(const at::Tensor& state) { set_generator_state(default_generator(at::kCPU), state); }

// Draws in its backward.
struct Noisy : torch::autograd::Function<Noisy> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * torch::rand_like(gradients[0])};
  }
};

// Also has side effects there.
struct Talking : torch::autograd::Function<Talking> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.sin(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    note(gradients[0], 5);
    send(gradients[0], 6);
    return {gradients[0] * send(gradients[0], 7)};
  }
};

at::Tensor random_step(unsigned which, const at::Tensor& x, const at::Tensor& other) {
  const at::Tensor plain = x.detach();
  switch (which) {
    case 0:
      return torch::dropout(x, 0.3, true);
    case 1:
      return x * torch::rand_like(x);
    case 2:
      return x + torch::randn_like(x);
    case 3:
      return x * torch::bernoulli(torch::sigmoid(plain));
    case 4:
      return x * torch::empty_like(plain).uniform_(-1, 1);
    case 5:
      return x + at::normal(plain, 0.5);
    case 6:
      return x.index_select(0, torch::randperm(x.size(0)));
    case 7:
      return x + torch::empty_like(plain).exponential_(2.);
    case 8:
      return x * torch::randint(0, 5, x.sizes()).to(at::kFloat);
    case 9:
      return Noisy::apply(x);
    case 10:
      return x + torch::multinomial(plain.flatten().softmax(0), x.numel(), true).view(x.sizes());
    case 11:
      return x * torch::rand({1}) + torch::randn(x.sizes());
    case 12:
      return recompute([](const Tensors& in) { return torch::dropout(in[0].sin(), 0.5, true).cos(); }, {x});
    case 13:
      return x + at::normal(0.5, 2., x.sizes());
    case 14:
      return Noisy::apply(
          recompute([](const Tensors& in) { return in[0].tanh() * torch::rand_like(in[0]); }, {x}));
    case 15:
      return torch::feature_dropout(x, 0.5, true);
    case 16:
      return (x * torch::rand(x.sizes())).sin();
    case 17:
      return (x * 0.5).sin();
    default:
      return x * other;
  }
}

// Four to nine steps over three inputs, most of which draw; the last input, which needs no gradient, is
// written now and then.
at::Tensor random_draws(unsigned seed, const Tensors& in) {
  std::mt19937 random(seed);
  Tensors pool(in.begin(), in.begin() + 2);
  for (unsigned left = 4 + random() % 6; left > 0; --left) {
    const at::Tensor x = pool[random() % pool.size()], other = pool[random() % pool.size()];
    pool.push_back(random_step(static_cast<unsigned>(random() % 19), x, other));
    if (random() % 5 == 0) in[2].bernoulli_(0.5);
    if (random() % 4 == 0) pool.push_back(pool.back() + in[2]);
  }
  return pool.back().cos() + pool[pool.size() / 2];
}

Function program(unsigned seed) {
  return [seed](const Values& in) -> Values {
    return {random_draws(seed, {in[0].toTensor(), in[1].toTensor(), in[2].toTensor()})};
  };
}

// Two calls with different inputs, their backwards in another order, and draws of others between all of them.
// Everything that was computed and drawn, and the state in the end.
Tensors outcome(const std::function<Values(const Values&)>& call, unsigned seed, std::int64_t rows = 4) {
  auto generator = at::detail::createCPUGenerator(seed);
  torch::manual_seed(1000 + seed);
  Tensors all, results, leaves;
  for (int round = 0; round < 3; ++round) {
    const at::Tensor a = at::randn({rows, 3}, generator).set_requires_grad(true),
                     b = at::randn({rows, 3}, generator).set_requires_grad(seed % 3 != 0),
                     c = at::randn({rows, 3}, generator);
    results.push_back(call({a, b, c})[0].toTensor());
    all.push_back(results.back().detach());
    all.push_back(c);
    all.push_back(torch::rand({2}));
    leaves.insert(leaves.end(), {a, b});
  }
  for (const std::size_t which : {1U, 0U, 2U}) {
    if (results[which].requires_grad())
      results[which].backward(torch::linspace(-1, 1, rows * 3).view({rows, 3}));
    all.push_back(torch::randn({2}));
  }
  for (const at::Tensor& leaf : leaves)
    all.push_back(leaf.grad().defined() ? leaf.grad() : torch::zeros({0}));
  all.push_back(state_now());
  return all;
}

void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << "number " << i << " of " << actual.size();
}

std::size_t nodes_named(const Graph& graph, const std::string& name) {
  return static_cast<std::size_t>(
      std::count_if(graph.nodes.begin(), graph.nodes.end(),
                    [&](const Node& node) { return node.op.operator_name().name == name; }));
}
std::size_t count_random(const Graph& graph) {
  return static_cast<std::size_t>(std::count_if(graph.nodes.begin(), graph.nodes.end(), is_random));
}
std::size_t count_explicit(const Graph& graph) {
  return static_cast<std::size_t>(std::count_if(graph.nodes.begin(), graph.nodes.end(), [](const Node& node) {
    const auto inside = operator_inside(node.op);
    return inside && inside->kind == StateKind::Generator;
  }));
}

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::atoi(asked)) : 60;
}

// ---- random numbers ----

TEST(GeneratorStates, AreValues) {
  torch::manual_seed(3);
  const at::Tensor before = state_now();
  EXPECT_EQ(before.scalar_type(), at::kByte);
  EXPECT_EQ(before.numel(), generator_state_form(at::kCPU).numel);
  const at::Tensor a = torch::randn({5}), between = state_now();
  EXPECT_FALSE(at::equal(before, between));
  set_state(before);
  EXPECT_TRUE(at::equal(torch::randn({5}), a));
  EXPECT_TRUE(at::equal(state_now(), between));
  {
    const GeneratorStateScope scope(default_generator(at::kCPU), before);
    EXPECT_TRUE(at::equal(torch::randn({5}), a));
    EXPECT_TRUE(at::equal(scope.state(), between));
    torch::rand({1});
  }
  EXPECT_TRUE(at::equal(state_now(), between));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { set_state(before.slice(0, 1)); }),
                       "the state of a generator of cpu: got"));
  EXPECT_TRUE(has_text(message_of<NotImplemented>([] { default_generator(at::kMeta); }), "meta"));
}

TEST(StateOperators, AreFunctionsOfTheirArguments) {
  const auto bernoulli = c10::Dispatcher::singleton().findSchemaOrThrow("aten::bernoulli", "p");
  const c10::OperatorHandle op = operator_with_state(bernoulli, StateKind::Generator);
  EXPECT_EQ(op.operator_name().name, "penstock_random::aten__bernoulli");
  EXPECT_EQ(operator_inside(op)->op.operator_name(), bernoulli.operator_name());
  EXPECT_FALSE(operator_inside(bernoulli));
  torch::manual_seed(8);
  const at::Tensor state = state_now(), expected = at::bernoulli(torch::zeros({20}), 0.4),
                   after = state_now();
  torch::manual_seed(9);
  const at::Tensor others = state_now();
  for (int round = 0; round < 2; ++round) {
    Stack stack{torch::zeros({20}), 0.4, c10::IValue(), state, at::Device(at::kCPU)};
    op.callBoxed(stack);
    ASSERT_EQ(stack.size(), 2u);
    EXPECT_TRUE(at::equal(stack[0].toTensor(), expected));
    EXPECT_TRUE(at::equal(stack[1].toTensor(), after));
    EXPECT_TRUE(at::equal(state_now(), others));
  }
  // By name, as in files: registered when it is first asked for.
  const auto found = find_operator("penstock_random::aten___standard_gamma", "");
  ASSERT_TRUE(found);
  EXPECT_EQ(operator_inside(*found)->op.operator_name().name, "aten::_standard_gamma");
  EXPECT_FALSE(find_operator("penstock_random::aten__no_such_operator", ""));
  EXPECT_FALSE(find_operator("penstock_random::aten", ""));
  EXPECT_TRUE(find_operator("aten::mm", ""));
  const auto in_place = c10::Dispatcher::singleton().findSchemaOrThrow("aten::bernoulli_", "float");
  EXPECT_TRUE(
      has_text(message_of<NotImplemented>([&] { operator_with_state(in_place, StateKind::Generator); }),
               "aten::bernoulli_.float writes its arguments"));
}

struct Way {
  const char* name;
  CompileOptions options;
};
std::vector<Way> ways() {
  return {{"not explicit", {}},
          {"explicit", {.explicit_random_states = true}},
          {"with tokens", {.explicit_random_states = true, .effect_tokens = true}},
          {"backward later", {.compile_backward = CompileBackward::FirstUse, .explicit_random_states = true}},
          {"minimum cut", {.partitioner = Partitioner::MinCut, .explicit_random_states = true}},
          {"minimum cut, not explicit", {.partitioner = Partitioner::MinCut}},
          {"writes in the graph", {.keep_input_mutations = true, .explicit_random_states = true}}};
}

TEST(RandomDraws, ProgramsEqualThePlainRun) {
  std::size_t explicit_nodes = 0, backward_states = 0, recomputed = 0;
  for (unsigned seed = 0; seed < programs(); ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    const Function function = program(seed);
    // Large ones are drawn again by a minimum cut: they have more bytes than a state.
    const std::int64_t rows = seed % 4 == 0 ? 2000 : 4;
    const Tensors expected = outcome(function, seed, rows);
    for (const Way& way : ways()) {
      SCOPED_TRACE(way.name);
      Compiled compiled(function, way.options);
      expect_equal(outcome([&](const Values& in) { return compiled(in); }, seed, rows), expected);
      EXPECT_EQ(compiled.captures(), 1u);
      const Partition& halves = compiled.partition(0);
      if (!way.options.explicit_random_states) continue;
      EXPECT_EQ(count_random(compiled.joint(0).graph), 0u);
      explicit_nodes += count_explicit(compiled.joint(0).graph);
      backward_states += compiled.meta(0).backward_random_states;
      recomputed += count_explicit(halves.forward) + count_explicit(halves.backward) >
                    count_explicit(compiled.joint(0).graph);
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(explicit_nodes, 0u);
  EXPECT_GT(backward_states, 0u);
  EXPECT_GT(recomputed, 0u);
}

TEST(RandomDraws, SurviveTheRoundTripThroughBytes) {
  for (unsigned seed = 0; seed < programs() / 4; ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    const Function function = program(seed);
    const Tensors expected = outcome(function, seed);
    for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
      std::unique_ptr<CompiledCall> loaded;
      const auto call = [&](const Values& in) {
        if (!loaded) {
          const at::Tensor state = state_now();
          const PartitionedCapture made =
              partition(with_explicit_states(capture_function(function, in), {true, true}), partitioner);
          const Bytes bytes = encode_capture(made);
          PartitionedCapture read = decode_capture(bytes);
          EXPECT_EQ(encode_capture(read), bytes);
          EXPECT_TRUE(read.capture.meta.same_in_every_field(made.capture.meta));
          EXPECT_EQ(forward_signature(read.capture.joint, read.halves),
                    forward_signature(made.capture.joint, made.halves));
          EXPECT_TRUE(at::equal(state_now(), state));  // capturing draws nothing
          loaded = std::make_unique<CompiledCall>(std::move(read), graph_compiler(kExecutorCompiler));
        }
        return loaded->run(in);
      };
      expect_equal(outcome(call, seed), expected);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

// What a graph computes depends on its inputs alone, and it leaves the generators of the process as they
// were.
TEST(ExplicitRandomStates, AGraphIsAFunctionOfItsInputs) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    return {Noisy::apply(torch::dropout(x, 0.5, true) + torch::randn_like(x))};
  };
  const at::Tensor x = torch::randn({30}).set_requires_grad(true), tangent = torch::ones({30});
  Compiled compiled(function, {.explicit_random_states = true});
  compiled({x});
  const JointGraph& joint = compiled.joint(0);
  const Partition& halves = compiled.partition(0);
  ASSERT_EQ(joint.states.size(), 2u);
  torch::manual_seed(21);
  const at::Tensor first = state_now();
  const at::Tensor y = function({x})[0].toTensor();
  const at::Tensor second = state_now();
  y.backward(tangent);
  const at::Tensor third = state_now();

  torch::manual_seed(22);
  const at::Tensor others = state_now();
  const auto run_forward = [&](const at::Tensor& state) {
    return Executor(halves.forward)({x.detach(), state});
  };
  const auto run_backward = [&](const std::vector<c10::IValue>& outputs, const at::Tensor& state) {
    Tensors inputs;
    for (std::size_t i = halves.first_saved_output(); i < outputs.size(); ++i)
      inputs.push_back(outputs[i].toTensor());
    inputs.push_back(tangent);
    inputs.push_back(state);
    return Executor(halves.backward)(inputs);
  };
  for (int round = 0; round < 2; ++round) {
    const auto outputs = run_forward(first);
    EXPECT_TRUE(at::equal(outputs[0].toTensor(), y));
    EXPECT_TRUE(at::equal(outputs[1].toTensor(), second));
    const auto gradients = run_backward(outputs, second);
    EXPECT_TRUE(at::equal(gradients[0].toTensor(), x.grad()));
    EXPECT_TRUE(at::equal(gradients[1].toTensor(), third));
    EXPECT_TRUE(at::equal(state_now(), others));
  }
  // Another state gives other numbers: the comparison above would notice a wrong offset.
  EXPECT_FALSE(at::equal(run_forward(second)[0].toTensor(), y));
  const auto outputs = run_forward(first);
  EXPECT_FALSE(at::equal(run_backward(outputs, first)[0].toTensor(), x.grad()));
  EXPECT_FALSE(at::equal(run_backward(outputs, third)[0].toTensor(), x.grad()));
}

TEST(ExplicitRandomStates, NamesInTheSignatures) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[1].toTensor();
    return {Noisy::apply(torch::dropout(x * in[0].toTensor(), 0.5, true))};
  };
  Compiled compiled(function, {.explicit_random_states = true}, Convention{0, {"w", "x"}});
  compiled({torch::ones({3}).set_requires_grad(true), torch::ones({2, 3})});
  const JointGraph& joint = compiled.joint(0);
  const ViewAndMutationMeta& meta = compiled.inner_meta(0);
  EXPECT_TRUE(meta.explicit_random_states);
  EXPECT_EQ(meta.random_states, Names{"cpu"});
  EXPECT_EQ(meta.backward_random_states, 1u);
  EXPECT_EQ(meta.forward_returns(), 1u);
  EXPECT_EQ(meta.forward_outputs(), 2u);
  Names inputs;
  for (const Placeholder& input : joint.graph.inputs) inputs.push_back(input.name);
  EXPECT_EQ(inputs, (Names{"w", "x", "tangents_1", "random_state[cpu]", "backward_random_state[cpu]"}));

  const GraphSignature signature = make_signature(joint, meta);
  EXPECT_EQ(signature.user_inputs, (std::vector{GraphInput("w"), GraphInput("x")}));
  EXPECT_EQ(signature.user_outputs.size(), 1u);
  EXPECT_EQ(signature.states.input_random_states, std::vector{GraphInput("random_state[cpu]")});
  EXPECT_EQ(signature.states.output_random_states.at(0).text,
            to_text(joint.graph.outputs[joint.first_state_output()]));
  ASSERT_TRUE(signature.backward);
  EXPECT_EQ(signature.backward->gradients_to_user_inputs.size(), 1u);
  EXPECT_EQ(signature.backward->states.input_random_states,
            std::vector{GraphInput("backward_random_state[cpu]")});
  EXPECT_EQ(signature.backward->states.output_random_states.at(0).text, to_text(joint.graph.outputs.back()));
  EXPECT_TRUE(has_text(to_text(signature), "random state random_state[cpu] -> %"));
  EXPECT_TRUE(has_text(to_text(signature), "backward random state backward_random_state[cpu] -> %"));

  const HalfSignature forward = forward_signature(joint, compiled.partition(0)),
                      backward = backward_signature(joint, compiled.partition(0));
  EXPECT_EQ(forward.inputs, (std::vector{GraphInput("w"), GraphInput("x"), GraphInput("random_state[cpu]")}));
  ASSERT_EQ(forward.outputs.size(), 2 + forward.saved.size());
  EXPECT_EQ(forward.states.output_random_states, std::vector{forward.outputs[1]});
  EXPECT_EQ(backward.inputs.back(), GraphInput("backward_random_state[cpu]"));
  EXPECT_EQ(backward.states.output_random_states, std::vector{backward.outputs.back()});

  const GraphFile file = decode_graph(encode_graph({joint, meta, {}, signature}));
  EXPECT_EQ(file.signature, signature);
  EXPECT_EQ(file.joint.states.size(), 2u);
  EXPECT_TRUE(file.meta.same_in_every_field(meta));
  EXPECT_EQ(to_text(file.joint.graph), to_text(joint.graph));

  // Metadata of a function that draws differs from that of one that may not draw explicitly.
  Compiled plain(function);
  plain({torch::ones({3}).set_requires_grad(true), torch::ones({2, 3})});
  EXPECT_NE(plain.inner_meta(0), meta);
  EXPECT_EQ(make_signature(plain.joint(0), plain.inner_meta(0)).states, StateSignature());
}

TEST(ExplicitRandomStates, OnlyWhatDrawsHasAState) {
  const Function function = [](const Values& in) -> Values { return {in[0].toTensor().sin()}; };
  const at::Tensor x = torch::randn({3}).set_requires_grad(true);
  Compiled compiled(function, {.explicit_random_states = true, .effect_tokens = true});
  compiled({x});
  EXPECT_TRUE(compiled.joint(0).states.empty());
  EXPECT_TRUE(compiled.meta(0).explicit_random_states);
  EXPECT_EQ(compiled.wrappers(0), Names{"epilogue"});
  // A part that is recomputed and draws nothing records nothing of its generators.
  Compiled again([](const Values& in) -> Values {
    return {recompute([](const Tensors& in) { return in[0].sin().exp(); }, {in[0].toTensor()})};
  });
  again({x})[0].toTensor().sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), x.detach().sin().exp() * x.detach().cos()));
  EXPECT_EQ(nodes_named(again.joint(0).graph, "penstock::generator_state"), 0u);
  EXPECT_EQ(nodes_named(again.joint(0).graph, "penstock::set_generator_state"), 0u);
}

// A minimum cut saves the state, not what was drawn, where that is smaller.
TEST(ExplicitRandomStates, AMinimumCutMayDrawAgain) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    const at::Tensor scaled = x * torch::rand({3, 9900});
    return {scaled + torch::rand({3, 1})};
  };
  const auto step = [&](const std::function<Values(const Values&)>& call) {
    torch::manual_seed(4);
    const at::Tensor x = torch::linspace(-1, 1, 3 * 9900).view({3, 9900}).set_requires_grad(true);
    const at::Tensor y = call({x})[0].toTensor();
    torch::rand({7});
    y.sin().sum().backward();
    return Tensors{y.detach(), x.grad(), state_now()};
  };
  const Tensors expected = step(function);
  Compiled cut(function, {.partitioner = Partitioner::MinCut, .explicit_random_states = true}),
      kept(function, {.partitioner = Partitioner::MinCut});
  expect_equal(step([&](const Values& in) { return cut(in); }), expected);
  expect_equal(step([&](const Values& in) { return kept(in); }), expected);
  EXPECT_EQ(count_explicit(cut.partition(0).forward), 2u);
  EXPECT_EQ(count_explicit(cut.partition(0).backward), 1u);
  EXPECT_LT(cut.partition(0).saved_bytes(cut.joint(0).graph),
            kept.partition(0).saved_bytes(kept.joint(0).graph) / 10);
  // Drawing again is no draw of backward's own.
  EXPECT_EQ(cut.meta(0).backward_random_states, 0u);
}

// The second run of a recomputed part draws what the first has drawn, also if the graph is replayed.
TEST(ExplicitRandomStates, RecomputedPartsDrawTheSame) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor before = torch::dropout(in[0].toTensor(), 0.2, true);
    const at::Tensor part =
        recompute([](const Tensors& in) { return torch::dropout(in[0].exp(), 0.5, true).sin(); }, {before});
    return {Noisy::apply(torch::dropout(part, 0.2, true))};
  };
  const auto steps = [&](const std::function<Values(const Values&)>& call) {
    Tensors all;
    torch::manual_seed(6);
    for (int round = 0; round < 3; ++round) {
      const at::Tensor x = torch::linspace(-1, 1, 40).set_requires_grad(true);
      const at::Tensor y = call({x})[0].toTensor();
      all.push_back(torch::rand({3}));
      y.sum().backward();
      all.insert(all.end(), {y.detach(), x.grad(), state_now()});
    }
    return all;
  };
  const Tensors expected = steps(function);
  for (const bool is_explicit : {false, true}) {
    Compiled compiled(function, {.explicit_random_states = is_explicit});
    expect_equal(steps([&](const Values& in) { return compiled(in); }), expected);
    const Graph& backward = compiled.partition(0).backward;
    EXPECT_EQ(nodes_named(backward, "penstock::set_generator_state"), is_explicit ? 0u : 2u);
    EXPECT_EQ(count_explicit(backward), is_explicit ? 2u : 0u);
  }
}

TEST(ExplicitRandomStates, OneCaptureForAllSizes) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    return {Noisy::apply(torch::dropout(x, 0.5, true) * torch::rand_like(x)) + in[1].toTensor() +
            torch::randn({x.size(0), 1}) + in[2].toTensor()};
  };
  Compiled compiled(function, {.dynamic = {.dims = {{0, 0, "B"}, {1, 0, "B"}, {2, 0, "B"}}},
                               .explicit_random_states = true,
                               .effect_tokens = true});
  for (const std::int64_t rows : {6, 3, 11, 6, 1}) {
    SCOPED_TRACE(rows);
    expect_equal(outcome([&](const Values& in) { return compiled(in); }, 2, rows),
                 outcome(function, 2, rows));
  }
  EXPECT_TRUE(compiled.is_dynamic(0));
  EXPECT_EQ(compiled.meta(0).random_states, Names{"cpu"});
  // Sizes 6, 3 and 11 with one graph; 1 may need one of its own.
  EXPECT_LE(compiled.captures(), 2u);
}

TEST(ExplicitRandomStates, AnotherKindOfCallIsCapturedAgain) {
  const Function function = program(3);
  Compiled compiled(function, {.explicit_random_states = true});
  for (const std::int64_t rows : {4, 2, 4, 5})
    expect_equal(outcome([&](const Values& in) { return compiled(in); }, 3, rows),
                 outcome(function, 3, rows));
  EXPECT_EQ(compiled.captures(), 3u);
  // Without gradients: an inference graph takes and returns the state, too.
  const at::NoGradGuard no_grad;
  expect_equal(outcome([&](const Values& in) { return compiled(in); }, 3), outcome(function, 3));
  EXPECT_EQ(compiled.captures(), 4u);
}

TEST(ExplicitRandomStates, GeneratorsThatTheFunctionPasses) {
  auto own = at::detail::createCPUGenerator(5);
  const Function function = [&](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    const at::Tensor scaled = x * at::rand({6}, own), noise = torch::rand({6});
    return {scaled + noise * at::randn({6}, own)};
  };
  const at::Tensor x = torch::linspace(0, 1, 6);
  Compiled compiled(function, {.explicit_random_states = true});
  const auto steps = [&](const std::function<Values(const Values&)>& call) {
    own.set_current_seed(5);
    torch::manual_seed(7);
    Tensors all;
    for (int round = 0; round < 3; ++round) {
      all.push_back(call({x})[0].toTensor());
      all.push_back(at::rand({2}, own));
    }
    all.insert(all.end(), {state_now(), generator_state(own)});
    return all;
  };
  const Tensors expected = steps(function);
  expect_equal(steps([&](const Values& in) { return compiled(in); }), expected);
  EXPECT_EQ(compiled.meta(0).random_states, (Names{"cpu generator 0", "cpu"}));
}

// A module, stored and loaded in another object; the loaded call draws as the plain module.
TEST(ExplicitRandomStates, ModulesThroughTheCache) {
  const CacheFolder folder;
  const auto make = [] {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 2),
                                 torch::nn::Dropout(0.2));
  };
  const auto steps = [](auto& module, const torch::nn::Sequential& owner) {
    torch::manual_seed(2);
    Tensors all;
    for (int round = 0; round < 2; ++round) {
      const at::Tensor y = module->forward(torch::linspace(-1, 1, 12).view({3, 4}));
      all.push_back(torch::rand({2}));
      y.pow(2).sum().backward();
      all.push_back(y.detach());
    }
    for (const at::Tensor& parameter : owner->parameters()) all.push_back(parameter.grad());
    all.push_back(state_now());
    return all;
  };
  torch::nn::Sequential plain = make();
  const Tensors expected = steps(plain, plain);
  for (const std::size_t loaded : {0u, 1u}) {
    const torch::nn::Sequential net = make();
    const CompileOptions options{.explicit_random_states = true, .effect_tokens = true};
    auto fast = compile(net, folder.options("dropout", options));
    expect_equal(steps(fast, net), expected);
    EXPECT_EQ(compiled_entry(*fast, 0).loaded(), loaded);
    EXPECT_EQ(compiled_entry(*fast, 0).meta(0).random_states, Names{"cpu"});
  }
}

TEST(ExplicitRandomStates, DamagedStatesAreRefused) {
  const Function function = [](const Values& in) -> Values {
    note(in[0].toTensor().detach(), 1);
    return {Noisy::apply(torch::dropout(in[0].toTensor(), 0.5, true))};
  };
  const PartitionedCapture plain =
      partition(with_explicit_states(capture_function(function, {torch::ones({3}).set_requires_grad(true)}),
                                     {true, true}),
                Partitioner::Default);
  const auto refusal = [&](const std::function<void(PartitionedCapture&)>& spoil) {
    PartitionedCapture spoiled = plain;
    spoil(spoiled);
    return message_of<ValueError>([&] { decode_capture(encode_capture(spoiled)); });
  };
  ASSERT_EQ(plain.capture.joint.states.size(), 3u);
  EXPECT_TRUE(
      has_text(refusal([](auto& c) { std::swap(c.capture.joint.states[0], c.capture.joint.states[2]); }),
               "states in another order"));
  EXPECT_TRUE(has_text(refusal([](auto& c) { c.capture.joint.states.pop_back(); }), "inconsistent number"));
  EXPECT_TRUE(
      has_text(refusal([](auto& c) { c.capture.meta.tokens.clear(); }), "inconsistent number of states"));
  EXPECT_TRUE(has_text(refusal([](auto& c) { c.capture.joint.states[1].device = at::Device(at::kMeta); }),
                       "another kind of device"));
  EXPECT_TRUE(has_text(refusal([](auto& c) { c.halves.forward.inputs.pop_back(); }), "do not fit"));
  // Each member of a state is stored.
  const Bytes bytes = encode_capture(plain);
  for (const auto& change : std::vector<std::function<void(StateChain&)>>{
           [](StateChain& state) { state.name = "another"; },
           [](StateChain& state) { state.device = at::Device("cuda:1"); }}) {
    PartitionedCapture changed = plain;
    change(changed.capture.joint.states[1]);
    const Bytes other = encode_capture(changed);
    EXPECT_NE(other, bytes);
    EXPECT_EQ(encode_capture(decode_capture(other)), other);
  }
}

// ---- side effects ----

const Function kTalking = [](const Values& in) -> Values {
  const at::Tensor x = in[0].toTensor(), values = x.detach();
  note(values, 1);
  send(values, 2);  // its result is not used
  const at::Tensor y = x * send(values, 3);
  log(values, 4);
  return {Talking::apply(y)};
};

// Keeps the graphs that a compiler gets, by their role.
class Keeping final : public GraphCompiler {
 public:
  std::string_view name() const override { return "keeping states"; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                               const CompileRequest& request) const override {
    kept().insert_or_assign(std::string(to_text(request.role)), std::pair(graph, request));
    return graph_compiler(kExecutorCompiler)->compile(graph, request);
  }
  static std::map<std::string, std::pair<Graph, CompileRequest>>& kept() {
    static std::map<std::string, std::pair<Graph, CompileRequest>> all;
    return all;
  }
};

TEST(EffectTokens, OrderSideEffectsInBothHalves) {
  register_effects();
  for (const bool tokens : {false, true})
    for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
      Compiled compiled(kTalking, {.partitioner = partitioner, .effect_tokens = tokens});
      for (int round = 0; round < 2; ++round) {
        const at::Tensor x = torch::randn({4}).set_requires_grad(true),
                         same = x.detach().clone().set_requires_grad(true);
        seen().clear();
        const at::Tensor expected = kTalking({same})[0].toTensor();
        EXPECT_EQ(seen(), (Tags{1, 2, 3, 4}));
        expected.sum().backward();
        EXPECT_EQ(seen(), (Tags{1, 2, 3, 4, 5, 6, 7}));
        if (round == 0) compiled.prepare({x});
        seen().clear();
        const Values results = compiled({x});
        EXPECT_EQ(seen(), (Tags{1, 2, 3, 4}));
        ASSERT_EQ(results.size(), 1u);
        EXPECT_TRUE(at::equal(results[0].toTensor(), expected));
        results[0].toTensor().sum().backward();
        EXPECT_EQ(seen(), (Tags{1, 2, 3, 4, 5, 6, 7}));
        EXPECT_TRUE(at::equal(x.grad(), same.grad()));
      }
      EXPECT_EQ(nodes_named(compiled.joint(0).graph, "penstock_effect::penstock_state_test__send"),
                tokens ? 4u : 0u);
    }
}

TEST(EffectTokens, NamesAndPlacesInTheSignatures) {
  register_effects();
  static std::once_flag once;
  std::call_once(once, [] { register_graph_compiler(std::make_shared<Keeping>()); });
  const Function function = [](const Values& in) -> Values {
    in[1].toTensor().add_(1);
    return {torch::dropout(kTalking({in[0].toTensor() * in[2].toTensor()})[0].toTensor(), 0.5, true)};
  };
  Compiled compiled(function,
                    {.compiler = "keeping states", .explicit_random_states = true, .effect_tokens = true},
                    Convention{2, {"w", "b", "x"}});
  compiled({torch::ones({3}).set_requires_grad(true), torch::ones({3}), torch::ones({3})});
  const JointGraph& joint = compiled.joint(0);
  const ViewAndMutationMeta& meta = compiled.inner_meta(0);
  EXPECT_EQ(meta.tokens, (Names{"ordered", "log"}));
  EXPECT_EQ(meta.backward_tokens, 1u);
  EXPECT_EQ(meta.forward_returns(), 2u);  // tokens are not counted
  EXPECT_EQ(compiled.wrappers(0), (Names{"epilogue", "effect tokens", "random numbers"}));
  EXPECT_EQ(compiled.wrapper_decisions(0).at(1),
            "effect tokens: ordered in forward, log in forward, ordered in backward");
  EXPECT_EQ(compiled.wrapper_decisions(0).at(2), "random numbers: cpu in forward");

  const GraphSignature signature = make_signature(joint, meta);
  const std::vector<GraphInput> tokens{GraphInput("token[ordered]"), GraphInput("token[log]")};
  EXPECT_EQ(signature.states.input_tokens, tokens);
  EXPECT_EQ(signature.states.output_tokens.size(), 2u);
  EXPECT_EQ(signature.user_inputs.size(), 3u);
  EXPECT_EQ(signature.user_outputs.size(), 1u);
  EXPECT_EQ(signature.user_inputs_to_mutate.size(), 1u);
  ASSERT_TRUE(signature.backward);
  EXPECT_EQ(signature.backward->states.input_tokens, std::vector{GraphInput("backward_token[ordered]")});

  // As a compiler gets them: tokens first in forward, last in backward.
  const HalfSignature forward = forward_signature(joint, compiled.partition(0)),
                      backward = backward_signature(joint, compiled.partition(0));
  EXPECT_EQ(forward.inputs, (std::vector{tokens[0], tokens[1], GraphInput("w"), GraphInput("b"),
                                         GraphInput("x"), GraphInput("random_state[cpu]")}));
  EXPECT_EQ(forward.states.output_tokens, (std::vector{forward.outputs[0], forward.outputs[1]}));
  EXPECT_EQ(forward.states.output_random_states, std::vector{forward.outputs[4]});
  EXPECT_EQ(forward.outputs.size(), 5 + forward.saved.size());
  EXPECT_EQ(backward.inputs.back(), GraphInput("backward_token[ordered]"));
  EXPECT_EQ(backward.states.output_tokens, std::vector{backward.outputs.back()});
  for (const auto& [role, half] : {std::pair("forward", forward), std::pair("backward", backward)}) {
    const auto& [graph, request] = Keeping::kept().at(role);
    std::vector<GraphInput> names;
    for (const Placeholder& input : graph.inputs) names.emplace_back(input.name);
    EXPECT_EQ(names, half.inputs) << role;
    ASSERT_EQ(graph.outputs.size(), half.outputs.size()) << role;
    for (std::size_t i = 0; i < graph.outputs.size(); ++i)
      EXPECT_TRUE(half.outputs[i].text.starts_with(to_text(graph.outputs[i]))) << role << " " << i;
  }
  // Parameters and buffers have moved.
  EXPECT_EQ(Keeping::kept().at("forward").second.static_inputs, (std::vector<std::size_t>{2, 3}));
}

// A compiler gets the states before the tokens of backward.
TEST(EffectTokens, BesideRandomStatesInBackward) {
  register_effects();
  const Function function = [](const Values& in) -> Values {
    return {Noisy::apply(Talking::apply(in[0].toTensor()))};
  };
  const auto step = [](const Function& run) {
    const at::Tensor x = torch::linspace(-1, 1, 6).set_requires_grad(true);
    torch::manual_seed(5);
    Tensors all;
    for (int round = 0; round < 2; ++round) {
      run({x})[0].toTensor().sum().backward();
      all.insert(all.end(), {x.grad().clone(), state_now()});
    }
    return all;
  };
  seen().clear();
  const Tensors expected = step(function);
  const Tags tags = std::exchange(seen(), {});
  Compiled compiled(function, {.explicit_random_states = true, .effect_tokens = true});
  expect_equal(step([&](const Values& in) { return compiled(in); }), expected);
  EXPECT_EQ(seen(), tags);
  EXPECT_EQ(compiled.meta(0).backward_tokens, 1u);
  EXPECT_EQ(compiled.meta(0).backward_random_states, 1u);
}

TEST(EffectTokens, NothingIsDroppedMergedOrExchanged) {
  register_effects();
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    send(x, 1);
    send(x, 1);
    log(x, 2);
    return {x + 1};
  };
  const at::NoGradGuard no_grad;
  Compiled compiled(function, {.effect_tokens = true});
  compiled({torch::ones({2})});
  Graph graph = compiled.joint(0).graph;
  EXPECT_EQ(remove_dead_nodes(graph), 0u);
  merge_common_subexpressions(graph);
  ASSERT_EQ(graph.nodes.size(), 4u);
  EXPECT_EQ(nodes_named(graph, "penstock_effect::penstock_state_test__send"), 2u);
  // The values alone forbid another order of one effect, and allow it for two.
  Graph exchanged = graph;
  std::swap(exchanged.nodes[0], exchanged.nodes[1]);
  EXPECT_TRUE(has_text(message_of<InvariantError>([&] { verify(exchanged); }), "used before it is defined"));
  exchanged = graph;
  std::swap(exchanged.nodes[1], exchanged.nodes[2]);
  verify(exchanged);
  EXPECT_TRUE(
      has_text(message_of<ValueError>([] { register_side_effect("a::b", ""); }), "the effect of a::b"));
}

TEST(EffectTokens, StatesOfYourOwn) {
  register_effects();
  JointGraph joint;
  joint.graph = capture_forward(
      [](const Values& in) -> Values {
        log(in[0].toTensor(), 1);
        return {send(in[0].toTensor(), 2)};
      },
      {torch::ones({2})});
  joint.primals = 1;
  joint.forward_outputs = 1;
  StateChains chains(joint, StateKind::Token);
  for (Node& node : joint.graph.nodes)
    if (has_side_effect(node)) chains.pass_through(node, {"everything"});
  chains.finish();
  ASSERT_EQ(joint.states.size(), 1u);
  EXPECT_EQ(joint.graph.inputs.back().name, "token[everything]");
  seen().clear();
  EXPECT_EQ(Executor(joint.graph)({torch::ones({2}), make_token()}).size(), 2u);
  EXPECT_EQ(seen(), (Tags{1, 2}));
}

// Subclasses are taken apart outside of the states.
TEST(ExplicitStates, WithTensorSubclasses) {
  register_effects();
  test::register_sample_kinds();
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor(), w = in[1].toTensor();
    note(w.detach(), 1);
    return {torch::dropout(x, 0.5, true) * 2, torch::dropout(w, 0.5, true).sin()};
  };
  const auto steps = [&](const std::function<Values(const Values&)>& call) {
    torch::manual_seed(12);
    Tensors all;
    for (int round = 0; round < 2; ++round) {
      const at::Tensor x = Boxed::make(torch::linspace(0, 1, 20)).set_requires_grad(true),
                       w = torch::linspace(-1, 1, 20).set_requires_grad(true);
      const Values results = call({x, w});
      all.push_back(torch::rand({2}));
      torch::autograd::backward({results[0].toTensor().sum(), results[1].toTensor().sum()});
      all.insert(all.end(), {payload_as<Boxed>(results[0].toTensor())->inner.detach(),
                             results[1].toTensor().detach(), payload_as<Boxed>(x.grad())->inner, w.grad()});
    }
    all.push_back(state_now());
    return all;
  };
  const Tensors expected = steps(function);
  Compiled compiled(function, {.explicit_random_states = true, .effect_tokens = true});
  expect_equal(steps([&](const Values& in) { return compiled(in); }), expected);
  EXPECT_EQ(compiled.wrappers(0), (Names{"epilogue", "subclasses", "effect tokens", "random numbers"}));
}

}  // namespace explicit_state_test
}  // namespace penstock::graph
