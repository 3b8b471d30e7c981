// Gradient accumulation over steps: values, memory, and copies of a model with different sets of gradients.
#include "penstock/pipeline/backward/step_gradients.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <set>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/backward/copy_gradients.h"
#include "penstock/pipeline/stage/gradient_sync.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace step_gradients_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Block;
using test::has_text;
using test::kWidth;

std::vector<PipelineStage> stages_of(comm::World& world, const schedule::Schedule& whole,
                                     const std::function<StageModule(int stage)>& module) {
  std::vector<PipelineStage> stages;
  for (const int index : whole.stages().stages_of(world.rank()))
    stages.emplace_back(module(index), index, whole.stages().stages(), at::kCPU);
  return stages;
}

schedule::Schedule schedule_of(ScheduleKind kind, int ranks, int microbatches) {
  return schedule::generate(kind, {.ranks = ranks,
                                   .stages_per_rank = schedule::required_stages_per_rank(kind).value_or(1),
                                   .microbatches = microbatches,
                                   .group_size = {}});
}

// --------------------------------------------------------------------------------------------------------------------------
// memory

constexpr std::int64_t kWide = 192, kLayers = 8,
                       kBytes = kLayers * kWide * kWide * static_cast<std::int64_t>(sizeof(float));

StageModule wide_module() {
  std::vector<torch::nn::Linear> layers;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (std::int64_t i = 0; i < kLayers; ++i) {
    layers.emplace_back(torch::nn::LinearOptions(kWide, kWide).bias(false));
    modules.push_back(layers.back().ptr());
  }
  return StageModule(
      [layers](at::Tensor x) mutable {
        for (torch::nn::Linear& layer : layers) x = torch::tanh(layer(x));
        return x;
      },
      modules);
}

// The peak number of bytes that a step allocates: with gradients of an earlier step, or without.
std::int64_t peak_of_a_step(ScheduleKind kind, int microbatches, bool scale, bool earlier) {
  std::int64_t taken = 0;
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    PipelineOptions options{world};
    options.scale_grads = scale;
    options.return_outputs = false;
    const schedule::Schedule whole = schedule_of(kind, 1, microbatches);
    const std::vector<PipelineStage> stages = stages_of(world, whole, [](int) { return wide_module(); });
    PipelineRuntime pipeline(stages, whole, test::square_loss(), options);
    const at::Tensor x = at::rand({microbatches, kWide}), y = at::rand({microbatches, kWide});
    pipeline.step(Tree::tuple({x}), {}, y);
    if (!earlier)
      for (const PipelineStage& stage : stages)
        for (const at::Tensor& parameter : stage.parameters()) parameter.mutable_grad() = at::Tensor();
    reset_cpu_peak();
    const std::int64_t before = cpu_memory().live;
    pipeline.step(Tree::tuple({x}), {}, y);
    taken = cpu_memory().peak - before;
  });
  return taken;
}

TEST(StepGradientsMemory, AccumulationTakesNoSecondBuffer) {
  count_cpu_memory();
  {
    const std::int64_t live = cpu_memory().live;
    const at::Tensor probe = at::zeros({kWide, kWide});
    ASSERT_EQ(cpu_memory().live - live, static_cast<std::int64_t>(probe.nbytes())) << "memory is not counted";
  }
  for (const ScheduleKind kind : {ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZBVZeroBubble})
    for (const int microbatches : {4, 6}) {
      SCOPED_TRACE(std::string(schedule::to_text(kind)) + ", " + std::to_string(microbatches) +
                   " microbatches");
      const std::int64_t stages = schedule::required_stages_per_rank(kind).value_or(1),
                         whole = stages * kBytes;
      // A step without earlier gradients allocates them.
      EXPECT_GT(peak_of_a_step(kind, microbatches, true, false), whole);
      // A step with earlier gradients adds to them: only a weight's gradient or two exist besides at a time.
      EXPECT_LT(peak_of_a_step(kind, microbatches, true, true), whole / 2);
      EXPECT_LT(peak_of_a_step(kind, microbatches, false, true), whole / 2);
    }
}

