// The parts of a traced pipeline: who owns what, the outer graph, modules and state dicts, devices without
// memory, examples of other sizes, modes, and what is said about bad input.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/compiled_stage.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/tensor_parallel.h"
#include "penstock/torch/dispatch/switch_data.h"
#include "penstock/trace_pipeline.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/pipeline/traced_models.h"
#include "tests/throws.h"

namespace penstock {
namespace trace_pipeline_test {

using namespace std::chrono_literals;
using test::Block;
using test::has_text;
using test::kWidth;
using test::message_of;
using test::values;
using Names = std::vector<std::string>;

Pipe skip_pipe(int stages) {
  return trace_pipeline(test::maker<test::SkipNetImpl>()(), Tree::tuple({values({2, kWidth}, 1)}), {},
                        test::evenly("layer", test::kTracedLayers, stages));
}

// -------------------------------------------------------------------------------------------------------
// the outer graph

TEST(OuterGraph, ValuesThatSeveralStagesUse) {
  const Pipe pipe = skip_pipe(4);
  const PipeGraph& graph = pipe.outer();
  graph.verify(4);
  EXPECT_EQ(graph.stage_of("stage_2"), 2);
  EXPECT_TRUE(has_text(pipe.to_text(), "stage_0 = stage 0(args[0])"));
  EXPECT_TRUE(has_text(graph.to_dot(), "digraph pipe"));
  // The first stage makes two values of the way down; the last one takes both, the second takes one.
  std::size_t of_stage_0 = 0, users = 0;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i].kind != PipeNode::Kind::Item || graph.nodes[i].stage != 0) continue;
    EXPECT_EQ(graph.nodes[i].index, of_stage_0++);
    users += graph.users(i).size();
  }
  EXPECT_EQ(of_stage_0, 2u);
  EXPECT_EQ(users, 3u);
  std::int64_t tensors = 0;
  for (const PipeBorder& border : pipe.borders()) {
    EXPECT_EQ(border.bytes, border.tensors * 2 * kWidth * 4);
    tensors += border.tensors;
  }
  // Two skips within one border or more, and one value from each stage to the next.
  EXPECT_GE(tensors, 5);
  EXPECT_FALSE(pipe.skips().empty());
  EXPECT_EQ(pipe.skips(2).size(), 2 * pipe.skips().size());
}

TEST(OuterGraph, StagesAreGraphsOfTheirOwn) {
  const Pipe pipe = skip_pipe(2);
  for (int stage = 0; stage < 2; ++stage) {
    const graph::Graph part = pipe.stage_graph(stage);
    EXPECT_NO_THROW(graph::verify(part));
    EXPECT_EQ(part.inputs.size() - pipe.parameter_names(stage).size(), stage == 0 ? 1u : 4u);
    EXPECT_TRUE(has_text(pipe.stage_text(stage), stage == 0 ? "in module 'layer0'" : "in module 'layer7'"));
  }
}

TEST(OuterGraph, ContradictionsAreNamed) {
  PipeGraph graph = skip_pipe(2).outer();
  EXPECT_TRUE(has_text(message_of<PipeliningMetadataError>([&] { graph.verify(3); }), "got 2, expected 3"));
  EXPECT_TRUE(
      has_text(message_of<PipeliningMetadataError>([&] { static_cast<void>(graph.stage_of("stage_9")); }),
               "'stage_9'"));
  PipeGraph twice = graph, direct = graph, ahead = graph;
  for (PipeNode& node : direct.nodes)
    if (node.kind == PipeNode::Kind::Stage && node.stage == 1) node.inputs = {1};  // stage 0 itself
  EXPECT_TRUE(has_text(message_of<PipeliningMetadataError>([&] { direct.verify(2); }), "takes stage_0"));
  for (PipeNode& node : twice.nodes)
    if (node.kind == PipeNode::Kind::Item && node.stage == 0) node.index = 0;
  EXPECT_TRUE(has_text(message_of<PipeliningMetadataError>([&] { twice.verify(2); }), "result 0 again"));
  ahead.nodes[1].inputs = {ahead.nodes.size() - 1};
  EXPECT_TRUE(
      has_text(message_of<PipeliningMetadataError>([&] { ahead.verify(2); }), "nodes before it only"));
}

