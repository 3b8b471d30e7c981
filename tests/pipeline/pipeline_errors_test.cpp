// Errors in a pipeline: every rank reports the right error within the deadline.
#include <gtest/gtest.h>

#include <mutex>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "penstock/step_context.h"
#include "penstock/validate.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace pipeline_errors_test {

using namespace std::chrono_literals;
using test::Block;
using test::has_text;
using test::kWidth;

// What each rank of a world ended with: "" or the type and message of its error.
std::vector<std::string> ends_of(int ranks, const std::function<void(comm::World&)>& body,
                                 std::chrono::milliseconds timeout = 20s) {
  std::vector<std::string> ends(static_cast<std::size_t>(ranks));
  std::mutex mutex;
  const auto note = [&](int rank, const std::string& text) {
    const std::lock_guard lock(mutex);
    ends[static_cast<std::size_t>(rank)] = text;
  };
  try {
    comm::run_ranks(ranks, timeout, [&](comm::World& world) {
      const int rank = world.rank();
      try {
        body(world);
      } catch (const StageForwardError& error) {
        note(rank, std::string("StageForwardError: ") + error.what());
        throw;
      } catch (const StageBackwardError& error) {
        note(rank, std::string("StageBackwardError: ") + error.what());
        throw;
      } catch (const PipeliningMetadataError& error) {
        note(rank, std::string("PipeliningMetadataError: ") + error.what());
        throw;
      } catch (const PeerLostError& error) {
        note(rank, std::string("PeerLostError: ") + error.what());
        throw;
      } catch (const ValueError& error) {
        note(rank, std::string("ValueError: ") + error.what());
        throw;
      } catch (const std::exception& error) {
        note(rank, std::string("other: ") + error.what());
        throw;
      }
    });
  } catch (const std::exception&) {
    // Every rank has recorded its own error.
  }
  return ends;
}

StageModule block_module(int stage) { return StageModule(Block(stage)); }
StageModule keyword_module(int stage) {
  Block block(stage);
  return StageModule([block](at::Tensor x, const Tree&) mutable { return block->forward(x); }, {block.ptr()});
}

// A 1F1B pipeline with one stage per rank; `module` may be faulty.
PipelineRuntime pipeline_of(comm::World& world, const std::function<StageModule(int)>& module,
                            const StageOptions& options = {}, int microbatches = 4) {
  const PipelineStage stage(module(world.rank()), world.rank(), world.size(), at::kCPU, options);
  return Schedule1F1B(stage, microbatches, test::square_loss(), {world});
}

StepResult plain_step(PipelineRuntime& pipeline, int rows = 8) {
  const test::Batch batch = test::plain_batch(0, rows);
  return pipeline.step(batch.args, {}, batch.target);
}

TEST(PipelineErrors, StageIndex) {
  EXPECT_THROW(PipelineStage(block_module(0), 2, 2, at::kCPU), ValueError);
  EXPECT_THROW(PipelineStage(block_module(0), -1, 2, at::kCPU), ValueError);
  EXPECT_THROW(PipelineStage(block_module(0), 0, 0, at::kCPU), ValueError);
}

TEST(PipelineErrors, ExamplesThatContradictEachOther) {
  const auto end_of = [](const StageOptions& options) -> std::string {
    try {
      const PipelineStage stage(block_module(0), 0, 2, at::kCPU, options);
      return "";
    } catch (const PipeliningMetadataError& error) {
      return std::string("PipeliningMetadataError: ") + error.what();
    } catch (const ValueError& error) {
      return std::string("ValueError: ") + error.what();
    }
  };
  const at::Tensor plain = at::empty({2, kWidth});
  const at::Tensor needs = at::empty({2, kWidth}).requires_grad_();
  for (const bool input : {true, false}) {
    SCOPED_TRACE(input ? "inputs" : "outputs");
    const auto given = [&](std::optional<std::vector<at::Tensor>> tensors,
                           std::optional<std::vector<at::Tensor>> gradients) {
      StageOptions options;
      (input ? options.input_args : options.output_args) = std::move(tensors);
      (input ? options.input_grads : options.output_grads) = std::move(gradients);
      return options;
    };
    EXPECT_EQ(end_of(given({{needs}}, {{plain}})), "");
    EXPECT_EQ(end_of(given({{needs, plain}}, {{plain, at::Tensor()}})), "");
    EXPECT_EQ(end_of(given({{plain}}, std::nullopt)), "");
    EXPECT_TRUE(has_text(end_of(given(std::nullopt, {{plain}})),
                         input ? "ValueError: examples of stage 0: got only input_grads"
                               : "ValueError: examples of stage 0: got only output_grads"));
    EXPECT_TRUE(has_text(end_of(given({{needs}}, {{plain, plain}})), "PipeliningMetadataError: "));
    EXPECT_TRUE(has_text(end_of(given({{needs, needs}}, {{plain}})), "PipeliningMetadataError: "));
    EXPECT_TRUE(has_text(end_of(given({{needs, plain}}, {{plain, plain}})), "PipeliningMetadataError: "));
    EXPECT_TRUE(has_text(end_of(given({{needs, plain}}, {{plain, plain}})), input ? "input" : "output"));
  }
}

