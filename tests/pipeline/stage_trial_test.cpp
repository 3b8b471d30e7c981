// Trial runs leave no trace, whatever the module writes and keeps.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <random>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/pipeline.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"
#include "tests/pipeline/trial_kinds.h"

namespace penstock {
namespace stage_trial_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Block;
using test::has_text;
using test::kTrials;
using test::kWidth;
using test::name_of;
using test::values;
using test::with;

// ------------------------------------------------------------------------------------------------- a module
// that writes what it is given

// What a module does besides computing; all of it is allowed in one process.
struct Habits {
  bool writes_argument = false, writes_part_of_argument = false, writes_second_argument = false,
       writes_keyword = false, loss_writes_target = false;
  bool batch_norm = false, multiplies_by_buffer = false, keeps_mean = false, keeps_mean_with_graph = false,
       builds_table = false, dropout_of_zero = false;
  bool writes_parameter = false, writes_member = false;

  explicit Habits(std::mt19937& random) {
    for (bool* habit :
         {&writes_argument, &writes_part_of_argument, &writes_second_argument, &writes_keyword,
          &loss_writes_target, &batch_norm, &multiplies_by_buffer, &keeps_mean, &keeps_mean_with_graph,
          &builds_table, &dropout_of_zero, &writes_parameter, &writes_member})
      *habit = random() % 2 == 0;
  }
};

struct WriterImpl : torch::nn::Module {
  WriterImpl(int stage, const Habits& the_habits)
      : first(stage == 0), habits(the_habits), block(register_module("block", Block(stage))) {
    if (habits.batch_norm) norm = register_module("norm", torch::nn::BatchNorm1d(kWidth));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
    factor = register_buffer("factor", values({kWidth}, 40 + stage));
    mean = register_buffer("mean", at::zeros({kWidth}));
    last = register_buffer("last", at::zeros({kWidth}));
  }
  at::Tensor forward(const Tree& args, const Tree& kwargs) {
    at::Tensor x = args[0].tensor();
    if (first && habits.writes_argument) x.add_(1);
    if (first && habits.writes_part_of_argument) x.narrow(1, 1, 2).mul_(0.5);
    if (first && habits.writes_second_argument) args[1].tensor().sub_(0.25);
    if (first) x = x + args[1].tensor();
    if (habits.writes_keyword) kwargs["shift"].tensor().add_(0.125);
    x = block->forward(x) + kwargs["shift"].tensor();
    calls.add_(1);
    if (habits.writes_parameter) {
      const at::NoGradGuard no_grad;
      block->bias.mul_(0.75);  // backward does not need it
    }
    if (habits.writes_member) x = x + member.mul_(0.5).add_(1).clone();
    if (norm) x = norm(x);
    if (habits.multiplies_by_buffer) x = x * factor;
    if (habits.keeps_mean) {
      mean.mul_(0.75).add_(x.detach().mean(0));
      x = x + mean.clone();
    }
    // Without no_grad the buffer becomes part of the graph: allowed as long as nothing is computed from it.
    if (habits.keeps_mean_with_graph) last.copy_(x.mean(0));
    if (habits.builds_table) {
      if (!table.defined()) table = at::arange(kWidth, at::kFloat).mul_(0.1).cos();
      x = x + table;
    }
    if (habits.dropout_of_zero) x = torch::dropout(x, 1e-12, true);
    return x;
  }
  bool first;
  Habits habits;
  Block block;
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor calls, factor, mean, last, table;
  at::Tensor member = at::zeros({kWidth});  // not registered
};
TORCH_MODULE(Writer);

PipelineLoss loss_of(const Habits& habits) {
  return PipelineLoss(
      [writes = habits.loss_writes_target](const at::Tensor& output, const at::Tensor& target) {
        if (writes) target.mul_(0.5);
        return (output - target).pow(2).mean();
      });
}

// A batch of the caller, some of whose tensors may share memory.
struct Given {
  Given(int seed, int alias, std::int64_t rows)
      : x(values({rows, 2 * kWidth}, seed)),
        shift(values({rows, kWidth}, seed + 1)),
        target(values({rows, kWidth}, seed + 2)) {
    first = x.narrow(1, 0, kWidth);
    second = alias == 0 ? first : alias == 1 ? x.narrow(1, 2, kWidth) : values({rows, kWidth}, seed + 3);
    if (alias == 3) target = first;
  }
  Tree args() const { return Tree::tuple({first, second}); }
  Tree kwargs() const { return Tree::dict({{"shift", shift}}); }
  at::Tensor x, first, second, shift, target;
};

constexpr int kMicrobatches = 3, kSteps = 2, kStages = 3;

struct Outcome {
  std::vector<at::Tensor> losses, gradients, buffers, given;
};

void note_state(Outcome& outcome, std::vector<Writer>& modules, const Given& given) {
  for (const Writer& module : modules) {
    for (const at::Tensor& parameter : module->parameters())
      outcome.gradients.push_back(parameter.grad().clone());
    for (const at::Tensor& buffer : module->buffers()) outcome.buffers.push_back(buffer.detach().clone());
    outcome.buffers.push_back(module->member.clone());
    outcome.buffers.push_back(module->block->bias.detach().clone());
  }
  for (const at::Tensor& tensor : {given.x, given.second, given.shift, given.target})
    outcome.given.push_back(tensor.clone());
}

std::vector<Writer> writers(const std::vector<Habits>& habits) {
  std::vector<Writer> modules;
  for (int stage = 0; stage < kStages; ++stage)
    modules.emplace_back(stage, habits[static_cast<std::size_t>(stage)]);
  return modules;
}

Outcome in_one_process(const std::vector<Habits>& habits, int seed, int alias) {
  std::vector<Writer> modules = writers(habits);
  const PipelineLoss loss = loss_of(habits.back());
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    const Given given(seed + 10 * step, alias, 4 * kMicrobatches);
    const std::vector<Tree> args = split_tree(given.args(), kMicrobatches),
                            kwargs = split_tree(given.kwargs(), kMicrobatches),
                            targets = split_tree(given.target, kMicrobatches);
    std::vector<at::Tensor> losses;
    for (int m = 0; m < kMicrobatches; ++m) {
      const auto at = static_cast<std::size_t>(m);
      at::Tensor h = modules[0]->forward(args[at], kwargs[at]);
      for (std::size_t stage = 1; stage < modules.size(); ++stage)
        h = modules[stage]->forward(Tree::tuple({h}), kwargs[at]);
      losses.push_back(loss(Tree(h), targets[at]));
      outcome.losses.push_back(losses.back().detach());
    }
    for (const at::Tensor& each : losses) (each / kMicrobatches).backward();
    note_state(outcome, modules, given);
  }
  return outcome;
}