// --------------------------------------------------------------------------------------------------------------------------
// values

// A stage that uses one of its parameters only in some steps.
struct SometimesImpl : torch::nn::Module {
  explicit SometimesImpl(int number)
      : block(register_module("block", Block(number))),
        extra(register_parameter("extra", test::values({kWidth}, 50 + number))) {}
  at::Tensor forward(const at::Tensor& x) {
    return use_extra ? block->forward(x) * (1 + 0.1 * extra) : block->forward(x);
  }
  Block block;
  at::Tensor extra;
  bool use_extra = true;
};
TORCH_MODULE(Sometimes);

TEST(StepGradients, AccumulatedStepsAreThoseOfOneProcess) {
  constexpr int kSteps = 4;
  for (const int microbatches : {1, 2, 4, 8, 3, 6, 7})
    for (const bool scale : {true, false}) {
      SCOPED_TRACE(std::to_string(microbatches) + " microbatches" + (scale ? ", scaled" : ""));
      Sometimes model(0);
      std::vector<at::Tensor> found;
      comm::run_ranks(1, 30s, [&](comm::World& world) {
        Sometimes module(0);
        PipelineOptions options{world};
        options.scale_grads = scale;
        PipelineRuntime pipeline({PipelineStage(StageModule(module), 0, 1, at::kCPU)},
                                 schedule_of(ScheduleKind::GPipe, 1, microbatches), test::square_loss(),
                                 options);
        for (int step = 0; step < kSteps; ++step) {
          module->use_extra = step % 2 == 0;
          const test::Batch batch = test::plain_batch(step, 2 * microbatches);
          pipeline.step(batch.args, {}, batch.target);
        }
        for (const at::Tensor& parameter : module->parameters()) found.push_back(parameter.grad().clone());
      });
      for (int step = 0; step < kSteps; ++step) {
        model->use_extra = step % 2 == 0;
        const test::Batch batch = test::plain_batch(step, 2 * microbatches);
        const std::vector<Tree> xs = split_tree(batch.args[0], microbatches),
                                ys = split_tree(batch.target, microbatches);
        for (std::size_t m = 0; m < xs.size(); ++m) {
          const at::Tensor loss = test::square_loss()(Tree(model->forward(xs[m].tensor())), ys[m]);
          (scale ? loss / microbatches : loss).backward();
        }
      }
      const std::vector<at::Tensor> parameters = model->parameters();
      ASSERT_EQ(found.size(), parameters.size());
      const bool exact = !scale || (microbatches & (microbatches - 1)) == 0;
      for (std::size_t i = 0; i < found.size(); ++i) {
        if (exact) {
          EXPECT_TRUE(found[i].equal(parameters[i].grad())) << "gradient " << i;
        }
        EXPECT_TRUE(at::allclose(found[i], parameters[i].grad(), 1e-5, 1e-7)) << "gradient " << i;
      }
    }
}

// One parameter that held `before` when the step began and gets `added`.
at::Tensor accumulated(const at::Tensor& before, const at::Tensor& added, int divisor, bool alone = false) {
  torch::nn::ParameterList list;
  list->append(at::zeros_like(before).set_requires_grad(true));
  const at::Tensor parameter = list->parameters()[0];
  parameter.mutable_grad() = before;
  const PipelineStage stage(StageModule([](at::Tensor x) { return x; }, {list.ptr()}), 0, 1, at::kCPU);
  StepGradients gradients({stage}, divisor, alone);
  at::Tensor& gradient = parameter.mutable_grad();
  if (added.defined()) gradient = gradient.defined() ? gradient.add_(added) : added.clone();
  gradients.divide_stage(0);
  gradients.divide_all();
  gradients.add_earlier();
  return parameter.grad();
}