// -------------------------------------------------------------------------------------------------------
// modules

TEST(TracedStage, HasTheNamesOfTheModel) {
  const StageModule model = test::maker<test::SmallResNetImpl>()();
  const Pipe pipe = trace_pipeline(model, Tree::tuple({values({2, 4, 5, 6}, 1)}), {},
                                   test::evenly("layer", test::kTracedLayers, 3));
  const torch::nn::Module& root = *model.modules()[0];
  std::set<std::string> parameters, buffers;
  for (int stage = 0; stage < 3; ++stage) {
    const StageModule part = stage_module(pipe, stage, at::kCPU);
    const auto& tree = *part.modules()[0];
    EXPECT_EQ(tree.named_parameters().keys(), pipe.parameter_names(stage));
    EXPECT_EQ(tree.named_buffers().keys(), pipe.buffer_names(stage));
    for (const auto& item : tree.named_parameters()) {
      EXPECT_TRUE(item.value().is_same(root.named_parameters()[item.key()])) << item.key();
      EXPECT_TRUE(parameters.insert(item.key()).second) << "in two stages: " << item.key();
    }
    for (const auto& item : tree.named_buffers()) EXPECT_TRUE(buffers.insert(item.key()).second);
    for (const auto& item : tree.named_modules("", false)) {
      ASSERT_TRUE(root.named_modules().contains(item.key())) << item.key();
      EXPECT_EQ(item.value()->name(), root.named_modules()[item.key()]->name());
      EXPECT_EQ(item.value()->is_training(), root.named_modules()[item.key()]->is_training());
    }
  }
  EXPECT_EQ(parameters.size(), root.named_parameters().size());
  EXPECT_EQ(buffers.size(), root.named_buffers().size());
}

// What LibTorch saves of the stages can be loaded into the model, and the other way round.
TEST(TracedStage, StateDictsAreThoseOfTheModel) {
  const StageModule model = test::maker<test::SkipNetImpl>()();
  const Pipe pipe = trace_pipeline(model, Tree::tuple({values({2, kWidth}, 1)}), {}, PipeSplit::into(3));
  torch::serialize::OutputArchive whole;
  model.modules()[0]->save(whole);
  std::stringstream file;
  whole.save_to(file);
  const StageModule other = test::maker<test::SkipNetImpl>()();
  {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : other.parameters()) parameter.zero_();
  }
  const Pipe of_other = trace_pipeline(other, Tree::tuple({values({2, kWidth}, 1)}), {}, PipeSplit::into(3));
  for (int stage = 0; stage < 3; ++stage) {
    torch::serialize::InputArchive archive;
    file.seekg(0);
    archive.load_from(file);
    const StageModule part = stage_module(of_other, stage, at::kCPU);
    part.modules()[0]->load(archive);
    Names names = pipe.parameter_names(stage);
    EXPECT_EQ(part.modules()[0]->named_parameters().keys(), names);
  }
  for (const auto& item : other.modules()[0]->named_parameters())
    EXPECT_TRUE(item.value().equal(model.modules()[0]->named_parameters()[item.key()])) << item.key();
}

TEST(TracedStage, ATieOfTwoNames) {
  const StageModule model = test::maker<test::TiedNetImpl>()();
  const Pipe pipe =
      trace_pipeline(model, Tree::tuple({at::arange(4)}), {}, test::evenly("layer", test::kTracedLayers, 2));
  ASSERT_EQ(pipe.ties().size(), 1u);
  EXPECT_EQ(pipe.ties()[0].names, (Names{"embed.weight", "head.weight"}));
  const StageModule first = stage_module(pipe, 0, at::kCPU), last = stage_module(pipe, 1, at::kCPU);
  const at::Tensor embed = first.modules()[0]->named_parameters()["embed.weight"];
  const at::Tensor head = last.modules()[0]->named_parameters()["head.weight"];
  EXPECT_FALSE(first.modules()[0]->named_parameters().contains("head.weight"));
  EXPECT_FALSE(last.modules()[0]->named_parameters().contains("embed.weight"));
  EXPECT_FALSE(embed.is_same(head));
  EXPECT_TRUE(head.is_leaf() && head.requires_grad());
  EXPECT_TRUE(embed.equal(head));
}