Outcome in_a_pipeline(const std::vector<Habits>& habits, int seed, int alias, TrialRun trial) {
  Outcome outcome;
  comm::run_ranks(1, 20s, [&](comm::World& world) {
    std::vector<Writer> modules = writers(habits);
    std::vector<PipelineStage> stages;
    for (int stage = 0; stage < kStages; ++stage)
      stages.emplace_back(StageModule(modules[static_cast<std::size_t>(stage)]), stage, kStages, at::kCPU,
                          with(trial));
    PipelineRuntime pipeline(
        stages,
        schedule::generate(
            ScheduleKind::Interleaved1F1B,
            {.ranks = 1, .stages_per_rank = kStages, .microbatches = kMicrobatches, .group_size = {}}),
        loss_of(habits.back()), {world});
    for (int step = 0; step < kSteps; ++step) {
      const Given given(seed + 10 * step, alias, 4 * kMicrobatches);
      const StepResult result = pipeline.step(given.args(), given.kwargs(), given.target);
      outcome.losses.insert(outcome.losses.end(), result.losses.begin(), result.losses.end());
      note_state(outcome, modules, given);
    }
    EXPECT_GE(pipeline.report().trials, kStages);
  });
  return outcome;
}

testing::AssertionResult same(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  if (found.size() != expected.size())
    return testing::AssertionFailure() << found.size() << " tensors, expected " << expected.size();
  for (std::size_t i = 0; i < found.size(); ++i)
    if (const double off = (found[i] - expected[i]).abs().max().item<double>();
        off > 1e-4 * (1 + expected[i].abs().max().item<double>()))
      return testing::AssertionFailure() << "tensor " << i << " of " << found.size() << " is off by " << off;
  return testing::AssertionSuccess();
}