TEST(StepGradients, LowPrecisionNeitherOverflowsNorRounds) {
  // 4 * 40000 is beyond float16.
  const at::Tensor half = accumulated(at::full({2}, 40000.0, at::kHalf), at::full({2}, 800.0, at::kHalf), 4);
  EXPECT_TRUE(at::equal(half.to(at::kFloat), at::full({2}, 40192.0)))
      << half;  // 40200, rounded to multiples of 32
  // Three times a bfloat16 may not be a bfloat16: a gradient to which nothing is added must not change.
  const at::Tensor before = (1 + at::arange(128, at::kFloat) / 128).to(at::kBFloat16);
  ASSERT_FALSE(at::equal(before * 3 / 3, before));
  EXPECT_TRUE(at::equal(accumulated(before.clone(), {}, 3), before));
  EXPECT_TRUE(at::equal(accumulated(before.clone(), {}, 4), before));
  EXPECT_TRUE(at::equal(accumulated(before.clone(), {}, 4, true), before));
}

TEST(StepGradients, GradientsThatShareMemory) {
  // All elements share one memory location: nothing can be done in place.
  EXPECT_TRUE(at::equal(accumulated(at::full({1}, 8.0).expand({3}), at::ones({3}), 4), at::full({3}, 8.25)));
  torch::nn::ParameterList list;
  list->append(at::zeros({3}).set_requires_grad(true));
  list->append(at::zeros({3}).set_requires_grad(true));
  const auto parameters = list->parameters();
  parameters[0].mutable_grad() = at::full({3}, 8.0);
  parameters[1].mutable_grad() = parameters[0].grad();
  const PipelineStage stage(StageModule([](at::Tensor x) { return x; }, {list.ptr()}), 0, 1, at::kCPU);
  {
    StepGradients gradients({stage}, 4, false);
    for (const at::Tensor& parameter : parameters) {
      at::Tensor& gradient = parameter.mutable_grad();
      gradient = gradient.defined() ? gradient.add_(4) : at::full({3}, 4.0);
    }
    gradients.divide_all();
    gradients.add_earlier();
  }
  for (const at::Tensor& parameter : parameters)
    EXPECT_TRUE(at::equal(parameter.grad(), at::full({3}, 10.0))) << parameter.grad();
  parameters[0].mutable_grad() = at::full({3}, 8.0);
  // A step that is aborted restores the earlier gradients.
  parameters[1].mutable_grad() = at::Tensor();
  { StepGradients given_up({stage}, 4, false); }
  EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({3}, 8.0)));
}

// A reducer of a step's gradients must not see those of earlier steps, which are reduced already.
TEST(StepGradients, ReducersSeeOnlyThisStep) {
  for (const bool scale : {true, false}) {
    SCOPED_TRACE(scale);
    comm::run_ranks(1, 30s, [&](comm::World& world) {
      Block block(0);
      std::vector<at::Tensor> seen;
      PipelineOptions options{world};
      options.scale_grads = scale;
      options.gradients_done = [&](int) { seen.push_back(block->weight.grad().clone()); };
      PipelineRuntime pipeline({PipelineStage(StageModule(block), 0, 1, at::kCPU)},
                               schedule_of(ScheduleKind::GPipe, 1, 4), test::square_loss(), options);
      const test::Batch batch = test::plain_batch(0, 8);
      for (int step = 0; step < 3; ++step) pipeline.step(batch.args, {}, batch.target);
      ASSERT_EQ(seen.size(), 3U);
      EXPECT_TRUE(seen[1].equal(seen[0]));
      EXPECT_TRUE(seen[2].equal(seen[0]));
      EXPECT_TRUE(block->weight.grad().equal(seen[0] + seen[0] + seen[0]));
    });
  }
}