struct Extra : torch::nn::Module {
  Extra() {
    a = register_module("a", Block(0));
    b = register_module("b", Block(1));
    unused = b->register_parameter("unused", at::ones({2}));
    mask = register_buffer("mask", at::ones({kWidth}));
  }
  std::tuple<at::Tensor, std::int64_t, std::tuple<at::Tensor, std::string>> forward(const at::Tensor& x) {
    const at::Tensor h = a->forward(x) * mask, turned = h.transpose(0, 1);
    return {b->forward(h), 7, {turned, "text"}};
  }
  Block a{nullptr}, b{nullptr};
  at::Tensor unused, mask;
};

// The last stage returns what the module returns, also what an earlier stage has made.
TEST(TracedStage, ResultsOfAnyKind) {
  const auto model = std::make_shared<Extra>();
  const at::Tensor x = values({3, kWidth}, 1);
  const Tree expected(model->forward(x));
  const Pipe pipe = trace_pipeline(StageModule(model), Tree::tuple({x}), {}, PipeSplit::at({{"b"}}));
  const Tree between = stage_module(pipe, 0, at::kCPU).forward(Tree::tuple({x}), {});
  const Tree result = stage_module(pipe, 1, at::kCPU).forward(between, {});
  EXPECT_EQ(result.to_string(), expected.to_string());
  EXPECT_TRUE(result[0].tensor().equal(expected[0].tensor()));
  EXPECT_TRUE(result[2][0].tensor().equal(expected[2][0].tensor()));
  // What nothing uses belongs to the stage of its module.
  EXPECT_EQ(pipe.buffer_names(0), Names{"mask"});
  const Names of_last = pipe.parameter_names(1);
  EXPECT_NE(std::find(of_last.begin(), of_last.end(), "b.unused"), of_last.end());
}

TEST(TracedStage, CompiledStagesAreStagesToo) {
  const StageModule model = test::maker<test::SkipNetImpl>()();
  const at::Tensor x = values({2, kWidth}, 1);
  const at::Tensor expected = model.forward(Tree::tuple({x}), {}).tensor();
  const Pipe pipe = trace_pipeline(model, Tree::tuple({x}), {}, PipeSplit::into(2));
  Tree value = Tree::tuple({x});
  for (int stage = 0; stage < 2; ++stage)
    value = compiled_stage(stage_module(pipe, stage, at::kCPU)).forward(value, {});
  EXPECT_TRUE(value.tensor().equal(expected));
}