// The caller's tensors, buffers, losses and gradients are those of one process, whether a trial is fake or
// real.
TEST(StageTrial, WritesActOnceAsInOneProcess) {
  for (int seed = 0; seed < 80; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    std::vector<Habits> habits;
    for (int stage = 0; stage < kStages; ++stage) habits.emplace_back(random);
    const int alias = static_cast<int>(random() % 4);
    const Outcome expected = in_one_process(habits, 1000 * seed, alias);
    for (const TrialRun trial : kTrials) {
      SCOPED_TRACE(fmt::format("seed {}, {} trial", seed, name_of(trial)));
      const Outcome found = in_a_pipeline(habits, 1000 * seed, alias, trial);
      ASSERT_TRUE(same(found.losses, expected.losses));
      ASSERT_TRUE(same(found.gradients, expected.gradients));
      ASSERT_TRUE(same(found.buffers, expected.buffers));
      ASSERT_TRUE(same(found.given, expected.given));
    }
  }
}

TEST(StageTrial, AWrittenArgumentIsWrittenOncePerMicrobatch) {
  for (const TrialRun trial : kTrials)
    comm::run_ranks(1, 20s, [&](comm::World& world) {
      const StageModule module(
          [](at::Tensor x, const Tree& kwargs) { return x.add_(1) * kwargs["k"].tensor().add_(2); }, {});
      ScheduleGPipe pipeline(PipelineStage(module, 0, 1, at::kCPU, with(trial)), 2, {}, {world});
      const at::Tensor x = at::zeros({4, 3}), k = at::zeros({4, 1});
      pipeline.eval(Tree::tuple({x}), Tree::dict({{"k", k}}));
      EXPECT_TRUE(x.equal(at::ones({4, 3}))) << name_of(trial);
      EXPECT_TRUE(k.equal(at::full({4, 1}, 2.0))) << name_of(trial);
    });
}

// Autograd has saved these tensors for the caller: a trial must not bump their versions.
TEST(StageTrial, VersionsOfTheCallersTensorsStay) {
  comm::run_ranks(1, 20s, [](comm::World& world) {
    const StageModule module([](at::Tensor x) { return StepContext::current()->trial ? x.add_(1) : x + 1; },
                             {});
    ScheduleGPipe pipeline(PipelineStage(module, 0, 1, at::kCPU, with(TrialRun::Real)), 2, {}, {world});
    const at::Tensor x = at::ones({4, 3}), w = at::ones({3}).set_requires_grad(true);
    const at::Tensor outside = (x * w).sum();
    const auto version = x._version();
    pipeline.eval(Tree::tuple({x}));
    EXPECT_EQ(x._version(), version);
    outside.backward();
  });
}

// The shape of what the stage sends depends on a value that it has written through another argument.
TEST(StageTrial, CopiesShareMemoryAsTheOriginalsDo) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const StageModule module(
        [&world](const Tree& args, const Tree&) {
          if (world.rank() == 1) return args[0];
          args[0].tensor().fill_(1);
          const at::Tensor second = args[1].tensor();
          return Tree(second.index({second.select(1, 0).gt(0)}));
        },
        {});
    ScheduleGPipe pipeline(PipelineStage(module, world.rank(), 2, at::kCPU, with(TrialRun::Real)), 2, {},
                           {world});
    const at::Tensor x = at::full({4, 5}, -1.0);
    const StepResult result = pipeline.eval(Tree::tuple({x.narrow(1, 0, 3), x.narrow(1, 2, 3)}));
    if (world.rank() == 1) {
      EXPECT_EQ(result.output->tensor().sizes(), (std::vector<std::int64_t>{4, 3}));
    }
  });
}