// A module that reduces its own gradient: here it doubles .grad(), as a sum over two equal replicas would.
struct DoublingImpl : torch::nn::Module, GradientSync {
  explicit DoublingImpl() : block(register_module("block", Block(0))) {}
  bool set_gradient_sync(bool on) noexcept override { return std::exchange(enabled, on); }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = block->forward(x);
    if (enabled && at::GradMode::is_enabled()) last = true;
    return y;
  }
  Block block;
  bool enabled = true, last = false;
};
TORCH_MODULE(Doubling);

TEST(StepGradients, ModulesThatReduceTheirOwnSeeOnlyThisStep) {
  comm::run_ranks(1, 30s, [&](comm::World& world) {
    Doubling module;
    std::vector<at::Tensor> held;
    module->block->weight.register_hook([&](const at::Tensor& gradient) {
      if (module->enabled)
        held.push_back(module->block->weight.grad().clone());  // of the microbatches before the last
      return gradient;
    });
    PipelineOptions options{world};
    PipelineRuntime pipeline({PipelineStage(StageModule(module), 0, 1, at::kCPU)},
                             schedule_of(ScheduleKind::GPipe, 1, 4), test::square_loss(), options);
    const test::Batch batch = test::plain_batch(0, 8);
    for (int step = 0; step < 3; ++step) pipeline.step(batch.args, {}, batch.target);
    ASSERT_EQ(held.size(), 3U);
    EXPECT_TRUE(held[1].equal(held[0]));
    EXPECT_TRUE(held[2].equal(held[0]));
  });
}

// --------------------------------------------------------------------------------------------------------------------------
// copies

// Two parameters of one size; the index of a microbatch selects the one it uses.
struct ChoosingImpl : torch::nn::Module {
  explicit ChoosingImpl(int number) : block(register_module("block", Block(number))) {
    for (const char* name : {"a", "b", "c"})
      choices.push_back(register_parameter(name, test::values({kWidth}, 60 + number)));
  }
  at::Tensor forward(const at::Tensor& x, std::int64_t microbatch) {
    return block->forward(x) * (1 + 0.1 * choices[microbatch < 2 ? 0 : 1]);
  }
  Block block;
  std::vector<at::Tensor> choices;  // c is never used
};
TORCH_MODULE(Choosing);

// Each of the two copies gets the gradients of half of the microbatches, and lacks those that only the other
// half produces.
TEST(CopyGradients, ACopyWithoutAGradientGetsTheOthers) {
  constexpr int kMicrobatches = 4;
  std::vector<Choosing> model{Choosing(0), Choosing(1)};
  const test::Batch batch = test::plain_batch(0, 2 * kMicrobatches);
  const std::vector<Tree> xs = split_tree(batch.args[0], kMicrobatches),
                          ys = split_tree(batch.target, kMicrobatches);
  for (int step = 0; step < 2; ++step)
    for (std::size_t m = 0; m < xs.size(); ++m) {
      at::Tensor x = xs[m].tensor();
      for (Choosing& part : model) x = part->forward(x, static_cast<std::int64_t>(m));
      (test::square_loss()(Tree(x), ys[m]) / kMicrobatches).backward();
    }
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const schedule::Schedule whole = schedule_of(ScheduleKind::DualPipe, 2, kMicrobatches);
    std::map<int, Choosing> parts;
    const auto stages = stages_of(world, whole, [&](int stage) {
      Choosing part(stage % 2);
      parts.emplace(stage, part);
      return StageModule(
          [part](at::Tensor x) mutable {
            return part->forward(x, StepContext::current()->microbatch.value_or(0));
          },
          {part.ptr()});
    });
    PipelineRuntime pipeline(stages, whole, test::square_loss(), {world});
    for (int step = 0; step < 2; ++step) pipeline.step(batch.args, {}, batch.target);
    for (const auto& [stage, part] : parts) {
      const auto ours = part->named_parameters(),
                 theirs = model[static_cast<std::size_t>(stage % 2)]->named_parameters();
      for (const auto& entry : ours) {
        const at::Tensor gradient = entry.value().grad(), expected = theirs[entry.key()].grad();
        ASSERT_EQ(gradient.defined(), expected.defined()) << entry.key() << " of stage " << stage;
        if (expected.defined()) {
          EXPECT_TRUE(at::allclose(gradient, expected, 1e-5, 1e-7)) << entry.key() << " of stage " << stage;
        }
      }
      EXPECT_TRUE(ours["a"].grad().defined() && ours["b"].grad().defined() && !ours["c"].grad().defined());
    }
  });
}

