// Extension points of stages: trial hooks, modules that reduce their own gradients, arguments with a graph,
// PipeInfo; and what is logged of a step.
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>

#include "penstock/base/log.h"
#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/pipeline/runtime/pipe_info.h"
#include "penstock/pipeline/stage/gradient_sync.h"
#include "penstock/step_context.h"
#include "penstock/torch/compat/streams.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"
#include "tests/throws.h"

namespace penstock {
namespace stage_hooks_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Block;
using test::has_text;
using test::kWidth;

// ---------------------------------------------------------------------------------------- gradients that
// modules reduce themselves

// Like a data-parallel wrapper: each backward reduces the gradient of its weight, unless that is disabled.
struct ReducedImpl : torch::nn::Module, GradientSync {
  explicit ReducedImpl(int number) : block(register_module("block", Block(number))) {
    block->weight.register_hook([this](const at::Tensor& gradient) {
      ++(enabled ? reductions : additions);
      if (enabled) reduced_with = *StepContext::current()->microbatch;
      return gradient;
    });
  }
  bool set_gradient_sync(bool on) noexcept override { return std::exchange(enabled, on); }
  at::Tensor forward(const at::Tensor& x) {
    const auto context = StepContext::current();
    if (context->trial) {
      trial_with_sync |= enabled;
    } else if (enabled) {
      forwards_with_sync.insert(*context->microbatch);
    } else {
      ++forwards_without;
    }
    return block->forward(x);
  }
  Block block;
  bool enabled = true;
  bool trial_with_sync = false;
  int reductions = 0, additions = 0, forwards_without = 0;
  std::set<std::int64_t> forwards_with_sync;
  std::int64_t reduced_with = -1;
};
TORCH_MODULE(Reduced);

// A module that contains it.
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(int number) : inner(register_module("inner", Reduced(number))) {}
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x); }
  Reduced inner;
};
TORCH_MODULE(Outer);

TEST(GradientSync, OncePerStepInEverySchedule) {
  for (const ScheduleKind kind : {ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZB2P,
                                  ScheduleKind::ZBVZeroBubble, ScheduleKind::DualPipeV}) {
    SCOPED_TRACE(schedule::to_text(kind));
    comm::run_ranks(2, 30s, [&](comm::World& world) {
      const int each = schedule::required_stages_per_rank(kind).value_or(1), count = 2 * each;
      const schedule::Schedule whole = schedule::generate(
          kind, {.ranks = 2, .stages_per_rank = each, .microbatches = 6, .group_size = {}});
      std::vector<Outer> modules;
      std::vector<PipelineStage> stages;
      for (const int index : whole.stages().stages_of(world.rank())) {
        modules.emplace_back(index);
        stages.emplace_back(StageModule(modules.back()), index, count, at::kCPU);
      }
      PipelineRuntime pipeline(stages, whole, test::square_loss(), {world});
      const test::Batch batch = test::plain_batch(0, 12);
      pipeline.step(batch.args, {}, batch.target);
      for (std::size_t i = 0; i < modules.size(); ++i) {
        const ReducedImpl& module = *modules[i]->inner;
        EXPECT_EQ(module.reductions, 1);
        EXPECT_EQ(module.additions, 5);
        EXPECT_EQ(module.forwards_without, 5);
        // The microbatch with the last weight gradients in the row.
        std::int64_t last = -1;
        for (const schedule::Slot slot : whole.row(world.rank()))
          for (const schedule::Action& action : slot)
            if (action.stage() == stages[i].index() &&
                (action.kind() == schedule::ActionKind::Backward ||
                 action.kind() == schedule::ActionKind::BackwardWeight))
              last = *action.microbatch();
        EXPECT_EQ(module.forwards_with_sync, std::set<std::int64_t>{last});
        EXPECT_EQ(module.reduced_with, last);
        EXPECT_FALSE(module.trial_with_sync);
        EXPECT_TRUE(module.enabled);
      }
      // Evaluation has nothing to reduce and changes nothing.
      pipeline.eval(batch.args);
      for (const Outer& module : modules) EXPECT_EQ(module->inner->forwards_without, 5);
    });
  }
}