TEST(PipelineErrors, StagesThatAreNotThoseOfTheSchedule) {
  const auto ends = ends_of(2, [](comm::World& world) {
    const PipelineStage stage(block_module(0), 1 - world.rank(), 2, at::kCPU);
    Schedule1F1B(stage, 4, test::square_loss(), {world});
  });
  for (const std::string& end : ends) EXPECT_TRUE(has_text(end, "ValueError: stages on rank"));
}

TEST(PipelineErrors, ScheduleForOtherRanksOrStages) {
  const auto ends = ends_of(2, [](comm::World& world) {
    const PipelineStage stage(block_module(0), world.rank(), 2, at::kCPU);
    PipelineRuntime(
        {stage},
        schedule::generate(schedule::ScheduleKind::GPipe,
                           {.ranks = 4, .stages_per_rank = 1, .microbatches = 4, .group_size = {}}),
        test::square_loss(), {world});
  });
  for (const std::string& end : ends) EXPECT_TRUE(has_text(end, "ValueError: ranks of the schedule: got 4"));
  EXPECT_THROW(comm::run_ranks(2, 10s,
                               [](comm::World& world) {
                                 const PipelineStage stage(block_module(0), world.rank(), 2, at::kCPU);
                                 pipeline_from_csv("0F0,0B0\n1B0,1F0\n", {stage}, test::square_loss(),
                                                   {world});
                               }),
               schedule::ScheduleError);
}

TEST(PipelineErrors, ARecordingNeedsACudaDeviceAndOneRank) {
  const auto ends = ends_of(1, [](comm::World& world) {
    PipelineRuntime({PipelineStage(block_module(0), 0, 1, at::kCPU)},
                    schedule::generate(schedule::ScheduleKind::OneFOneB, {.ranks = 1, .microbatches = 2}),
                    test::square_loss(), {.world = world, .device_graph = true});
  });
  EXPECT_TRUE(has_text(ends[0], "ValueError: device of stage 0 of 1, for recorded steps: got cpu"));
  const auto two = ends_of(2, [](comm::World& world) {
    PipelineRuntime({PipelineStage(block_module(0), world.rank(), 2, at::kCPU)},
                    schedule::generate(schedule::ScheduleKind::OneFOneB, {.ranks = 2, .microbatches = 2}),
                    test::square_loss(), {.world = world, .device_graph = true});
  });
  for (const std::string& end : two)
    EXPECT_TRUE(has_text(end, "ValueError: ranks of a pipeline whose steps are recorded: got 2"));
}

TEST(PipelineErrors, AModuleThatThrowsIsReportedOnEveryRank) {
  const auto ends = ends_of(4, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, [](int stage) {
      Block block(stage);
      return StageModule(
          [block, stage](at::Tensor x) mutable {
            if (stage == 2 && !StepContext::current()->trial && *StepContext::current()->microbatch == 1)
              throw std::runtime_error("the reactor is too hot");
            return block->forward(x);
          },
          {block.ptr()});
    });
    plain_step(pipeline);
  });
  EXPECT_TRUE(has_text(ends[2], "StageForwardError: stage 2, microbatch 1"));
  EXPECT_TRUE(has_text(ends[2], "float32[2, 6]"));
  for (const std::size_t rank : {0, 1, 3}) {
    EXPECT_TRUE(has_text(ends[rank], "PeerLostError"));
    EXPECT_TRUE(has_text(ends[rank], "the reactor is too hot"));
  }
}

