// Training with captured graphs (training.compile = graph): losses, gradients and parameters have the bits of
// training that runs operator by operator, in every layout and schedule.
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/random.h"
#include "penstock/schedule.h"
#include "penstock/step_context.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/job/configured_activations.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/parity.h"
#include "penstock/trainable_model.h"
#include "penstock/trainer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace compiled_job_test {

using namespace penstock::test;

const Options kGraph = {"--compile", "graph"};
// Everything that a forward reads or writes besides its arguments: routers with counters, mixtures of depths,
// dropout, masks, auxiliary losses, multi-token prediction, a tied head.
const Options kEverything =
    with(with(hybrid_blocks(), hybrid_losses()), {"--router_bias_rate", "0.002", "--dropout", "0.1"});
// A block of each letter.
Options of_pattern(const std::string& pattern) {
  Options options = hybrid_blocks();
  options.at(1) = pattern;
  return with(options, {"--dropout", "0.1"});
}
const Options kLetters = of_pattern("AMEF");
const Options kTransformer = {"--dropout", "0.1"};
// What tensor parallelism can split.
const Options kSplittable = {"--pattern",      "AEAE", "--experts", "4",
                             "--expert_width", "16",   "--dropout", "0.1"};

TrainedJob train(const Layout& layout, const Options& options, int steps = 3) {
  return train_job(layout, options,
                   {.steps = steps, .validates = true, .validates_first = true, .keeps = {.local = true}});
}

void expect_same(const TrainedJob& ours, const TrainedJob& plain) {
  EXPECT_EQ(ours.losses(), plain.losses());
  EXPECT_EQ(ours.norms(), plain.norms());
  EXPECT_EQ(ours.validation, plain.validation);
  EXPECT_GT(plain.local.size(), 20u);
  expect_equal_tensors(ours.local, plain.local);
  expect_equal_tensors(ours.buffers, plain.buffers);
  ASSERT_EQ(ours.steps.size(), plain.steps.size());
  for (std::size_t i = 0; i < plain.steps.size(); ++i) {
    ASSERT_EQ(ours.steps[i].auxiliary.size(), plain.steps[i].auxiliary.size());
    for (std::size_t k = 0; k < plain.steps[i].auxiliary.size(); ++k) {
      EXPECT_EQ(ours.steps[i].auxiliary[k].value, plain.steps[i].auxiliary[k].value)
          << plain.steps[i].auxiliary[k].name;
      EXPECT_NE(plain.steps[i].auxiliary[k].value, 0);
    }
  }
}

// Every stage is captured once for training, and once for the validation before the first step.
void expect_captured_once(const TrainedJob& job, const Layout& layout) {
  const std::int64_t stages = layout.pp * layout.virtual_stages * layout.dp * layout.tp;
  EXPECT_EQ(job.steps.at(0).first_captures, 2 * stages);
  EXPECT_GT(job.steps[0].compiled.at(0).nodes, 10);
  EXPECT_GT(job.steps[0].compiled[0].seconds, 0);
  for (const StepOutcome& step : job.steps) EXPECT_EQ(step.recaptures, 0);
  for (std::size_t i = 1; i < job.steps.size(); ++i) EXPECT_EQ(job.steps[i].first_captures, 0);
}

struct Case {
  Layout layout;
  Options model = kEverything;
  Options options = {};
};

class CompiledJob : public ::testing::TestWithParam<Case> {};