// Some parameters get their gradients in I, others in W: either would be reduced too early.
TEST(GradientSync, TheLastIAndTheLastWAreOfOneMicrobatch) {
  const auto made = [](const StageModule& module, const char* rows) {
    comm::run_ranks(1, 20s, [&](comm::World& world) {
      const PipelineStage stage(module, 0, 1, at::kCPU);
      PipelineRuntime pipeline({stage}, schedule::parse_schedule(rows), test::square_loss(), {world});
      const test::Batch batch = test::plain_batch(0, 4);
      pipeline.step(batch.args, {}, batch.target);
    });
  };
  for (const char* rows : {"0F0,0F1,0I0,0I1,0W1,0W0\n", "0F0,0F1,0I0,0B1,0W0\n"}) {
    SCOPED_TRACE(rows);
    const std::string text = test::message_of<ValueError>([&] { made(StageModule(Outer(0)), rows); });
    EXPECT_TRUE(has_text(text, "backwards of stage 0, whose modules reduce their own gradients"));
    EXPECT_TRUE(has_text(text, "the last B or I of microbatch 1, the last B or W of microbatch 0"));
    made(StageModule(Block(0)), rows);
  }
  for (const char* rows : {"0F0,0F1,0I0,0I1,0W0,0W1\n", "0F0,0F1,0I0,0W0,0B1\n"}) {
    SCOPED_TRACE(rows);
    const Outer outer(0);
    made(StageModule(outer), rows);
    EXPECT_EQ(outer->inner->reductions, 1);
    EXPECT_EQ(outer->inner->reduced_with, 1);
  }
}

TEST(GradientSync, IsRestoredWhenAModuleThrows) {
  Reduced module(0);
  const auto body = [&](comm::World& world) {
    const StageModule failing(
        [module](at::Tensor x) mutable {
          if (!StepContext::current()->trial) throw std::runtime_error("no");
          return module->forward(x);
        },
        {module.ptr()});
    const PipelineStage stage(failing, 0, 1, at::kCPU);
    ScheduleGPipe pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 8);
    pipeline.step(batch.args, {}, batch.target);
  };
  EXPECT_THROW(comm::run_ranks(1, 20s, body), StageForwardError);
  EXPECT_TRUE(module->enabled);
}

// ---------------------------------------------------------------------------------------- arguments with a
// graph

TEST(Arguments, NonLeavesRetainTheirGradient) {
  const test::Batch batch = test::plain_batch(0, 8);
  const at::Tensor seed = batch.args[0].tensor();
  // In one process, from a leaf.
  const at::Tensor leaf = (seed * seed).detach().requires_grad_();
  Block first(0), second(1);
  const std::vector<Tree> xs = split_tree(leaf, 4), targets = split_tree(batch.target, 4);
  for (std::size_t m = 0; m < 4; ++m)
    test::square_loss()(Tree(second->forward(first->forward(xs[m].tensor()))), targets[m]).backward();

  const WarningCapture capture;
  comm::run_ranks(2, 20s, [&](comm::World& world) {
    const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU);
    Schedule1F1B pipeline(stage, 4, test::square_loss(), {world});
    if (world.rank() == 1) {
      for (int step = 0; step < 2; ++step) pipeline.step({}, {}, batch.target);
      return;
    }
    const at::Tensor root = seed.clone().requires_grad_();
    const at::Tensor x = root * root;  // saves what its backward needs, which can be used once
    pipeline.step(Tree::tuple({x}));
    ASSERT_TRUE(x.grad().defined());
    EXPECT_TRUE(at::allclose(x.grad(), leaf.grad(), 1e-6, 1e-7));
    EXPECT_FALSE(root.grad().defined());
    // The caller continues the backward.
    x.backward(x.grad().clone());
    EXPECT_TRUE(at::allclose(root.grad(), 2 * seed * leaf.grad(), 1e-6, 1e-7));
    const at::Tensor y = root * root;
    pipeline.step(Tree::tuple({y}));
    EXPECT_TRUE(at::allclose(y.grad(), leaf.grad(), 1e-6, 1e-7));
  });
  ASSERT_EQ(capture.warnings().size(), 1U);
  EXPECT_TRUE(has_text(capture.warnings()[0].message, "not a leaf of autograd (MulBackward0)"));
}

TEST(Arguments, LeavesGetTheirGradientWithoutAWarning) {
  const WarningCapture capture;
  comm::run_ranks(1, 20s, [&](comm::World& world) {
    const PipelineStage stage(StageModule(Block(0)), 0, 1, at::kCPU);
    ScheduleGPipe pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 8);
    const at::Tensor x = batch.args[0].tensor().clone().requires_grad_();
    pipeline.step(Tree::tuple({x}), {}, batch.target);
    EXPECT_TRUE(x.grad().defined());
  });
  EXPECT_TRUE(capture.warnings().empty());
}