TEST(PipelineErrors, TheCauseIsNested) {
  bool nested = false;
  try {
    comm::run_ranks(1, 10s, [](comm::World& world) {
      PipelineRuntime pipeline = pipeline_of(world, [](int) {
        return StageModule(
            [](at::Tensor x) -> at::Tensor {
              if (StepContext::current()->trial) return x;
              throw std::out_of_range("inner");
            },
            {});
      });
      plain_step(pipeline);
    });
  } catch (const StageForwardError& error) {
    try {
      std::rethrow_if_nested(error);
    } catch (const std::out_of_range& inner) {
      nested = std::string(inner.what()) == "inner";
    }
  }
  EXPECT_TRUE(nested);
}

TEST(PipelineErrors, AModuleThatFailsInItsTrialRun) {
  const auto ends = ends_of(2, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, [](int stage) {
      return StageModule(
          [stage](at::Tensor x) {
            return stage == 1 ? x.matmul(at::ones({5, 5})) : x * 2;
          },
          {});
    });
    plain_step(pipeline);
  });
  EXPECT_TRUE(has_text(ends[1], "StageForwardError: stage 1 failed in its trial run"));
  EXPECT_TRUE(has_text(ends[0], "PeerLostError"));
}

TEST(PipelineErrors, OutputsThatChange) {
  // One microbatch returns an additional row, unannounced.
  const auto drift = ends_of(2, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, [](int stage) {
      Block block(stage);
      return StageModule(
          [block, stage](at::Tensor x) mutable {
            at::Tensor y = block->forward(x);
            if (stage == 0 && StepContext::current()->microbatch == 2) y = at::cat({y, y.narrow(0, 0, 1)});
            return y;
          },
          {block.ptr()});
    });
    plain_step(pipeline);
  });
  EXPECT_TRUE(
      has_text(drift[0], "PipeliningMetadataError: output 0 of stage 0, microbatch 2: got float32[3, 6]"));
  EXPECT_TRUE(has_text(drift[0], "announce_shapes"));
  EXPECT_TRUE(has_text(drift[1], "PeerLostError"));

  const auto count = ends_of(2, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, [](int stage) {
      return StageModule(
          [stage](const Tree& args, const Tree&) {
            const at::Tensor& x = args[0].tensor();
            if (stage == 0 && StepContext::current()->microbatch == 3) return Tree::tuple({x * 2, x});
            return Tree(x * 2);
          },
          {});
    });
    plain_step(pipeline);
  });
  EXPECT_TRUE(has_text(count[0], "outputs of stage 0, microbatch 3: got 2 tensors"));

  const auto kind = ends_of(2, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, [](int stage) {
      return StageModule(
          [stage](const Tree& args, const Tree&) { return stage == 0 ? Tree("text") : args[0]; }, {});
    });
    plain_step(pipeline);
  });
  EXPECT_TRUE(has_text(kind[0], "PipeliningMetadataError: output of stage 0"));
}

TEST(PipelineErrors, NeighboursWhoseExamplesDiffer) {
  const auto ends = ends_of(2, [](comm::World& world) {
    StageOptions options;
    options.input_args = {at::empty({2, world.rank() == 0 ? kWidth : 7})};
    options.output_args = {at::empty({2, kWidth})};
    PipelineRuntime pipeline = pipeline_of(world, block_module, options);
    plain_step(pipeline);
  });
  EXPECT_TRUE(has_text(ends[1], "PipeliningMetadataError: example inputs of stage 1 and what stage 0 sends"));
  EXPECT_TRUE(has_text(ends[0], "PeerLostError"));
}

TEST(PipelineErrors, ExamplesThatAreWrong) {
  const auto ends = ends_of(2, [](comm::World& world) {
    StageOptions options;
    options.input_args = {at::empty({2, world.rank() == 0 ? kWidth : 7})};
    options.output_args = {at::empty({2, 7})};
    PipelineRuntime pipeline = pipeline_of(world, block_module, options);
    plain_step(pipeline);
  });
  EXPECT_TRUE(
      has_text(ends[0], "PipeliningMetadataError: output 0 of stage 0, microbatch 0: got float32[2, 6]"));
}

TEST(PipelineErrors, ExamplesOfSomeStagesAreOnlyCompared) {
  const WarningCapture capture;
  comm::run_ranks(2, 20s, [](comm::World& world) {
    StageOptions options;
    if (world.rank() == 0) {
      options.input_args = {at::empty({2, kWidth})};
      options.output_args = {at::empty({3, kWidth})};
    }
    PipelineRuntime pipeline = pipeline_of(world, block_module, options);
    plain_step(pipeline);
    EXPECT_FALSE(pipeline.report().is_static);
  });
  ASSERT_EQ(capture.warnings().size(), 1U);
  EXPECT_TRUE(has_text(capture.warnings()[0].message, "example outputs of stage 0"));
}