// A buffer that is written under autograd belongs to the graph of that forward, not to the graph of a trial
// that has ended.
TEST(StageTrial, ABufferWrittenUnderAutogradBelongsToTheRealRun) {
  for (const TrialRun trial : kTrials)
    comm::run_ranks(2, 20s, [&](comm::World& world) {
      Block block(world.rank());
      const at::Tensor last = block->register_buffer("last", at::zeros({kWidth}));
      const StageModule module(
          [block, last](at::Tensor x) mutable {
            x = block->forward(x + last);
            last.copy_(x.mean(0));
            return x;
          },
          {block.ptr()});
      ScheduleGPipe pipeline(PipelineStage(module, world.rank(), 2, at::kCPU, with(trial)), 1,
                             test::square_loss(), {world});
      const test::Batch batch = test::plain_batch(0, 4);
      pipeline.step(batch.args, {}, batch.target);
      Block first(0), second(1);
      const at::Tensor y = second->forward(first->forward(batch.args[0].tensor()));
      (y - batch.target.tensor()).pow(2).mean().backward();
      EXPECT_TRUE(
          at::allclose(block->weight.grad(), (world.rank() == 0 ? first : second)->weight.grad(), 1e-4, 1e-6))
          << name_of(trial);
    });
}

// ------------------------------------------------------------------------------------------------------------------
// tensors that are kept

struct LazyImpl : torch::nn::Module {
  enum class Kept { Table, View, Activation, Random, Next };
  LazyImpl(int stage, Kept what) : kept(what), block(register_module("block", Block(stage))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (!table.defined() || (kept != Kept::Activation && table.size(0) < x.size(0))) {
      if (kept == Kept::Table)
        table = at::ones({x.size(0), kWidth}).triu().mul_(block->bias.detach()) * 2 + constant.unsqueeze(0);
      if (kept == Kept::View)
        table = at::arange(2 * x.size(0), at::kFloat)
                    .cos()
                    .narrow(0, 1, x.size(0))
                    .unsqueeze(1)
                    .expand({x.size(0), kWidth});
      if (kept == Kept::Activation) table = x.detach().sin();
      if (kept == Kept::Random) table = at::rand({x.size(0), kWidth});
    }
    // The next state of something that existed before the trial.
    if (kept == Kept::Next) table = count = count * 0.5 + 1;
    return block->forward(x + table.narrow(0, 0, x.size(0)));
  }
  Kept kept;
  Block block;
  at::Tensor table, constant = at::full({kWidth}, 0.5), count = at::ones({16, kWidth});
};
TORCH_MODULE(Lazy);

TEST(StageTrial, ATableBuiltInTheFirstForward) {
  for (const auto& [kept, trial] :
       {std::pair(LazyImpl::Kept::Table, TrialRun::Fake), std::pair(LazyImpl::Kept::View, TrialRun::Fake),
        std::pair(LazyImpl::Kept::Table, TrialRun::Real)})
    comm::run_ranks(2, 20s, [&, kept = kept, trial = trial](comm::World& world) {
      Lazy module(world.rank(), kept);
      const PipelineStage stage(StageModule(module), world.rank(), 2, at::kCPU, with(trial));
      ScheduleGPipe pipeline(stage, 2, test::square_loss(), {world});
      Lazy first(0, kept), second(1, kept);
      // The second step has longer microbatches, for which the table is built again.
      for (const int rows : {4, 10}) {
        const test::Batch batch = test::plain_batch(0, rows);
        const StepResult result = pipeline.step(batch.args, {}, batch.target);
        EXPECT_FALSE(is_fake(module->table));
        if (world.rank() == 0) continue;
        for (int m = 0; m < 2; ++m) {
          const auto part = [&](const at::Tensor& tensor) {
            return tensor.chunk(2)[static_cast<std::size_t>(m)];
          };
          const at::Tensor expected = second->forward(first->forward(part(batch.args[0].tensor())));
          EXPECT_TRUE(at::allclose(result.losses[static_cast<std::size_t>(m)],
                                   (expected - part(batch.target.tensor())).pow(2).mean(), 1e-5, 1e-6));
        }
      }
    });
}