TEST_P(CompiledJob, HasTheBitsOfTrainingOperatorByOperator) {
  const Options options = with(GetParam().model, GetParam().options);
  const TrainedJob plain = train(GetParam().layout, options);
  const TrainedJob graphs = train(GetParam().layout, with(options, kGraph));
  expect_same(graphs, plain);
  expect_captured_once(graphs, GetParam().layout);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, CompiledJob,
    ::testing::Values(
        Case{{.name = "Transformer"}, kTransformer}, Case{{.name = "Letters"}, kLetters},
        Case{{.name = "Everything"}}, Case{{.name = "Untied"}, kEverything, {"--tie_head", "false"}},
        Case{{.name = "OneF1B", .pp = 2}}, Case{{.name = "GPipe", .pp = 2, .schedule = "GPipe"}, kLetters},
        Case{{.name = "Interleaved", .pp = 2, .virtual_stages = 2, .schedule = "Interleaved1F1B"}},
        Case{{.name = "LoopedBFS", .pp = 2, .virtual_stages = 2, .schedule = "LoopedBFS"}, kLetters},
        Case{{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"}},
        Case{{.name = "InterleavedZeroBubble",
              .pp = 2,
              .virtual_stages = 2,
              .schedule = "InterleavedZeroBubble"},
             kLetters},
        Case{{.name = "VHalf", .pp = 2, .virtual_stages = 2, .schedule = "VHalf"}, kTransformer},
        Case{{.name = "VMin", .pp = 2, .virtual_stages = 2, .schedule = "VMin"}, kLetters},
        Case{{.name = "ZB2P", .pp = 2, .schedule = "ZB2P"}},
        Case{{.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV"}},
        Case{{.name = "DualPipe", .pp = 2, .virtual_stages = 2, .schedule = "DualPipe"}},
        Case{{.name = "ShardedZBV", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "ZBVZeroBubble"},
             kEverything,
             {"--shard", "2"}},
        Case{
            {.name = "TensorParallelZBV", .pp = 2, .virtual_stages = 2, .tp = 2, .schedule = "ZBVZeroBubble"},
            kTransformer},
        Case{{.name = "SequenceParallelZBV",
              .pp = 2,
              .virtual_stages = 2,
              .tp = 2,
              .schedule = "ZBVZeroBubble"},
             kTransformer,
             {"--sequence_parallel", "true"}},
        Case{{.name = "Bfloat16ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
             kEverything,
             {"--precision", "bf16"}},
        Case{{.name = "Replicated", .dp = 2}}, Case{{.name = "Accumulated", .accumulation = 2}},
        Case{{.name = "AccumulatedStages", .pp = 2, .accumulation = 2}, kTransformer},
        Case{{.name = "Bfloat16", .pp = 2}, kEverything, {"--precision", "bf16"}},
        Case{{.name = "Bfloat16A"}, of_pattern("AAAA"), {"--precision", "bf16"}},
        Case{{.name = "Bfloat16M"}, of_pattern("MMMM"), {"--precision", "bf16"}},
        Case{{.name = "Bfloat16E"}, of_pattern("EEEE"), {"--precision", "bf16"}},
        Case{{.name = "Bfloat16F"}, of_pattern("FFFF"), {"--precision", "bf16"}},
        Case{{.name = "Bfloat16Transformer"}, kTransformer, {"--precision", "bf16"}},
        Case{{.name = "Sharded", .dp = 2}, kEverything, {"--shard", "2"}},
        Case{{.name = "ShardedStages", .pp = 2, .dp = 2}, kEverything, {"--shard", "2"}},
        Case{{.name = "ShardedTransformer", .dp = 2}, kTransformer, {"--shard", "2"}},
        Case{{.name = "ReplicatedShards", .dp = 4}, kTransformer, {"--shard", "2"}},
        Case{{.name = "TensorParallel", .tp = 2}, kSplittable},
        Case{{.name = "TensorParallelTransformer", .pp = 2, .tp = 2}, kTransformer},
        Case{{.name = "SequenceParallel", .tp = 2}, kTransformer, {"--sequence_parallel", "true"}},
        Case{{.name = "ShardedTensorParallel", .dp = 2, .tp = 2}, kTransformer, {"--shard", "2"}}),
    [](const auto& info) { return info.param.layout.name; });

// ---- activation budgets ----

class BudgetedJob : public ::testing::TestWithParam<Case> {};

TEST_P(BudgetedJob, HasTheBitsOfTrainingOperatorByOperator) {
  const Options options = with(GetParam().model, GetParam().options);
  const TrainedJob plain = train(GetParam().layout, options, 2);
  for (const char* budget : {"0", "0.3", "1"}) {
    SCOPED_TRACE(budget);
    expect_same(train(GetParam().layout, with(options, with(kGraph, {"--activation_budget", budget})), 2),
                plain);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, BudgetedJob,
    ::testing::Values(Case{{.name = "Transformer"}, kTransformer}, Case{{.name = "Letters"}, kLetters},
                      Case{{.name = "Everything"}}, Case{{.name = "OneF1B", .pp = 2}},
                      Case{{.name = "GPipe", .pp = 2, .schedule = "GPipe"}, kLetters},
                      Case{{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"}},
                      Case{{.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV"},
                           kTransformer},
                      Case{{.name = "Bfloat16", .pp = 2}, kTransformer, {"--precision", "bf16"}},
                      Case{{.name = "Sharded", .dp = 2}, kEverything, {"--shard", "2"}},
                      Case{{.name = "Replicated", .dp = 2}, kTransformer},
                      Case{{.name = "TensorParallel", .tp = 2}, kTransformer}),
    [](const auto& info) { return info.param.layout.name; });

TEST(CompiledJobs, RulesForModulesChangeNoBit) {
  const Layout layout{.name = "pp2", .pp = 2};
  const TrainedJob plain = train(layout, kTransformer, 2);
  expect_same(
      train(layout,
            with(kTransformer, with(kGraph, {"--activation_policy",
                                             "blocks.*.attention: save,blocks: recompute,norm: save"})),
            2),
      plain);
}

TEST(CompiledJobs, RulesForModulesThatTheModelDoesNotHaveAreNamed) {
  // In every layout, also where a rank has another part of the model.
  for (const Layout& layout : {Layout{.name = "one"}, Layout{.name = "pp2", .pp = 2}}) {
    const std::string refusal = message_of<ConfigError>([&] {
      const TrainConfig config = config_of(
          layout, with(kTransformer, with(kGraph, {"--activation_policy", "blocks.*.atention: save"})));
      check_activation_policy(config, configured_model(config)->plan());
    });
    EXPECT_TRUE(has_text(refusal, "training.activation_policy")) << refusal;
    EXPECT_TRUE(has_text(refusal, "did you mean \"blocks.*.attention\"?")) << refusal;
  }
}

// A checkpoint of one way is continued in the other.
TEST(CompiledJobs, ContinueTheCheckpointsOfPlainOnesAndTheOtherWay) {
  const Layout layout{.name = "pp2", .pp = 2};
  const TrainedJob whole = train_job(layout, kEverything, {.steps = 4, .keeps = {.parameters = true}});
  for (const bool graph_first : {true, false}) {
    SCOPED_TRACE(graph_first);
    const Options graphs = with(kEverything, kGraph);
    const ScratchFolder folder;
    train_job(layout, graph_first ? graphs : kEverything, {.steps = 2, .to = &folder});
    const TrainedJob rest = train_job(layout, graph_first ? kEverything : graphs,
                                      {.steps = 4, .from = &folder, .keeps = {.parameters = true}});
    EXPECT_EQ(rest.losses(), whole.after(2).losses());
    expect_equal_tensors(rest.parameters, whole.parameters);
    expect_equal_tensors(rest.buffers, whole.buffers);
  }
}

// Small configurations at random.
void expect_same_at(std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto one_of = [&](const std::vector<std::string>& all) { return all[random() % all.size()]; };
  const auto coin = [&] { return random() % 2 == 0; };
  Layout layout{.name = "random"};
  layout.pp = coin() ? 2 : 1;
  if (layout.pp == 2) {
    layout.schedule = one_of({"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "ZB2P",
                              "InterleavedZeroBubble", "DualPipeV", "DualPipe"});
    layout.virtual_stages =
        layout.schedule == "1F1B" || layout.schedule == "GPipe" || layout.schedule == "ZB2P" ? 1 : 2;
  }
  layout.dp = coin() ? 2 : 1;
  layout.accumulation = coin() ? 2 : 1;
  layout.microbatch_size = 1 + static_cast<int>(random() % 3);
  std::string pattern;
  for (int i = 0; i < 4; ++i) pattern += one_of({"A", "M", "E", "F"});
  Options options = hybrid_blocks();
  options.at(1) = pattern;
  options.at(3) = one_of({"true", "false"});  // attention_feed
  options = with(options, {"--dropout", one_of({"0", "0.2"}), "--precision", one_of({"fp32", "fp32", "bf16"}),
                           "--tie_head", one_of({"true", "false"})});
  if (coin()) options = with(options, {"--multi_token_depth", "1"});
  if (coin()) options = with(options, {"--depth_layers", one_of({"1", "0,2"})});
  if (layout.dp == 2 && coin()) options = with(options, {"--shard", "2"});
  std::string all;
  for (const std::string& each : options) all += each + " ";
  SCOPED_TRACE(layout.schedule + " pp " + std::to_string(layout.pp) + " dp " + std::to_string(layout.dp) +
               " accumulation " + std::to_string(layout.accumulation) + " " + all);
  const TrainedJob plain =
      train_job(layout, options, {.steps = 2, .validates = true, .keeps = {.local = true}});
  const TrainedJob graphs =
      train_job(layout, with(options, kGraph), {.steps = 2, .validates = true, .keeps = {.local = true}});
  EXPECT_EQ(graphs.losses(), plain.losses());
  EXPECT_EQ(graphs.validation, plain.validation);
  expect_equal_tensors(graphs.local, plain.local);
  expect_equal_tensors(graphs.buffers, plain.buffers);
  EXPECT_GT(graphs.steps.at(0).first_captures, 0);
}

TEST(CompiledJobs, HaveTheSameBitsInRandomConfigurations) {
  const char* given = std::getenv("PENSTOCK_RANDOM_JOBS");
  const int count = given == nullptr ? 6 : std::atoi(given);
  for (int seed = 0; seed < count; ++seed) expect_same_at(static_cast<std::uint32_t>(seed));
}

TEST(CompiledJobs, ParityComparesWithAProcessWithoutGraphs) {
  EXPECT_EQ(one_process(config_of({.name = "pp2", .pp = 2}, kGraph)).training.compile, "off");
}

// Graphs in a layout against one process without them, as penstock parity compares.
TEST(CompiledJobs, HaveParityWithOneProcess) {
  for (const Layout& layout :
       {Layout{.name = "1F1B", .pp = 2}, Layout{.name = "GPipe", .pp = 2, .schedule = "GPipe"},
        Layout{.name = "interleaved", .pp = 2, .virtual_stages = 2, .schedule = "Interleaved1F1B"},
        Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
        Layout{.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV"},
        Layout{.name = "dp", .dp = 2}, Layout{.name = "shard", .pp = 2, .dp = 2},
        Layout{.name = "tp", .tp = 2}}) {
    SCOPED_TRACE(layout.name);
    const TrainConfig config =
        config_of(layout, with(kGraph, {"--dropout", "0.1", "--shard", layout.name == "shard" ? "2" : "1"}));
    const ScratchFolder scratch;
    const auto record = [&](const TrainConfig& of, const std::string& side) {
      comm::run_ranks(static_cast<int>(of.layout.ranks), std::chrono::seconds(120), [&](comm::World& world) {
        record_side(world, of, small_data().open(of), scratch / side, 2, {});
      });
    };
    record(one_process(config), "one");
    record(config, "layout");
    const ParityReport report =
        compare_sides(scratch / "one", scratch / "layout", 2, parity_tolerance(config));
    EXPECT_TRUE(report.ok()) << to_text(report, true);
  }
}

// A registered model that does not fit into a graph: it branches on a value, or keeps a tensor in a member.
struct OwnStage : models::ModelStage {
  OwnStage(const models::StagePart& which, const models::ModelPlan& plan, bool is_branching)
      : part_(which), plan_(plan), branches(is_branching) {
    if (which.has_embed())
      embed = register_module("embed", torch::nn::Embedding(plan.vocabulary, plan.width));
    for (std::int64_t i = which.first_block; i < which.end_block; ++i)
      mixes.push_back(register_module("mix" + std::to_string(i), torch::nn::Linear(plan.width, plan.width)));
    if (which.has_head()) head = register_module("head", torch::nn::Linear(plan.width, plan.vocabulary));
  }
  const models::StagePart& part() const override { return part_; }
  std::int64_t context() const override { return plan_.context; }
  at::Tensor forward_with(at::Tensor x, const Tree&) override {
    if (embed) x = embed->forward(x);
    for (torch::nn::Linear& mix : mixes) x = x + at::gelu(mix->forward(x));
    if (branches && head && !StepContext::current()->trial && x.sum().item<float>() > 0) x = x.tanh();
    if (!branches) kept = x.detach().mean();
    return head ? head->forward(x) : x;
  }
  std::vector<models::AuxiliaryLoss> take_auxiliary_losses() override {
    if (branches) return {};
    return {{"mean", kept.to(at::kDouble), 0.1}};
  }
  void set_initial_values(std::uint64_t seed) override {
    const at::NoGradGuard no_grad;
    for (auto& each : named_parameters())
      keyed_normal_(each.value(), {.seed = seed, .layer = layer_from_name(each.key())}, 0, 0.05);
  }
  models::StagePart part_;
  models::ModelPlan plan_;
  bool branches;
  at::Tensor kept;
  torch::nn::Embedding embed{nullptr};
  std::vector<torch::nn::Linear> mixes;
  torch::nn::Linear head{nullptr};
};

struct OwnModel : models::TrainableModel {
  OwnModel(const ModelConfig& model, bool is_branching)
      : branches(is_branching),
        sizes{.vocabulary = model.vocabulary, .width = model.width, .context = model.context},
        whole(plan_from_stages(sizes, model.layers, "mix",
                               [this](const auto& part) { return make_stage(part); })) {
    if (!branches) whole.auxiliary = {{.name = "mean", .weight = 0.1}};
  }
  const models::ModelPlan& plan() const override { return whole; }
  std::shared_ptr<models::ModelStage> make_stage(const models::StagePart& part) const override {
    return std::make_shared<OwnStage>(part, sizes, branches);
  }
  bool branches;
  models::ModelPlan sizes, whole;
};

// The text of the error of each rank.
std::vector<std::string> errors_of_ranks(const std::string& type, bool branches) {
  register_model(type, [branches](const TrainConfig& config) {
    return std::make_shared<OwnModel>(config.model, branches);
  });
  const TrainConfig config =
      config_of({.name = "pp2", .pp = 2}, with(kGraph, {"--model.type", type, "--document_mask", "false"}));
  std::vector<std::string> errors(2);
  comm::run_ranks(2, std::chrono::seconds(60), [&](comm::World& world) {
    try {
      TrainingJob job(world, config, small_data().open(config));
      job.train_step();
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  return errors;
}

TEST(CompiledJobs, NameControlFlowThatDependsOnValuesOnEveryRank) {
  for (const std::string& error : errors_of_ranks("branches on a value", true)) {
    EXPECT_TRUE(has_text(error, "stage 1, microbatch 0"));
    EXPECT_TRUE(has_text(error, "aten::_local_scalar_dense"));
  }
}

TEST(CompiledJobs, RefuseTensorsThatAModelKeepsWithoutDeclaringThem) {
  bool any = false;
  for (const std::string& error : errors_of_ranks("keeps a tensor", false))
    any = any || error.find("kept it from the capture of its stage as a graph") != std::string::npos;
  EXPECT_TRUE(any);
}

TEST(CompiledJobs, RefuseByNameWhatGraphsDoNotSupport) {
  const auto message = [](const Layout& layout, const Options& options) {
    try {
      config_of(layout, with(options, kGraph));
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_TRUE(has_text(message({.name = "one"}, {"--recompute", "block"}), "training.recompute"));
  EXPECT_TRUE(has_text(message({.name = "ep", .dp = 2}, with(kEverything, {"--ep", "2"})), "layout.ep"));
}

// The best schedule is chosen with graphs as without.
TEST(CompiledJobs, ScheduleIsChosenAsWithoutGraphs) {
  EXPECT_EQ(
      config_of({.name = "auto", .pp = 2, .virtual_stages = 2, .schedule = "auto"}, kGraph).layout.schedule,
      "ZBVZeroBubble");
}

// Which operators run in W is reported for schedules that have W, and only for those.
TEST(CompiledJobs, OperatorsThatWaitAreReported) {
  for (const char* schedule : {"ZBVZeroBubble", "Interleaved1F1B"}) {
    const TrainedJob job = train({.name = "pp2", .pp = 2, .virtual_stages = 2, .schedule = schedule},
                                 with(kTransformer, kGraph), 1);
    std::int64_t deferred = 0;
    for (const CompiledForward& forward : job.steps.at(0).compiled) {
      deferred += forward.deferred;
      EXPECT_LT(forward.deferred, forward.nodes / 2);
    }
    EXPECT_EQ(deferred > 0, std::string(schedule) == "ZBVZeroBubble");
  }
}

// A schedule from a file is split if it has weight backwards.
TEST(CompiledJobs, SchedulesFromFiles) {
  const ScratchFolder folder;
  const Layout generated{.name = "pp2", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"};
  Layout read = generated;
  read.schedule = (folder / "schedule.csv").string();
  {
    std::ofstream file(read.schedule);
    file << schedule::to_csv(configured_schedule(config_of(generated, {}).layout));
  }
  const TrainedJob plain = train(generated, kTransformer);
  const TrainedJob graphs = train(read, with(kTransformer, kGraph));
  expect_same(graphs, plain);
  std::int64_t deferred = 0;
  for (const CompiledForward& forward : graphs.steps.at(0).compiled) deferred += forward.deferred;
  EXPECT_GT(deferred, 0);
}

}  // namespace compiled_job_test
}  // namespace penstock::train
