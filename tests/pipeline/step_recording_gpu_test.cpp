// Steps replayed on a GPU: the same losses, outputs, gradients, buffers and weights as steps run by the host.
#include <gtest/gtest.h>

#include "penstock/dropout.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace step_recording_gpu_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::has_text;
using test::kWidth;

constexpr int kMicrobatches = 4;

// Weights, statistics that each microbatch changes, and a tied weight that only some steps use.
struct CountingBlockImpl : torch::nn::Module {
  explicit CountingBlockImpl(int number) : block(number), norm(torch::nn::BatchNorm1dOptions(kWidth)) {
    register_module("block", block);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(block(x)); }
  test::Block block;
  torch::nn::BatchNorm1d norm;
};
TORCH_MODULE(CountingBlock);

struct Pipe {
  Pipe(comm::World& world, ScheduleKind kind, bool device_graph) {
    const at::Device device(at::kCUDA, 0);
    const int stages = schedule::required_stages_per_rank(kind).value_or(2);
    std::vector<PipelineStage> all;
    for (int i = 0; i < stages; ++i) {
      blocks.emplace_back(i);
      blocks.back()->to(device);
      all.emplace_back(blocks.back(), i, stages, device);
    }
    runtime = std::make_unique<PipelineRuntime>(
        all,
        schedule::generate(
            kind, {.ranks = 1, .stages_per_rank = stages, .microbatches = kMicrobatches, .group_size = {}}),
        test::square_loss(), PipelineOptions{.world = world, .device_graph = device_graph});
  }
  std::vector<at::Tensor> tensors(bool gradients) const {
    std::vector<at::Tensor> found;
    for (const CountingBlock& block : blocks) {
      for (const at::Tensor& parameter : block->parameters())
        found.push_back(gradients ? parameter.grad() : parameter);
      if (!gradients)
        for (const at::Tensor& buffer : block->buffers()) found.push_back(buffer);
    }
    return found;
  }
  void update() {
    const at::NoGradGuard no_grad;
    for (const CountingBlock& block : blocks)
      for (const at::Tensor& parameter : block->parameters()) parameter.sub_(parameter.grad(), 0.05);
  }
  void zero_grad() {
    for (CountingBlock& block : blocks)
      for (const at::Tensor& parameter : block->parameters()) parameter.mutable_grad() = at::Tensor();
  }
  std::vector<CountingBlock> blocks;
  std::unique_ptr<PipelineRuntime> runtime;
};

void expect_equal(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& wanted,
                  const char* what) {
  ASSERT_EQ(ours.size(), wanted.size());
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(at::allclose(ours[i].to(at::kDouble), wanted[i].to(at::kDouble), 1e-5, 1e-6))
        << what << " " << i;
}

TEST(RecordedSteps, EqualThoseOfTheHost) {
  for (const ScheduleKind kind : {ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::Interleaved1F1B,
                                  ScheduleKind::ZBVZeroBubble, ScheduleKind::DualPipeV}) {
    SCOPED_TRACE(schedule::to_text(kind));
    comm::run_ranks(1, 60s, [&](comm::World& world) {
      Pipe recorded(world, kind, true), plain(world, kind, false);
      int replayed = 0;
      for (int step = 0; step < 14; ++step) {
        SCOPED_TRACE(step);
        // Two kinds of batches in turn; gradients of two steps are sometimes accumulated; an evaluation step
        // in between.
        const test::Batch batch = test::plain_batch(step, (step % 3 == 2 ? 3 : 2) * kMicrobatches);
        const at::Tensor x = batch.args[0].tensor().cuda(), target = batch.target.tensor().cuda();
        const StepResult ours = recorded.runtime->step(Tree::tuple({x}), {}, target),
                         wanted = plain.runtime->step(Tree::tuple({x}), {}, target);
        replayed += recorded.runtime->report().replayed;
        expect_equal(ours.losses, wanted.losses, "loss");
        expect_equal({ours.output->tensor()}, {wanted.output->tensor()}, "output");
        expect_equal(recorded.tensors(true), plain.tensors(true), "gradient");
        if (step % 4 == 1) continue;
        recorded.update(), plain.update();
        expect_equal(recorded.tensors(false), plain.tensors(false), "parameter or buffer");
        recorded.zero_grad(), plain.zero_grad();
        if (step == 6) {
          const StepResult mine = recorded.runtime->eval(Tree::tuple({x}), {}, target),
                           theirs = plain.runtime->eval(Tree::tuple({x}), {}, target);
          expect_equal(mine.losses, theirs.losses, "loss of evaluation");
        }
        if (step == 10) recorded.runtime->record_again();
      }
      EXPECT_EQ(replayed, 14 - 2 * 2);  // for each kind of batch the host runs the first step, and the first
                                        // one after `record_again`
      EXPECT_THROW(trace_last_step(*recorded.runtime), StateError);
    });
  }
}

TEST(RecordedSteps, GradientsZeroedInPlaceAndOfOthers) {
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    Pipe recorded(world, ScheduleKind::OneFOneB, true), plain(world, ScheduleKind::OneFOneB, false);
    for (int step = 0; step < 5; ++step) {
      const test::Batch batch = test::plain_batch(step, 2 * kMicrobatches);
      const at::Tensor x = batch.args[0].tensor().cuda(), target = batch.target.tensor().cuda();
      for (Pipe* pipe : {&recorded, &plain}) {
        for (at::Tensor& gradient : pipe->tensors(true))
          if (gradient.defined()) gradient.zero_();
        if (step == 3)
          for (CountingBlock& block : pipe->blocks)
            for (const at::Tensor& parameter : block->parameters())
              parameter.mutable_grad() = at::ones_like(parameter);
        pipe->runtime->step(Tree::tuple({x}), {}, target);
      }
      expect_equal(recorded.tensors(true), plain.tensors(true), "gradient");
    }
  });
}

