// A traced forward, cut into stages that run one by one, has the bits of the module: outputs, gradients,
// buffers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/stages/node_replay.h"
#include "penstock/graph/stages/pipe_cut.h"
#include "penstock/torch/dispatch/switch_data.h"
#include "tests/graph/random_net.h"
#include "tests/graph/traced_module.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace pipe_cut_test {

using test::CubeFunction;
using test::has_text;
using test::kNetWidth;
using test::message_of;
using test::RandomNet;
using test::RandomNetImpl;
using traced_module::traced;
using traced_module::TracedForTest;

at::Tensor values(std::vector<std::int64_t> shape, std::uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed));
}

// Runs the stages as a pipeline does: what arrives is a leaf, and backward goes from the last stage to the
// first.
class StageByStage {
 public:
  StageByStage(const TracedForTest& model, const std::vector<std::size_t>& places)
      : model_(model), cut_(cut_forward(model.trace, model.kinds, places)) {
    const Graph& graph = model.trace.graph;
    for (std::size_t s = 0; s < cut_.stages.size(); ++s) {
      const CutStage& stage = cut_.stages[s];
      ReplayPart part;
      part.first = stage.first;
      part.end = stage.end;
      part.functions = stage.functions;
      for (const std::size_t input : stage.state) part.inputs.push_back(graph.inputs[input].value);
      for (const ValueId value : received(s)) part.inputs.push_back(value);
      for (const ValueId value : sent(s)) part.outputs.push_back(Operand::of(value));
      if (s + 1 == cut_.stages.size()) part.outputs = graph.outputs;
      replays_.emplace_back(model.trace, part);
    }
  }
  const PipeCut& cut() const { return cut_; }

  at::Tensor step(const std::vector<at::Tensor>& args) {
    std::map<std::pair<ValueId, std::size_t>, at::Tensor> arrived;
    std::vector<std::vector<at::Tensor>> results;
    at::Tensor result;
    for (std::size_t s = 0; s < replays_.size(); ++s) {
      std::vector<at::Tensor> inputs;
      for (const std::size_t input : cut_.stages[s].state) inputs.push_back(model_.state.tensors[input]);
      std::size_t positional = 0;
      for (const ValueId value : received(s))
        inputs.push_back(s == 0 ? args[positional++] : arrived.at({value, s}));
      std::vector<at::Tensor>& outputs = results.emplace_back();
      for (const c10::IValue& output : replays_[s].run(inputs)) outputs.push_back(output.toTensor());
      if (s + 1 == replays_.size()) {
        result = outputs[0];
        break;
      }
      const std::vector<ValueId> values_sent = sent(s);
      for (std::size_t i = 0; i < values_sent.size(); ++i)
        arrived[{values_sent[i], destination(values_sent[i], s)}] =
            outputs[i].detach().set_requires_grad(outputs[i].requires_grad());
    }
    result.pow(2).sum().backward();
    for (std::size_t s = replays_.size() - 1; s-- > 0;) {
      std::vector<at::Tensor> roots, gradients;
      const std::vector<ValueId> values_sent = sent(s);
      for (std::size_t i = 0; i < values_sent.size(); ++i) {
        const at::Tensor leaf = arrived.at({values_sent[i], destination(values_sent[i], s)});
        if (!leaf.requires_grad() || !leaf.grad().defined()) continue;
        roots.push_back(results[s][i]);
        gradients.push_back(leaf.grad());
      }
      if (!roots.empty()) torch::autograd::backward(roots, gradients);
    }
    return result.detach();
  }

 private:
  std::vector<ValueId> received(std::size_t stage) const {
    std::vector<ValueId> found;
    if (stage == 0)
      for (const std::size_t input : cut_.positional) found.push_back(model_.trace.graph.inputs[input].value);
    for (const auto* values : {&cut_.stages[stage].main_inputs, &cut_.stages[stage].skip_inputs})
      found.insert(found.end(), values->begin(), values->end());
    return found;
  }
  std::vector<ValueId> sent(std::size_t stage) const {
    std::vector<ValueId> found = cut_.stages[stage].main_outputs;
    found.insert(found.end(), cut_.stages[stage].skip_outputs.begin(), cut_.stages[stage].skip_outputs.end());
    return found;
  }
  std::size_t destination(ValueId value, std::size_t from) const {
    for (const Hop& hop : cut_.hops)
      if (hop.value == value && static_cast<std::size_t>(hop.from) == from)
        return static_cast<std::size_t>(hop.to);
    ADD_FAILURE() << "a value that is sent to nobody";
    return 0;
  }