// Returns the type and message of the error of a call that does not begin; a correct step must work
// afterwards.
template <class Call>
std::string refusal_of(PipelineRuntime& pipeline, const Call& call) {
  std::string said;
  try {
    call();
  } catch (const PipeliningMetadataError& error) {
    said = std::string("PipeliningMetadataError: ") + error.what();
  } catch (const StateError& error) {
    said = std::string("StateError: ") + error.what();
  } catch (const ValueError& error) {
    said = std::string("ValueError: ") + error.what();
  }
  EXPECT_THROW(trace_last_step(pipeline), StateError);
  const StepResult result = plain_step(pipeline);
  if (pipeline.stages().back().is_last()) {
    EXPECT_EQ(result.losses.size(), 4U);
  }
  return said;
}

TEST(PipelineErrors, RanksThatDoDifferentThings) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, block_module);
    const test::Batch batch = test::plain_batch(0, 8);
    const std::string said = refusal_of(pipeline, [&] {
      world.rank() == 0 ? pipeline.step(batch.args, {}, batch.target)
                        : pipeline.eval(batch.args, {}, batch.target);
    });
    EXPECT_TRUE(has_text(said,
                         "PipeliningMetadataError: ranks of a pipeline disagree: step with backward (1) or "
                         "evaluation (0): got 0 on rank 1"));
  });
  const auto counts = ends_of(2, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, block_module, {}, world.rank() == 0 ? 4 : 8);
    plain_step(pipeline);
  });
  // Both detect it; the one that receives the other's error first quotes it.
  for (const std::string& end : counts)
    EXPECT_TRUE(has_text(end, "ranks of a pipeline disagree: number of microbatches"));
  EXPECT_TRUE(counts[0].starts_with("PipeliningMetadataError") ||
              counts[1].starts_with("PipeliningMetadataError"))
      << counts[0];
}

// Each rank calls with these arguments; `where` refuses them, the others quote it, and the pipeline stays
// usable.
void expect_refused(int where, const std::string& what, const std::function<void(PipelineRuntime&)>& call,
                    const char* type = "ValueError: ") {
  comm::run_ranks(3, 20s, [&](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, world.rank() == 2 ? block_module : keyword_module);
    for (int again = 0; again < 2; ++again) {
      const std::string said = refusal_of(pipeline, [&] { call(pipeline); });
      if (world.rank() == where) {
        EXPECT_TRUE(has_text(said, type + what));
      } else {
        EXPECT_TRUE(has_text(said, "ValueError: a step of the pipeline did not begin: rank " +
                                       std::to_string(where) + " refused it: " + what));
      }
    }
  });
}

TEST(PipelineErrors, ArgumentsThatAreMissing) {
  const test::Batch batch = test::plain_batch(0, 8);
  expect_refused(0, "arguments of a step on the rank of the first stage",
                 [&](PipelineRuntime& pipeline) { pipeline.step({}, {}, batch.target); });
  expect_refused(2, "target of a step on the rank of the last stage",
                 [&](PipelineRuntime& pipeline) { pipeline.step(batch.args); });
}

TEST(PipelineErrors, FewerRowsThanMicrobatches) {
  const test::Batch batch = test::plain_batch(0, 8), few = test::plain_batch(0, 3);
  const auto words = [](const char* what) {
    return std::string("microbatches that the ") + what +
           " of a step make: got 3, expected 4, as in the schedule; pass a batch of at least as many rows";
  };
  for (const bool trains : {true, false}) {
    const auto call = [&](PipelineRuntime& pipeline, const Tree& args, const Tree& kwargs,
                          const Tree& target) {
      trains ? pipeline.step(args, kwargs, target) : pipeline.eval(args, kwargs, target);
    };
    expect_refused(0, words("arguments"),
                   [&](PipelineRuntime& pipeline) { call(pipeline, few.args, {}, batch.target); });
    expect_refused(2, words("target"),
                   [&](PipelineRuntime& pipeline) { call(pipeline, batch.args, {}, few.target); });
    expect_refused(1, words("arguments"), [&](PipelineRuntime& pipeline) {
      call(pipeline, batch.args, pipeline.rank() == 1 ? Tree::dict({{"mask", at::ones({3})}}) : Tree(),
           batch.target);
    });
  }
}