// Returns how a pipeline of two ranks ends, on the rank whose stage keeps a tensor.
std::string end_of_keeping(LazyImpl::Kept kept, TrialRun trial, int keeper) {
  std::string said;
  try {
    comm::run_ranks(2, 20s, [&](comm::World& world) {
      const StageModule module =
          world.rank() == keeper ? StageModule(Lazy(world.rank(), kept)) : StageModule(Block(world.rank()));
      ScheduleGPipe pipeline(PipelineStage(module, world.rank(), 2, at::kCPU, with(trial)), 2,
                             test::square_loss(), {world});
      const test::Batch batch = test::plain_batch(0, 4);
      try {
        pipeline.step(batch.args, {}, batch.target);
      } catch (const StageForwardError& error) {
        said = error.what();
        throw;
      }
    });
  } catch (const std::exception&) {
  }
  return said;
}

// Activations, random numbers and the next state of something cannot be recomputed after the trial: any use
// of such a tensor is an error.
TEST(StageTrial, AKeptTensorWithoutValuesIsNamed) {
  using Kept = LazyImpl::Kept;
  for (const auto kept : {Kept::Activation, Kept::Random, Kept::Next})
    for (const int keeper : {0, 1}) {
      const std::string said = end_of_keeping(kept, TrialRun::Auto, keeper);
      EXPECT_TRUE(has_text(
          said, fmt::format("without values: stage {} of 2 made it in a trial run and kept it", keeper)));
      EXPECT_TRUE(has_text(said, "create it in the module's constructor"));
    }
  // On real tensors the first stage is tried with its arguments, so that what it keeps of them is right; the
  // second one gets zeros.
  EXPECT_EQ(end_of_keeping(Kept::Activation, TrialRun::Real, 0), "");
  EXPECT_TRUE(has_text(end_of_keeping(Kept::Activation, TrialRun::Real, 1),
                       "stage 1 of 2 made it in a trial run and kept it"));
  EXPECT_TRUE(has_text(end_of_keeping(Kept::Next, TrialRun::Real, 0),
                       "stage 0 of 2 made it in a trial run and kept it"));
  EXPECT_EQ(end_of_keeping(Kept::Table, TrialRun::Real, 1), "");
}

// A tensor that is kept for inspection, and that every forward replaces, is not an error.
TEST(StageTrial, AnActivationThatEveryForwardReplacesMayBeKept) {
  comm::run_ranks(1, 20s, [](comm::World& world) {
    at::Tensor last;
    Block block(0);
    const StageModule module([block, &last](at::Tensor x) mutable { return last = block->forward(x); },
                             {block.ptr()});
    ScheduleGPipe pipeline(PipelineStage(module, 0, 1, at::kCPU, with(TrialRun::Fake)), 2,
                           test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 4);
    pipeline.step(batch.args, {}, batch.target);
    EXPECT_FALSE(is_fake(last));
    EXPECT_TRUE(last.isfinite().all().item<bool>());
  });
}

// A table that depends on a buffer which the same forward writes: the trial has not written it, so its value
// is unknown.
TEST(StageTrial, ATableThatDependsOnAWrittenBufferIsNotRecomputed) {
  std::string said;
  try {
    comm::run_ranks(1, 20s, [](comm::World& world) {
      struct CounterImpl : torch::nn::Module {
        CounterImpl() : count(register_buffer("count", at::zeros({kWidth}))) {}
        at::Tensor forward(const at::Tensor& x) {
          count.add_(1);
          if (!table.defined()) table = count * 2;
          return x * table;
        }
        at::Tensor count, table;
      };
      ScheduleGPipe pipeline(PipelineStage(StageModule(std::make_shared<CounterImpl>()), 0, 1, at::kCPU), 2,
                             {}, {world});
      pipeline.eval(test::plain_batch(0, 4).args);
    });
  } catch (const StageForwardError& error) {
    said = error.what();
  }
  EXPECT_TRUE(has_text(said, "made it in a trial run and kept it"));
}