TEST(RecordedSteps, MovedParametersAreRecordedAgain) {
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    Pipe recorded(world, ScheduleKind::OneFOneB, true), plain(world, ScheduleKind::OneFOneB, false);
    std::vector<bool> replayed;
    for (int step = 0; step < 6; ++step) {
      if (step == 3)
        for (Pipe* pipe : {&recorded, &plain})
          for (const at::Tensor& parameter : pipe->blocks[0]->parameters())
            at::Tensor(parameter).set_data(parameter.detach() * 1.5);
      const test::Batch batch = test::plain_batch(step, 2 * kMicrobatches);
      const at::Tensor x = batch.args[0].tensor().cuda(), target = batch.target.tensor().cuda();
      const StepResult ours = recorded.runtime->step(Tree::tuple({x}), {}, target),
                       wanted = plain.runtime->step(Tree::tuple({x}), {}, target);
      replayed.push_back(recorded.runtime->report().replayed);
      expect_equal(ours.losses, wanted.losses, "loss");
    }
    EXPECT_EQ(replayed, (std::vector<bool>{false, true, true, false, true, true}));
  });
}

template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// A stage of one function, stepped twice with a recording.
std::string error_of_module(comm::World& world, const std::function<at::Tensor(const at::Tensor&)>& function,
                            const at::Tensor& x) {
  const at::Device device(at::kCUDA, 0);
  torch::nn::Linear layer(kWidth, kWidth);
  layer->to(device);
  return error_of([&] {
    const StageModule module([&](const at::Tensor& in) { return function(layer(in)); }, {layer.ptr()});
    PipelineRuntime pipeline({PipelineStage(module, 0, 1, device, {.trial = TrialRun::Real})},
                             schedule::generate(ScheduleKind::OneFOneB, {.ranks = 1, .microbatches = 2}),
                             test::square_loss(), PipelineOptions{.world = world, .device_graph = true});
    const at::Tensor target = at::zeros({4, kWidth}, device);
    for (int i = 0; i < 2; ++i) pipeline.step(Tree::tuple({x}), {}, target);
  });
}

TEST(RecordedSteps, WhatCannotBeRecordedIsReported) {
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    const at::Tensor x = at::ones({4, kWidth}, at::kCUDA);
    const auto same = [](const at::Tensor& y) { return y; };
    EXPECT_EQ(error_of_module(world, same, x), "");
    EXPECT_TRUE(has_text(error_of_module(world, same, x.cpu()), "a tensor on cpu"));
    EXPECT_TRUE(has_text(error_of_module(world, same, x.clone().requires_grad_()), "requires gradients"));
  });
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    const at::Tensor x = at::ones({4, kWidth}, at::kCUDA);
    EXPECT_TRUE(
        has_text(error_of_module(
                     world, [](const at::Tensor& y) { return y.sum().item<float>() > 1e9 ? y * 2 : y; }, x),
                 "recording of a step"));
    EXPECT_EQ(at::ones({3}, at::kCUDA).sum().item<float>(), 3.0f)
        << "the device is usable after a recording that failed";
    EXPECT_FALSE(at::rand({64}, at::kCUDA).equal(at::rand({64}, at::kCUDA))) << "and so are random numbers";
    EXPECT_EQ(error_of_module(
                  world, [](const at::Tensor& y) { return y; }, x),
              "")
        << "and the next one succeeds";
  });
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    const at::Tensor x = at::ones({4, kWidth}, at::kCUDA);
    EXPECT_TRUE(has_text(
        error_of_module(
            world,
            [](const at::Tensor& y) { return keyed_dropout(y, 0.5, StepContext::current()->key(1, 1)); }, x),
        "while the step is recorded"));
  });
}

TEST(RecordedSteps, DropoutDrawsNewNumbersEachTime) {
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    const at::Device device(at::kCUDA, 0);
    torch::nn::Sequential layer(torch::nn::Linear(kWidth, kWidth), torch::nn::Dropout(0.5));
    layer->to(device);
    PipelineRuntime pipeline({PipelineStage(layer, 0, 1, device)},
                             schedule::generate(ScheduleKind::OneFOneB, {.ranks = 1, .microbatches = 2}),
                             test::square_loss(), PipelineOptions{.world = world, .device_graph = true});
    const at::Tensor x = at::ones({64, kWidth}, device), target = at::zeros({64, kWidth}, device);
    std::vector<at::Tensor> outputs;
    for (int step = 0; step < 4; ++step)
      outputs.push_back(pipeline.step(Tree::tuple({x}), {}, target).output->tensor());
    EXPECT_FALSE(outputs[1].equal(outputs[2]));
    EXPECT_FALSE(outputs[2].equal(outputs[3]));
    EXPECT_NEAR((outputs[3] == 0).to(at::kFloat).mean().item<float>(), 0.5, 0.1);
  });
}

}  // namespace step_recording_gpu_test
}  // namespace penstock