TEST(PipelineErrors, KeywordArgumentsThatAStageDoesNotTake) {
  const test::Batch batch = test::plain_batch(0, 8);
  expect_refused(2, "keyword arguments of a step, for stage 2: got 'gain', 'shift', expected none",
                 [&](PipelineRuntime& pipeline) {
                   pipeline.step(batch.args, Tree::dict({{"gain", 1.5}, {"shift", 2.0}}), batch.target);
                 });
}

TEST(PipelineErrors, ArgumentsWithoutARecord) {
  const test::Batch batch = test::plain_batch(0, 8);
  const at::Tensor quantized = at::quantize_per_tensor(at::ones({8}), 0.1, 0, at::kQInt8);
  expect_refused(
      1, "record of a tensor: got QInt8[2]",
      [&](PipelineRuntime& pipeline) {
        pipeline.step(batch.args, pipeline.rank() == 1 ? Tree::dict({{"mask", quantized}}) : Tree(),
                      batch.target);
      },
      "PipeliningMetadataError: ");
}

TEST(PipelineErrors, SeveralRanksThatRefuse) {
  comm::run_ranks(3, 20s, [&](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, block_module);
    const std::string said = refusal_of(pipeline, [&] { pipeline.step(); });
    if (world.rank() == 0) {
      EXPECT_TRUE(has_text(said, "ValueError: arguments of a step"));
    }
    if (world.rank() == 1) {
      EXPECT_TRUE(has_text(said, "rank 0 refused it: arguments of a step") &&
                  has_text(said, "; rank 2 refused it: target of a step"));
    }
    if (world.rank() == 2) {
      EXPECT_TRUE(has_text(said, "ValueError: target of a step"));
    }
  });
}

TEST(PipelineErrors, AFailedPipelineStaysFailed) {
  std::string second;
  ends_of(1, [&](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, [](int) {
      return StageModule(
          [](at::Tensor x) -> at::Tensor {
            if (StepContext::current()->trial) return x;
            throw std::runtime_error("no");
          },
          {});
    });
    EXPECT_THROW(plain_step(pipeline), StageForwardError);
    try {
      plain_step(pipeline);
    } catch (const StateError& error) {
      second = error.what();
    }
  });
  EXPECT_TRUE(has_text(second, "an earlier one failed"));
}

// ---------------------------------------------------------------------------------------------------
// exceptions of users' code

struct ForeignException {};  // not a std::exception

bool nests_foreign_exception(const std::exception& error) {
  try {
    std::rethrow_if_nested(error);
  } catch (const ForeignException&) {
    return true;
  } catch (...) {
  }
  return false;
}

struct FailsInBackward : torch::autograd::Function<FailsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    if (!StepContext::current()->trial) throw std::range_error("steep");
    return {gradients[0]};
  }
};

enum class Place { Forward, Metadata, Loss, Trial, TrialHook, Backward, WeightStep, GradientsDone };

// Stage 1 of two fails at this place; returns the error of its rank.
std::string failure_at(Place place, bool& nested, bool told = true) {
  const auto ends = ends_of(2, [&](comm::World& world) {
    StageOptions options;
    const bool fails = world.rank() == 1;
    const auto here = [place, fails](Place wanted) { return fails && place == wanted; };
    if (here(Place::TrialHook))
      options.trial_hooks.forward = [](const StageModule&, const Tree&, const Tree&) -> Tree {
        throw ForeignException();
      };
    if (here(Place::WeightStep))
      options.weight_step_builder = []() -> std::function<void()> { throw ForeignException(); };
    Block block(world.rank());
    const StageModule module(
        [block, here](at::Tensor x, const Tree&) mutable -> at::Tensor {
          const bool trial = StepContext::current()->trial;
          if (here(Place::Trial)) throw ForeignException();
          if (here(Place::Forward) && !trial) throw ForeignException();
          if (here(Place::Metadata) && !trial) throw PipeliningMetadataError("a mesh is missing");
          return block->forward(here(Place::Backward) ? FailsInBackward::apply(x) : x);
        },
        {block.ptr()});
    const PipelineLoss loss([place](const at::Tensor& output, const at::Tensor& target) -> at::Tensor {
      if (place == Place::Loss) throw ForeignException();
      return (output - target).pow(2).mean();
    });
    PipelineOptions pipeline_options{world};
    if (here(Place::GradientsDone)) pipeline_options.gradients_done = [](int) { throw ForeignException(); };
    Schedule1F1B pipeline(PipelineStage(module, world.rank(), 2, at::kCPU, options), 4, loss,
                          pipeline_options);
    const test::Batch batch = test::plain_batch(0, 8);
    try {
      pipeline.step(batch.args, Tree::dict({{"gain", 2.5}}), batch.target);
    } catch (const std::exception& error) {
      if (fails) nested = nests_foreign_exception(error);
      throw;
    }
  });
  if (told) {
    EXPECT_TRUE(has_text(ends[0], "PeerLostError"));
    EXPECT_TRUE(has_text(ends[0], ends[1].substr(ends[1].find(": ") + 2)));
  }
  return ends[1];
}