  const TracedForTest& model_;
  PipeCut cut_;
  std::vector<NodeReplay> replays_;
};

void expect_same_state(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto a = actual.named_parameters(), b = expected.named_parameters();
  for (std::size_t i = 0; i < b.size(); ++i) {
    const at::Tensor x = a[i].value().grad(), y = b[i].value().grad();
    ASSERT_EQ(x.defined(), y.defined()) << b[i].key();
    if (!y.defined()) continue;
    EXPECT_TRUE(x.equal(y)) << b[i].key() << "\n" << x << "\n" << y;
  }
  const auto buffers = actual.named_buffers(), wanted = expected.named_buffers();
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(buffers[i].value().equal(wanted[i].value())) << wanted[i].key();
}

TEST(PipeCut, RandomModelsAtRandomPlacesHaveTheBitsOfTheWhole) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const int stages = 1 + static_cast<int>(seed % 5);
    RandomNet model(seed, stages), original(seed, stages);
    const at::Tensor x = values({4, kNetWidth}, 7), z = values({4, kNetWidth}, 8);
    const TracedForTest trace = traced<RandomNetImpl>(
        model.ptr(), {x, z},
        [](RandomNetImpl& m, const std::vector<at::Tensor>& in) { return m.forward(in[0], in[1]); });
    std::vector<std::string> names(trace.trace.marks.size(), "a mark");
    StageByStage pipe(trace, trace.places().checked(trace.trace.marks, names));
    ASSERT_EQ(pipe.cut().stages.size(), static_cast<std::size_t>(stages));
    for (int step = 0; step < 2; ++step) {
      const at::Tensor in = values({4, kNetWidth}, 20 + static_cast<std::uint64_t>(step));
      const at::Tensor more = values({4, kNetWidth}, 30 + static_cast<std::uint64_t>(step));
      const at::Tensor expected = original->forward(in, more);
      expected.pow(2).sum().backward();
      EXPECT_TRUE(pipe.step({in, more}).equal(expected));
    }
    expect_same_state(*model, *original);
  }
}

// Every stage owns what its operators take, and nothing else.
TEST(PipeCut, StagesOwnWhatTheyUse) {
  torch::nn::Sequential net(torch::nn::Linear(4, 5), torch::nn::BatchNorm1d(5), torch::nn::ReLU(),
                            torch::nn::Linear(5, 3));
  const TracedForTest model = traced(net.ptr(), values({6, 4}, 1));
  const std::size_t place = model.places().at({"3", Split::Side::Before}, model.modules);
  const PipeCut cut = cut_forward(model.trace, model.kinds, {place});
  const auto names = [&](std::size_t stage) {
    std::vector<std::string> found;
    for (const std::size_t index : cut.stages[stage].state) found.push_back(model.state.names[index]);
    return found;
  };
  EXPECT_EQ(names(0), (std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean",
                                                "1.running_var", "1.num_batches_tracked"}));
  EXPECT_EQ(names(1), (std::vector<std::string>{"3.weight", "3.bias"}));
  ASSERT_EQ(cut.hops.size(), 1u);
  EXPECT_EQ(cut.hops[0].from, 0);
  EXPECT_EQ(cut.hops[0].to, 1);
}

// A value of stage 0 that stages 1 and 3 use goes from 0 to 1 and from there to 3.
TEST(PipeCut, ValuesTravelFromUserToUser) {
  struct Net : torch::nn::Module {
    Net() {
      for (const char* name : {"a", "b", "c", "d"})
        layers.push_back(register_module(name, torch::nn::Linear(3, 3)));
    }
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor h = layers[0]->forward(x);
      at::Tensor y = layers[1]->forward(h);
      y = layers[2]->forward(y);
      return layers[3]->forward(y) * h;
    }
    std::vector<torch::nn::Linear> layers;
  };
  const auto net = std::make_shared<Net>();
  const TracedForTest model = traced(net, values({2, 3}, 1));
  std::vector<std::size_t> places;
  for (const char* name : {"b", "c", "d"})
    places.push_back(model.places().at({name, Split::Side::Before}, model.modules));
  const PipeCut cut = cut_forward(model.trace, model.kinds, places);
  std::vector<std::pair<int, int>> of_h;
  for (const Hop& hop : cut.hops)
    if (hop.value == cut.hops.front().value) of_h.emplace_back(hop.from, hop.to);
  EXPECT_EQ(of_h, (std::vector<std::pair<int, int>>{{0, 1}, {1, 3}}));
}