// --------------------------------------------------------------------------------------------------------------------
// trial hooks

TEST(TrialHooks, TakeThePlaceOfForwardAndGradients) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    int forwards = 0, gradients = 0;
    StageOptions options;
    options.trial = TrialRun::Fake;
    options.trial_hooks.forward = [&](const StageModule& module, const Tree& args, const Tree& kwargs) {
      EXPECT_TRUE(StepContext::current()->trial);
      EXPECT_EQ(module.parameters().size(), 3U);
      EXPECT_EQ(kwargs.size(), 0U);
      ++forwards;
      const at::Tensor& x = args[0].tensor();
      return Tree(x + module.parameters()[1]);
    };
    options.trial_hooks.input_grads = [&](const std::vector<at::Tensor>& outputs,
                                          const std::vector<at::Tensor>& inputs,
                                          const std::vector<at::Tensor>& output_grads) {
      ++gradients;
      EXPECT_EQ(outputs.size(), 1U);
      EXPECT_EQ(output_grads.size(), 1U);
      std::vector<at::Tensor> found;
      for (const at::Tensor& input : inputs) found.push_back(at::zeros_like(input));
      return found;
    };
    Block block(world.rank());
    const StageModule module(
        [block](at::Tensor x) mutable {
          if (StepContext::current()->trial) throw std::logic_error("this module cannot be tried");
          return block->forward(x);
        },
        {block.ptr()});
    const PipelineStage stage(module, world.rank(), 2, at::kCPU, options);
    Schedule1F1B pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 8);
    pipeline.step(batch.args, {}, batch.target);
    EXPECT_EQ(forwards, 1);
    // The arguments of the first stage require no grad: no gradient is computed there.
    EXPECT_EQ(gradients, world.rank() == 0 ? 0 : 1);
    for (const at::Tensor& parameter : stage.parameters())
      EXPECT_GT(parameter.grad().abs().sum().item<float>(), 0);
  });
}

TEST(TrialHooks, AnotherNumberOfGradientsIsRefused) {
  std::string said;
  const auto body = [&](comm::World& world) {
    StageOptions options;
    options.trial_hooks.input_grads = [](const auto&, const auto&, const auto&) {
      return std::vector<at::Tensor>();
    };
    const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU, options);
    Schedule1F1B pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 8);
    try {
      pipeline.step(batch.args, {}, batch.target);
    } catch (const PipeliningMetadataError& error) {
      said = error.what();
      throw;
    }
  };
  EXPECT_ANY_THROW(comm::run_ranks(2, 20s, body));
  EXPECT_TRUE(has_text(said, "gradients from trial_hooks.input_grads of stage 1: got 0"));
}

// -------------------------------------------------------------------------------------------------------
// PipeInfo