// Two pipelines of two ranks that split tensors between them. One copy has the terms of a sum, the other
// nothing, or the sum already.
TEST(CopyGradients, TermsOfASumAndCopiesWithoutThem) {
  for (const bool summed : {false, true}) {
    SCOPED_TRACE(summed ? "the other has the sum" : "the other has nothing");
    comm::run_ranks(4, 60s, [&](comm::World& world) {
      const comm::MeshGroups grid(world, init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, world.rank(), 4));
      const comm::MeshGroups tp = grid.with_mesh(grid.mesh()["tp"]);
      const int place = world.rank() / 2, twin = world.rank() % 2;
      const schedule::Schedule whole = schedule_of(ScheduleKind::DualPipe, 2, 4);
      std::vector<PipelineStage> stages;
      std::map<int, at::Tensor> parameters;
      for (const int index : whole.stages().stages_of(place)) {
        torch::nn::ParameterList list;
        list->append(distribute_tensor(at::zeros({3}), tp, {Replicate{}}).detach().set_requires_grad(true));
        parameters[index] = list->parameters()[0];
        stages.emplace_back(StageModule([](at::Tensor x) { return x; }, {list.ptr()}), index,
                            whole.stages().stages(), at::kCPU);
        if (index < 2)
          parameters[index].mutable_grad() =
              from_local(at::full({3}, 1.f + static_cast<float>(twin)), tp, {Partial{}});
        else if (summed)
          parameters[index].mutable_grad() = from_local(at::full({3}, 10.f), tp, {Replicate{}});
      }
      CopyGradients copies(world, {twin, 2 + twin}, whole.stages(), stages);
      copies.sum();
      for (const auto& [index, parameter] : parameters) {
        ASSERT_TRUE(parameter.grad().defined()) << "stage " << index;
        EXPECT_TRUE(at::equal(full_tensor(parameter.grad()), at::full({3}, summed ? 13.f : 3.f)))
            << "stage " << index << ": " << full_tensor(parameter.grad());
      }
    });
  }
}

TEST(CopyGradients, CopiesThatDifferAreNamedOnBothRanks) {
  // The same number of elements and parameters, in another order.
  std::set<std::string> texts;
  std::mutex mutex;
  const auto body = [&](comm::World& world) {
    const schedule::Schedule whole = schedule_of(ScheduleKind::DualPipe, 2, 4);
    const auto stages = stages_of(world, whole, [&](int stage) {
      Block block(stage % 2);
      if (stage == 2) block->gain.set_requires_grad(false);
      return StageModule(block);
    });
    PipelineRuntime pipeline(stages, whole, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 8);
    try {
      pipeline.step(batch.args, {}, batch.target);
    } catch (const PipeliningMetadataError& error) {
      const std::lock_guard lock(mutex);
      texts.insert(error.what());
      throw;
    }
  };
  EXPECT_THROW(comm::run_ranks(2, 60s, body), PipeliningMetadataError);
  ASSERT_EQ(texts.size(), 1U);
  EXPECT_TRUE(has_text(*texts.begin(), "stage 0 and its copy"));
  EXPECT_TRUE(has_text(*texts.begin(), "parameter 2: Float[6], frozen"));
  EXPECT_TRUE(has_text(*texts.begin(), "parameter 2: Float[6], trainable"));
}

}  // namespace step_gradients_test
}  // namespace penstock