TEST(ForwardTrace, NodesHaveTheirModules) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::ReLU(), torch::nn::Linear(4, 4));
  const TracedForTest model = traced(net.ptr(), values({2, 4}, 1));
  std::vector<std::string> paths;
  for (const std::string& path : model.trace.module_of_node)
    if (paths.empty() || paths.back() != path) paths.push_back(path);
  EXPECT_EQ(paths, (std::vector<std::string>{"0", "1", "2"}));
  EXPECT_TRUE(has_text(model.trace.line(model.trace.graph.nodes.size() - 1), "in module '2'"));
  // The modules are the ones of before.
  EXPECT_NO_THROW(net->forward(values({2, 4}, 2)));
  EXPECT_EQ(net->begin()->ptr().get(), net[0].get());
}

// A module of a Sequential that returns a tuple cannot report itself: its parameters still tell.
TEST(ForwardTrace, SequentialsOfAnythingElse) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() { weight = register_parameter("weight", at::ones({4})); }
    std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x) { return {x * weight, x}; }
    at::Tensor weight;
  };
  struct JoinImpl : torch::nn::Module {
    at::Tensor forward(std::tuple<at::Tensor, at::Tensor> both) {
      return std::get<0>(both) + std::get<1>(both);
    }
  };
  torch::nn::Sequential net;
  net->push_back(std::make_shared<TwoImpl>());
  net->push_back(std::make_shared<JoinImpl>());
  const TracedForTest model = traced(net.ptr(), values({2, 4}, 1));
  EXPECT_EQ(model.trace.module_of_node.front(), "0");
}

TEST(ForwardTrace, AutogradFunctionsKeepTheirBackward) {
  struct Net : torch::nn::Module {
    Net() { scale = register_parameter("scale", at::full({}, 1.5)); }
    at::Tensor forward(const at::Tensor& x) { return CubeFunction::apply(x.sin(), scale); }
    at::Tensor scale;
  };
  const auto net = std::make_shared<Net>();
  const at::Tensor x = values({2, 3}, 1).requires_grad_();
  const TracedForTest model = traced(net, x);
  ASSERT_EQ(model.trace.functions.size(), 1u);
  EXPECT_TRUE(has_text(model.trace.functions[0].name, "CubeFunction"));
  StageByStage pipe(model, {});
  const at::Tensor actual = pipe.step({x});
  const at::Tensor gradient = x.grad().clone(), of_scale = net->scale.grad().clone();
  x.mutable_grad() = at::Tensor();
  net->zero_grad();
  net->scale.mutable_grad() = at::Tensor();
  const at::Tensor expected = net->forward(x);
  expected.pow(2).sum().backward();
  EXPECT_TRUE(actual.equal(expected));
  EXPECT_TRUE(gradient.equal(x.grad()));
  EXPECT_TRUE(of_scale.equal(net->scale.grad()));
}

TEST(ForwardTrace, AForwardThatDependsOnValuesNamesItsModule) {
  struct InnerImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      const ModuleScope scope(*this);
      return x.sum().item<double>() > 0 ? x : -x;
    }
  };
  struct Net : torch::nn::Module {
    Net() { inner = register_module("inner", std::make_shared<InnerImpl>()); }
    at::Tensor forward(const at::Tensor& x) { return inner->forward(x.sin()); }
    std::shared_ptr<InnerImpl> inner;
  };
  const std::string message = message_of<DataDependentError>([] {
    traced(std::make_shared<Net>(), values({2, 3}, 1));
  });
  EXPECT_TRUE(has_text(message, "in module 'inner'"));
  EXPECT_TRUE(has_text(message, "aten::sum"));
}

TEST(ForwardTrace, MetaParametersAreTracedOnTheDevice) {
  torch::nn::Linear layer(4, 2);
  for (const at::Tensor& parameter : layer->parameters())
    switch_data(parameter, at::empty(parameter.sizes(), at::kMeta));
  const TracedForTest model = traced(layer.ptr(), values({3, 4}, 1));
  EXPECT_EQ(model.trace.graph[model.trace.graph.outputs[0].value()].geometry.device, at::Device(at::kCPU));
  EXPECT_TRUE(layer->weight.is_meta());
}

}  // namespace pipe_cut_test
}  // namespace penstock::graph