struct CubedImpl : torch::nn::Module {
  CubedImpl()
      : first(register_module("first", torch::nn::Linear(kWidth, kWidth))),
        second(register_module("second", torch::nn::Linear(kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    return test::CubeFunction::apply(second->forward(first->forward(x)), torch::ones({}));
  }
  torch::nn::Linear first, second;
};

TEST(TracedStage, AFunctionOfTheUserIsDifferentiatedOnce) {
  const Pipe pipe = trace_pipeline(StageModule(std::make_shared<CubedImpl>()),
                                   Tree::tuple({values({2, kWidth}, 1)}), {}, PipeSplit::at({{"second"}}));
  const StageModule before = stage_module(pipe, 0, at::kCPU), stage = stage_module(pipe, 1, at::kCPU);
  const at::Tensor y = stage.forward(before.forward(Tree::tuple({values({2, kWidth}, 2)}), {}), {}).tensor();
  const auto gradients = torch::autograd::grad({y.sum()}, stage.parameters(), {}, true, true);
  const std::string said = message_of<NotImplemented>([&] { gradients[0].square().sum().backward(); });
  EXPECT_TRUE(has_text(said, "CubeFunction")) << said;
  EXPECT_TRUE(has_text(said, "can be differentiated once")) << said;
}

// -------------------------------------------------------------------------------------------------------
// memory

TEST(TracedStage, MetaParametersGetMemoryOnTheirStageOnly) {
  const StageModule model = test::maker<test::SkipNetImpl>()(), real = test::maker<test::SkipNetImpl>()();
  for (const at::Tensor& parameter : model.parameters())
    switch_data(parameter, at::empty(parameter.sizes(), at::kMeta));
  const at::Tensor x = values({2, kWidth}, 1);
  const Pipe pipe = trace_pipeline(model, Tree::tuple({x}), {}, PipeSplit::into(2));
  Names filled;
  BuildStageOptions options;
  options.initialize = [&](const std::string& name, at::Tensor& tensor) {
    filled.push_back(name);
    tensor.copy_(real.modules()[0]->named_parameters()[name]);
  };
  const StageModule first = stage_module(pipe, 0, at::kCPU, options);
  EXPECT_EQ(filled, pipe.parameter_names(0));
  for (const std::string& name : pipe.parameter_names(1))
    EXPECT_TRUE(model.modules()[0]->named_parameters()[name].is_meta()) << name;
  const StageModule second = stage_module(pipe, 1, at::kCPU, options);
  const Tree result = second.forward(first.forward(Tree::tuple({x}), {}), {});
  EXPECT_TRUE(result.tensor().equal(real.forward(Tree::tuple({x}), {}).tensor()));
  result.tensor().sum().backward();
  for (const at::Tensor& parameter : first.parameters()) EXPECT_TRUE(parameter.grad().defined());
}

TEST(TracedStage, DeferredParametersGetTheirValues) {
  const auto make = [] {
    torch::nn::Sequential made;  // in this order, in which the stages draw their values
    made->push_back(torch::nn::Linear(4, 4));
    made->push_back(torch::nn::Tanh());
    made->push_back(torch::nn::Linear(4, 2));
    return made;
  };
  torch::manual_seed(3);
  torch::nn::Sequential real = make(), net;
  DeferredInit deferred;
  {
    const ModeGuard guard(deferred);
    net = make();
  }
  const at::Tensor x = values({3, 4}, 1);
  const Pipe pipe = trace_pipeline(net, Tree::tuple({x}), {}, PipeSplit::at({{"2"}}));
  BuildStageOptions options;
  options.deferred = &deferred;
  torch::manual_seed(3);
  const StageModule first = stage_module(pipe, 0, at::kCPU, options),
                    last = stage_module(pipe, 1, at::kCPU, options);
  EXPECT_TRUE(last.forward(first.forward(Tree::tuple({x}), {}), {}).tensor().equal(real->forward(x)));
}

// -------------------------------------------------------------------------------------------------------
// examples and modes

TEST(TracedStage, OtherSizesNeedAnExample) {
  const StageModule model = test::maker<test::SkipNetImpl>()();
  const at::Tensor x = values({4, kWidth}, 1), rest = values({3, kWidth}, 2);
  const Pipe one = trace_pipeline(model, Tree::tuple({x}), {}, PipeSplit::into(2));
  const std::string message = message_of<ValueError>(
      [&] { static_cast<void>(stage_module(one, 0, at::kCPU).forward(Tree::tuple({rest}), {})); });
  EXPECT_TRUE(has_text(message, "args[0] has sizes [3, 6], in the example [4, 6]"));
  EXPECT_TRUE(has_text(message, "TraceOptions::more"));
  TraceOptions options;
  options.more = {{Tree::tuple({rest}), {}}};
  const Pipe both = trace_pipeline(model, Tree::tuple({x}), {}, PipeSplit::into(2), options);
  const StageModule first = stage_module(both, 0, at::kCPU), last = stage_module(both, 1, at::kCPU);
  for (const at::Tensor& in : {x, rest})
    EXPECT_TRUE(last.forward(first.forward(Tree::tuple({in}), {}), {})
                    .tensor()
                    .equal(model.forward(Tree::tuple({in}), {}).tensor()));
}

// A batch whose last microbatch is smaller.
TEST(TracedStage, UnevenMicrobatches) {
  const auto run = [](bool whole) {
    at::Tensor output;
    std::vector<at::Tensor> losses;
    std::mutex mutex;
    const at::Tensor x = values({7, kWidth}, 1), y = values({7, kWidth}, 2);
    const PipelineLoss loss = test::square_loss();
    comm::run_ranks(whole ? 1 : 2, 20s, [&](comm::World& world) {
      const StageModule model = test::maker<test::SkipNetImpl>()();
      if (whole) {
        const Microbatches parts = split_microbatches(Tree::tuple({x, y}), {}, 2);
        for (const Tree& args : parts.args)
          losses.push_back(loss(model.forward(Tree::tuple({args[0]}), {}), args[1]).detach());
        return;
      }
      TraceOptions options;
      options.more = {{Tree::tuple({x.narrow(0, 0, 3)}), {}}};
      const Pipe pipe =
          trace_pipeline(model, Tree::tuple({x.narrow(0, 0, 4)}), {}, PipeSplit::into(2), options);
      PipelineOptions how{world};
      how.skips = pipe.skips();
      how.info = pipe.info();
      Schedule1F1B pipeline(build_stage(pipe, world.rank(), at::kCPU), 2, loss, how);
      const StepResult result = pipeline.step(Tree::tuple({x}), {}, y);
      const std::lock_guard lock(mutex);
      if (!result.losses.empty()) losses = result.losses;
    });
    return losses;
  };
  const std::vector<at::Tensor> actual = run(false), expected = run(true);
  ASSERT_EQ(actual.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(actual[i].equal(expected[i]));
}

TEST(TracedStage, TrainingAndEvaluation) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Dropout(0.5), torch::nn::Linear(4, 4));
  const at::Tensor x = values({8, 4}, 1);
  const Pipe pipe = trace_pipeline(net, Tree::tuple({x}), {}, PipeSplit::at({{"2"}}));
  EXPECT_TRUE(net->is_training());
  const StageModule first = stage_module(pipe, 0, at::kCPU), last = stage_module(pipe, 1, at::kCPU);
  const auto through = [&] { return last.forward(first.forward(Tree::tuple({x}), {}), {}).tensor(); };
  torch::manual_seed(5);
  const at::Tensor trained = through();
  torch::manual_seed(5);
  EXPECT_TRUE(trained.equal(net->forward(x)));
  first.modules()[0]->eval();
  last.modules()[0]->eval();
  net->eval();
  EXPECT_TRUE(through().equal(net->forward(x)));
  // Half of it in another mode was not traced.
  first.modules()[0]->children()[1]->train();
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { through(); }), "a mode that was not traced"));
}