// Autocast keeps the weights that it has cast until its outermost scope ends.
TEST(StageTrial, WeightsThatAutocastHasCastInTheTrialAreDiscarded) {
  for (const TrialRun trial : {TrialRun::Fake, TrialRun::Real})
    comm::run_ranks(1, 20s, [&](comm::World& world) {
      torch::nn::Linear linear(kWidth, kWidth), twin(kWidth, kWidth);
      {
        const at::NoGradGuard no_grad;
        twin->weight.copy_(linear->weight);
        twin->bias.copy_(linear->bias);
      }
      ScheduleGPipe pipeline(
          PipelineStage(StageModule(linear), 0, 1, at::kCPU, with(trial)), 2,
          [](const at::Tensor& y, const at::Tensor&) { return y.to(at::kFloat).pow(2).mean(); }, {world});
      const test::Batch batch = test::plain_batch(0, 4);
      const AutocastScope scope(at::kCPU, at::kBFloat16);
      const StepResult result = pipeline.step(batch.args, {}, batch.target);
      EXPECT_TRUE(result.output->tensor().equal(twin(batch.args[0].tensor())));
      EXPECT_TRUE(linear->weight.grad().isfinite().all().item<bool>());
      EXPECT_GT(linear->weight.grad().abs().sum().item<double>(), 0);
    });
}

// --------------------------------------------------------------------------------------------------------------------
// ends of a pipeline

// In a bidirectional pipeline a microbatch may end at a stage that is not the one with the highest number.
TEST(StageTrial, TheLastStageOfEitherChainMayReturnAnything) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const schedule::Schedule order = schedule::generate(
        ScheduleKind::DualPipe, {.ranks = 2, .stages_per_rank = 2, .microbatches = 4, .group_size = {}});
    std::vector<PipelineStage> own;
    int ends = 0;
    for (const int index : order.stages().stages_of(world.rank())) {
      Block block(index % 2);
      const bool last = order.stages().is_last(index);
      ends += last;
      own.emplace_back(StageModule(
                           [block, last](at::Tensor x) mutable {
                             const at::Tensor h = block->forward(x);
                             return last ? Tree::dict({{"logits", h}, {"name", "batch"}}) : Tree(h);
                           },
                           {block.ptr()}),
                       index, 4, at::kCPU);
    }
    EXPECT_EQ(ends, 1);
    PipelineRuntime pipeline(own, order,
                             [](const Tree& output, const Tree& target) {
                               return (output["logits"].tensor() - target.tensor()).pow(2).mean();
                             },
                             {world});
    const test::Batch batch = test::plain_batch(0, 8);
    const StepResult result = pipeline.step(batch.args, {}, batch.target);
    EXPECT_EQ((*result.output)["name"].text(), "batch");
  });
}

// The backward of a middle stage does not run on fake tensors: the trial starts again on real ones.
TEST(StageTrial, ABackwardThatReadsValues) {
  struct Reads : torch::autograd::Function<Reads> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      return {gradients[0] * (gradients[0].sum().item<double>() < 1e9 ? 2 : 0)};
    }
  };
  comm::run_ranks(3, 20s, [](comm::World& world) {
    Block block(world.rank());
    at::Tensor calls = block->register_buffer("calls", at::zeros({}, at::kLong));
    const StageModule module(
        [block, calls](at::Tensor x) mutable {
          calls.add_(1);
          return block->forward(Reads::apply(x));
        },
        {block.ptr()});
    ScheduleGPipe pipeline(PipelineStage(module, world.rank(), 3, at::kCPU), 2, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 4);
    pipeline.step(batch.args, {}, batch.target);
    EXPECT_EQ(calls.item<int>(), 2);
    std::vector<Block> model = {Block(0), Block(1), Block(2)};
    for (std::size_t m = 0; m < 2; ++m) {
      at::Tensor y = batch.args[0].tensor().chunk(2)[m];
      for (Block& part : model) y = part->forward(y * 2);
      ((y - batch.target.tensor().chunk(2)[m]).pow(2).mean() / 2).backward();
    }
    EXPECT_TRUE(at::allclose(block->weight.grad(),
                             model[static_cast<std::size_t>(world.rank())]->weight.grad(), 1e-4, 1e-5));
  });
}

}  // namespace stage_trial_test
}  // namespace penstock