TEST(PipelineErrors, WhateverUsersThrowNamesStageAndArguments) {
  const std::string kind = "an exception of type penstock::pipeline_errors_test::ForeignException";
  const std::string args = "args (float32[2, 6],), kwargs {'gain': 2.5}: ";
  bool nested = false;
  EXPECT_TRUE(has_text(failure_at(Place::Forward, nested),
                       "StageForwardError: stage 1, microbatch 0: forward failed with " + args + kind));
  EXPECT_TRUE(nested);
  EXPECT_TRUE(has_text(
      failure_at(Place::Metadata, nested),
      "StageForwardError: stage 1, microbatch 0: forward failed with " + args + "a mesh is missing"));
  EXPECT_TRUE(has_text(failure_at(Place::Loss, nested),
                       "StageForwardError: stage 1, microbatch 0: loss failed with output float32[2, 6], "
                       "target float32[2, 6]: " +
                           kind));
  EXPECT_TRUE(nested);
  EXPECT_TRUE(has_text(failure_at(Place::Trial, nested),
                       "StageForwardError: stage 1 failed in its trial run with " + args + kind));
  EXPECT_TRUE(nested);
  EXPECT_TRUE(has_text(failure_at(Place::TrialHook, nested),
                       "StageForwardError: stage 1 failed in its trial run with " + args + kind));
  EXPECT_TRUE(nested);
  EXPECT_TRUE(has_text(
      failure_at(Place::Backward, nested),
      "StageBackwardError: stage 1, microbatch 0: backward failed with gradients (float32[],): steep"));
  EXPECT_TRUE(
      has_text(failure_at(Place::WeightStep, nested),
               "StageBackwardError: stage 1, microbatch 0: the weight step of the stage failed: " + kind));
  EXPECT_TRUE(nested);
  // Its rank has sent everything that the other one waits for, so the other rank's step may succeed.
  EXPECT_TRUE(has_text(failure_at(Place::GradientsDone, nested, false),
                       "StageBackwardError: stage 1: gradients_done failed: " + kind));
  EXPECT_TRUE(nested);
}

TEST(PipelineErrors, NoLoss) {
  comm::run_ranks(1, 10s, [](comm::World& world) {
    const PipelineStage stage(block_module(0), 0, 1, at::kCPU);
    ScheduleGPipe pipeline(stage, 2, {}, {world});
    EXPECT_THROW(plain_step(pipeline), StateError);
    const StepResult result = pipeline.eval(test::plain_batch(0, 8).args);  // the pipeline stays usable
    EXPECT_TRUE(result.losses.empty());
    EXPECT_EQ(result.output->tensor().size(0), 8);
  });
}

TEST(PipelineErrors, AGradientThatWasNotAgreedOn) {
  // Two output examples, one of them without requires_grad: its gradient would be lost.
  const auto ends = ends_of(2, [](comm::World& world) {
    StageOptions options;
    options.input_args = {at::empty({2, kWidth})};
    options.output_args = {at::empty({2, kWidth}).requires_grad_(), at::empty({2, kWidth})};
    if (world.rank() == 1) {
      options.input_args = options.output_args;
      options.output_args = {at::empty({2, kWidth}).requires_grad_()};
    }
    PipelineRuntime pipeline = pipeline_of(
        world,
        [](int stage) {
          Block block(stage);
          return StageModule(
              [block, stage](const Tree& args, const Tree&) mutable {
                const at::Tensor h = block->forward(args[0].tensor());
                return stage == 0 ? Tree::tuple({h, h.sin()}) : Tree(h + args[1].tensor());
              },
              {block.ptr()});
        },
        options);
    plain_step(pipeline);
  });
  EXPECT_TRUE(has_text(ends[0], "output 1 of stage 0, microbatch 0: got it needs a gradient"));
}

}  // namespace pipeline_errors_test
}  // namespace penstock