// Means over a length that the second stage does not see.
struct MeanOverLength : torch::nn::Module {
  explicit MeanOverLength(bool late) : late(late) {
    a = register_module("a", torch::nn::Linear(4, 4));
    b = register_module("b", torch::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto length = static_cast<double>(x.size(1));
    const at::Tensor sum = a->forward(x).sum(1);
    return late ? b->forward(sum) / length : b->forward(sum / length);
  }
  bool late;
  torch::nn::Linear a{nullptr}, b{nullptr};
};

TEST(TracedStage, ExamplesThatAStageCannotTellApart) {
  const at::Tensor x = values({2, 4, 4}, 1), longer = values({2, 8, 4}, 2);
  TraceOptions options;
  options.more = {{Tree::tuple({longer}), {}}};
  const auto traced = [&](bool late) {
    return trace_pipeline(StageModule(std::make_shared<MeanOverLength>(late)), Tree::tuple({x}), {},
                          PipeSplit::at({{"b"}}), options);
  };
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { static_cast<void>(traced(true)); }),
                       "stage 1 is given tensors of the same sizes in two examples"));
  // The same computation, cut after the division.
  const Pipe pipe = traced(false);
  EXPECT_EQ(pipe.stages(), 2);
}

// Tensors that are no buffers, one for each mode.
struct ModeConstant : torch::nn::Module {
  ModeConstant() {
    a = register_module("a", torch::nn::Linear(4, 4));
    b = register_module("b", torch::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    return b->forward(a->forward(x)) * (is_training() ? in_training : in_evaluation);
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  at::Tensor in_training = at::full({4}, 2.0), in_evaluation = at::full({4}, 3.0);
};

TEST(TracedStage, AnotherModeMayUseOtherConstants) {
  const auto model = std::make_shared<ModeConstant>();
  const at::Tensor x = values({2, 4}, 1);
  const Pipe pipe = trace_pipeline(StageModule(model), Tree::tuple({x}), {}, PipeSplit::at({{"b"}}));
  const StageModule first = stage_module(pipe, 0, at::kCPU), last = stage_module(pipe, 1, at::kCPU);
  const auto through = [&] { return last.forward(first.forward(Tree::tuple({x}), {}), {}).tensor(); };
  EXPECT_TRUE(through().equal(model->forward(x)));
  for (const StageModule* stage : {&first, &last}) stage->modules()[0]->eval();
  model->eval();
  EXPECT_TRUE(through().equal(model->forward(x)));
}

TEST(TracedStage, PlainValuesAreThoseOfTheExample) {
  const StageModule model([](at::Tensor x, double factor,
                             const Tree& kwargs) { return x.sin() * factor * kwargs["by"].number(); },
                          {});
  const at::Tensor x = values({2, 3}, 1);
  const Pipe pipe =
      trace_pipeline(model, Tree::tuple({x, 0.5}), Tree::dict({{"by", 3.0}}), PipeSplit::into(1));
  const StageModule stage = stage_module(pipe, 0, at::kCPU);
  EXPECT_TRUE(
      stage.forward(Tree::tuple({x, 0.5}), Tree::dict({{"by", 3.0}})).tensor().equal(x.sin() * 0.5 * 3.0));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         static_cast<void>(stage.forward(Tree::tuple({x, 0.25}), Tree::dict({{"by", 3.0}})));
                       }),
                       "args[1] is 0.25, in the example 0.5"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         static_cast<void>(stage.forward(Tree::tuple({x, 0.5}), Tree::dict({{"by", 2.0}})));
                       }),
                       "kwargs['by'] is 2"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         static_cast<void>(stage.forward(Tree::tuple({x, 0.5}), Tree::dict({{"other", x}})));
                       }),
                       "kwargs['other'] is not in the example"));
}