TEST(PipeInfo, IsComparedWithTheSchedule) {
  const auto generate = [](ScheduleKind kind, int ranks, int each) {
    return schedule::generate(kind,
                              {.ranks = ranks, .stages_per_rank = each, .microbatches = 8, .group_size = {}});
  };
  const auto refusal = [](const PipeInfo& info, const schedule::Schedule& schedule,
                          bool has_loss) -> std::string {
    try {
      check_pipe_info(info, schedule, has_loss);
    } catch (const ValueError& error) {
      return error.what();
    }
    return "";
  };
  const auto gpipe = generate(ScheduleKind::GPipe, 4, 1);
  EXPECT_EQ(refusal({"embed, 2 blocks | 2 blocks | ...", 4, true}, gpipe, true), "");
  EXPECT_EQ(refusal({"graph", 4, false}, gpipe, false), "");
  // A bidirectional pipeline runs every part twice.
  EXPECT_EQ(refusal({"graph", 4, true}, generate(ScheduleKind::DualPipe, 4, 2), true), "");
  EXPECT_TRUE(has_text(refusal({"embed | head", 2, true}, gpipe, true),
                       "stages of a pipeline, cut as 'embed | head': got 4 in the schedule, expected 2"));
  EXPECT_TRUE(
      has_text(refusal({"graph", 4, true}, gpipe, false), "loss of a pipeline, cut as 'graph': got none"));
  EXPECT_TRUE(
      has_text(refusal({"graph", 4, false}, gpipe, true), "loss of a pipeline, cut as 'graph': got one"));
  EXPECT_TRUE(has_text(refusal({"graph", 4, true}, forward_only(gpipe), true),
                       "schedule of a pipeline, cut as 'graph': got only forwards"));
  // A whole graph would obscure the message.
  EXPECT_LT(refusal({std::string(100'000, 'x'), 3, true}, gpipe, true).size(), 1000U);
}

TEST(PipeInfo, AMismatchIsAnErrorOnEveryRank) {
  std::mutex mutex;
  int refused = 0;
  const auto body = [&](comm::World& world) {
    PipelineOptions options{world};
    options.info = PipeInfo{"graph", 3, true};
    const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU);
    try {
      const ScheduleGPipe pipeline(stage, 4, test::square_loss(), options);
    } catch (const ValueError&) {
      const std::lock_guard lock(mutex);
      ++refused;
      throw;
    }
  };
  EXPECT_THROW(comm::run_ranks(2, 20s, body), ValueError);
  EXPECT_EQ(refused, 2);
}

// -------------------------------------------------------------------------------------------------------------
// the log of transfers and actions

std::string logged(const char* value, const std::function<void(comm::World&)>& body,
                   spdlog::level::level_enum level = spdlog::level::info) {
  value == nullptr ? unsetenv("PENSTOCK_TRACE_TRANSFERS") : setenv("PENSTOCK_TRACE_TRANSFERS", value, 1);
  std::ostringstream out;
  const auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(out);
  sink->set_pattern("%v");
  log().sinks().push_back(sink);
  struct Restore {
    spdlog::level::level_enum level = log().level();
    ~Restore() {
      log().set_level(level);
      log().sinks().pop_back();
      unsetenv("PENSTOCK_TRACE_TRANSFERS");
    }
  } restore;
  log().set_level(level);
  comm::run_ranks(2, 20s, body);
  return out.str();
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// The first stage has no weights, so no gradient is sent back to it.
void run_one_way(comm::World& world) {
  const StageModule module =
      world.rank() == 0
          ? StageModule([](at::Tensor x) { return std::make_tuple(x * 2, x.sum(1).to(at::kLong)); }, {})
          : StageModule([block = Block(1)](at::Tensor x, at::Tensor) mutable { return block->forward(x); },
                        {});
  const PipelineStage stage(module, world.rank(), 2, at::kCPU);
  ScheduleGPipe pipeline(stage, 2, test::square_loss(), {world});
  const test::Batch batch = test::plain_batch(0, 4);
  pipeline.step(batch.args, {}, batch.target);
}

void run_both_ways(comm::World& world) {
  const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU);
  ScheduleGPipe pipeline(stage, 2, test::square_loss(), {world});
  const test::Batch batch = test::plain_batch(0, 4);
  pipeline.step(batch.args, {}, batch.target);
}

TEST(TransferLog, OneLinePerCall) {
  const std::string text = logged("1", run_both_ways);
  EXPECT_TRUE(has_text(text,
                       ": send 0SEND_F0 (activation of stage 0 to stage 1): send to rank 1 float32[2, 6] on "
                       "cpu, requires grad\n"));
  EXPECT_TRUE(has_text(text,
                       ": post 1RECV_F1 (activation of stage 0 to stage 1): receive from rank 0 float32[2, "
                       "6] on cpu, requires grad\n"));
  EXPECT_TRUE(has_text(
      text,
      ": send 1SEND_B1 (gradient of stage 1 to stage 0): send to rank 0 float32[2, 6] on cpu, no grad\n"));
  EXPECT_TRUE(has_text(text, ": await 0RECV_B0 (gradient of stage 1 to stage 0): for 1\n"));
  // Both ranks send, post and await two microbatches: six calls each, numbered from 1.
  for (int call = 1; call <= 6; ++call)
    EXPECT_EQ(count_of(text, "transfers " + std::to_string(call) + ": "), 2U) << text;
  EXPECT_EQ(count_of(text, "transfers "), 12U);
}

TEST(TransferLog, EmptyBatchesAndSkippedWaits) {
  const std::string text = logged("1", run_one_way);
  EXPECT_TRUE(has_text(text,
                       ": send 0SEND_F0 (activation of stage 0 to stage 1): send to rank 1 float32[2, 6] on "
                       "cpu, no grad; send to rank 1 int64[2] on cpu, no grad\n"));
  EXPECT_TRUE(has_text(text, ": await 1RECV_F0 (activation of stage 0 to stage 1): for 2\n"));
  EXPECT_TRUE(has_text(text, ": send 1SEND_B0 (gradient of stage 1 to stage 0): nothing\n"));
  EXPECT_TRUE(has_text(text, ": post 0RECV_B0 (gradient of stage 1 to stage 0): nothing\n"));
  EXPECT_TRUE(
      has_text(text, ": await 0RECV_B0 (gradient of stage 1 to stage 0): no wait, nothing is on its way\n"));
}

TEST(TransferLog, OffByDefault) {
  EXPECT_EQ(count_of(logged(nullptr, run_both_ways), "transfers "), 0U);
  EXPECT_EQ(count_of(logged("0", run_both_ways), "transfers "), 0U);
  EXPECT_THROW(logged("maybe", run_both_ways), ConfigError);
}

// Two stages on each of two ranks, whose results are nested.
schedule::Schedule run_v_schedule(ScheduleKind kind, comm::World& world) {
  const schedule::Schedule whole =
      schedule::generate(kind, {.ranks = 2, .stages_per_rank = 2, .microbatches = 4, .group_size = {}});
  std::vector<PipelineStage> stages;
  for (const int index : whole.stages().stages_of(world.rank()))
    stages.emplace_back(
        StageModule(
            [block = Block(index), index](at::Tensor x) mutable {
              const at::Tensor y = block->forward(x);
              return index < 3 ? Tree(y) : Tree::tuple({y, Tree::dict({{"rows", y.size(0)}})});
            },
            {}),
        index, 4, at::kCPU);
  const PipelineLoss loss([](const Tree& output, const Tree& target) {
    return (output[0].tensor() - target.tensor()).pow(2).mean();
  });
  PipelineRuntime pipeline(stages, whole, loss, {world});
  const test::Batch batch = test::plain_batch(0, 8);
  pipeline.step(batch.args, {}, batch.target);
  return pipeline.schedule();
}

TEST(ActionLog, EveryActionOfEveryStageAtDebugLevel) {
  // With split backwards and a V; with overlapped units.
  for (const ScheduleKind kind :
       {ScheduleKind::ZBVZeroBubble, ScheduleKind::DualPipeV, ScheduleKind::Interleaved1F1B}) {
    SCOPED_TRACE(schedule::to_text(kind));
    std::optional<schedule::Schedule> ran;
    const auto body = [&](comm::World& world) {
      schedule::Schedule mine = run_v_schedule(kind, world);
      if (world.rank() == 0) ran = std::move(mine);
    };
    const std::string text = logged(nullptr, body, spdlog::level::debug);
    std::size_t actions = 0;
    for (const schedule::Row& row : ran->rows())
      for (const schedule::Slot slot : row)
        for (const schedule::Action& action : slot) {
          switch (action.kind()) {
            case schedule::ActionKind::Forward:
            case schedule::ActionKind::Backward:
            case schedule::ActionKind::BackwardInput:
            case schedule::ActionKind::BackwardWeight:
            case schedule::ActionKind::ReduceGrad:
              break;
            default:
              continue;
          }
          ++actions;
          const std::string line = "pipeline: stage " + std::to_string(action.stage()) + " runs " +
                                   schedule::to_text(action) + "\n";
          EXPECT_EQ(count_of(text, line), 1U) << line;
        }
    EXPECT_GE(actions, 2U * 4 * 4);
    for (const char* part : {"stage 0, microbatch 3: forward made float32[2, 6]\n",
                             "stage 3, microbatch 1: forward made (float32[2, 6], {'rows': 2})\n",
                             "stage 0, microbatch 2: backward made ()\n",
                             "stage 2, microbatch 0: backward made (float32[2, 6],)\n"})
      EXPECT_EQ(count_of(text, part), 1U) << part;
    // The transfers between, of both kinds.
    EXPECT_TRUE(has_text(text, ": send 0SEND_F0 (activation of stage 0 to stage 1)"));
    EXPECT_TRUE(has_text(text, ": await 0RECV_B3 (gradient of stage 1 to stage 0)"));
  }
}

TEST(ActionLog, NothingAtOtherLevels) {
  const std::string text =
      logged(nullptr, [](comm::World& world) { run_v_schedule(ScheduleKind::ZBVZeroBubble, world); });
  EXPECT_EQ(count_of(text, "pipeline: stage"), 0U) << text;
}

// ------------------------------------------------------------------------------------------------------------------------
// streams

TEST(Streams, TheCpuHasNoSecondStream) {
  EXPECT_FALSE(priority_stream(at::kCPU).has_value());
  const c10::Stream only = current_stream(at::kCPU);
  EXPECT_NO_THROW(order_after(only, only));
}

}  // namespace stage_hooks_test
}  // namespace penstock