TEST(TracedStage, KeywordArgumentsOfAStage) {
  const StageModule model = test::maker<test::CrossAttentionImpl>()();
  const at::Tensor x = values({2, kWidth}, 1);
  const Pipe pipe =
      trace_pipeline(model, Tree::tuple({x}), Tree::dict({{"gain", values({2, 1}, 2)}}),
                     PipeSplit::at({{"layer1", SplitPoint::After}, {"layer0", SplitPoint::After}}));
  EXPECT_EQ(pipe.keywords(0), Names{});
  EXPECT_EQ(pipe.keywords(2), Names{"gain"});
  const StageModule last = stage_module(pipe, 2, at::kCPU);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         static_cast<void>(last.forward(Tree::tuple({x, x}), {}));
                       }),
                       "Pipe::keywords"));
}

// -------------------------------------------------------------------------------------------------------
// bad input

TEST(TracePipeline, MistakesAreNamed) {
  const StageModule model = test::maker<test::SkipNetImpl>()();
  const Tree args = Tree::tuple({values({2, kWidth}, 1)});
  const auto message = [&](const PipeSplit& split) {
    return message_of<ValueError>([&] { trace_pipeline(model, args, {}, split); });
  };
  EXPECT_TRUE(has_text(message(PipeSplit::at({{"layer11"}})), "did you mean 'layer1'?"));
  EXPECT_TRUE(has_text(message(PipeSplit::at_marks()), "call pipe_split()"));
  EXPECT_TRUE(has_text(message(PipeSplit::into(0)), "at least 1"));
  EXPECT_TRUE(has_text(message(PipeSplit::into(1000)), "ask for fewer stages"));
  EXPECT_TRUE(has_text(message(PipeSplit::at({{"layer0"}})), "has no operators"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         trace_pipeline(model, values({2, kWidth}, 1), {}, PipeSplit::into(1));
                       }),
                       "args that are a tuple or list"));
  const Pipe pipe = trace_pipeline(model, args, {}, PipeSplit::into(2));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { build_stage(pipe, 2, at::kCPU); }), "0 to 1"));
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { static_cast<void>(pipe.parameter_names(-1)); }), "0 to 1"));
}

TEST(TracePipeline, DistributedTensorsAreRefusedByName) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const comm::MeshGroups mesh = world.mesh("cpu", {{"tp", 2}});
    const at::Tensor x = values({2, kWidth}, 1);
    torch::nn::Sequential model(torch::nn::Linear(kWidth, 8), torch::nn::Tanh(),
                                torch::nn::Linear(8, kWidth));
    const auto message = [&](const at::Tensor& input) {
      return message_of<TypeError>(
          [&] { trace_pipeline(model, Tree::tuple({input}), {}, PipeSplit::into(2)); });
    };
    const std::string of_argument = message(distribute_tensor(x, mesh, {Replicate{}}));
    EXPECT_TRUE(has_text(of_argument, "args[0]"));
    EXPECT_TRUE(has_text(of_argument, "trace the model with plain tensors"));
    parallelize_module(*model, mesh, {{"0", colwise_parallel()}, {"2", rowwise_parallel()}});
    const std::string of_parameter = message(x);
    EXPECT_TRUE(has_text(of_parameter, "0.weight"));
    EXPECT_TRUE(has_text(of_parameter, "made of modules (StageModule)"));
    // The model is as it was.
    EXPECT_EQ(to_local(model->named_parameters()["0.weight"]).sizes(), at::IntArrayRef({4, kWidth}));
    EXPECT_FALSE(is_fake(to_local(model->named_parameters()["0.weight"])));
  });
}

TEST(TracePipeline, AScheduleForAnotherNumberOfStages) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const Pipe pipe = skip_pipe(4);
    PipelineOptions options{world};
    options.info = pipe.info();
    const StageModule module = stage_module(pipe, world.rank(), at::kCPU);
    const PipelineStage stage(module, world.rank(), 2, at::kCPU);
    EXPECT_TRUE(
        has_text(message_of<ValueError>([&] { Schedule1F1B(stage, 4, test::square_loss(), options); }),
                 "as the model was cut"));
  });
}

TEST(TracePipeline, RanksWithDifferentTraces) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const Pipe pipe = skip_pipe(2 + world.rank());
    EXPECT_TRUE(has_text(message_of<PipeliningMetadataError>([&] { pipe.check_equal(world.group()); }),
                         "the same model, example and split on all ranks"));
    const Pipe same = skip_pipe(2);
    EXPECT_NO_THROW(same.check_equal(world.group()));
  });
}

// The module is as it was: values, gradients, modes, random numbers.
TEST(TracePipeline, LeavesNoTrace) {
  const StageModule model = test::maker<test::SmallResNetImpl>()(),
                    untouched = test::maker<test::SmallResNetImpl>()();
  torch::manual_seed(1);
  const at::Tensor next = at::rand({3});
  torch::manual_seed(1);
  trace_pipeline(model, Tree::tuple({values({2, 4, 5, 6}, 1)}), {}, PipeSplit::into(2));
  EXPECT_TRUE(at::rand({3}).equal(next));
  const auto &a = *model.modules()[0], &b = *untouched.modules()[0];
  for (const auto& item : b.named_buffers()) EXPECT_TRUE(a.named_buffers()[item.key()].equal(item.value()));
  for (const auto& item : b.named_parameters()) {
    EXPECT_TRUE(a.named_parameters()[item.key()].equal(item.value()));
    EXPECT_FALSE(a.named_parameters()[item.key()].grad().defined());
  }
  for (const auto& each : a.modules()) EXPECT_TRUE(each->is_training());
}

}  // namespace trace_pipeline_test
}  // namespace penstock
