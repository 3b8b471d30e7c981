// Tensors between stages in shares and in narrower dtypes: shares change no bit, a narrower dtype rounds what
// is sent and reports the error.
#include "penstock/pipeline/runtime/border_codec.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/pipeline.h"
#include "penstock/torch/compat/float8.h"
#include "penstock/torch/tree/dense_layout.h"
#include "penstock/torch/tree/tensor_record.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace border_codec_test {

using namespace std::chrono_literals;

constexpr int kEqualRanks = 3;

// What a tensor is expected to be after it was sent.
at::Tensor rounded(const at::Tensor& values, BorderDtype dtype, int ranks) {
  if (!values.is_floating_point() || dtype == BorderDtype::Same) return values;
  if (dtype == BorderDtype::BFloat16)
    return values.element_size() > 2 ? values.to(at::kBFloat16).to(values.scalar_type()) : values;
  const std::int64_t share = (values.numel() + ranks - 1) / ranks;
  std::vector<at::Tensor> parts;
  for (std::int64_t first = 0; first < values.numel(); first += share) {
    // The last share is filled up with zeros, which changes no scale.
    const at::Tensor part = values.narrow(0, first, std::min(share, values.numel() - first));
    parts.push_back(from_float8(to_float8(part), part.numel()).to(values.scalar_type()));
  }
  return parts.empty() ? values : at::cat(parts);
}

TEST(BorderCodec, AnyTensorArrivesAsRounded) {
  for (const bool shares : {false, true}) {
    const int ranks = shares ? kEqualRanks : 1;
    comm::run_ranks(ranks, 60s, [&](comm::World& world) {
      std::mt19937 random(7);  // the same on all ranks
      for (const BorderDtype dtype : {BorderDtype::Same, BorderDtype::BFloat16, BorderDtype::Float8}) {
        BorderOptions options{.dtype = dtype};
        if (shares) options.equal_ranks = world.group();
        BorderCodec codec(options);
        for (int round = 0; round < 25; ++round) {
          const auto count = static_cast<std::int64_t>(random() % 700) / (round % 5 == 0 ? 100 : 1);
          const at::ScalarType type =
              std::vector{at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kHalf}[random() % 5];
          const at::Tensor values = (test::values({count}, static_cast<int>(random() % 1000)) * 20).to(type);
          const TensorMeta meta = record_of(values);
          at::Tensor arrived = at::full_like(values, 99);
          if (codec.changes(meta)) {
            const at::Tensor message = codec.encode(values, meta);
            const at::Tensor buffer = codec.buffer_for(arrived, meta);
            ASSERT_EQ(message.sizes(), buffer.sizes());
            ASSERT_EQ(message.scalar_type(), buffer.scalar_type());
            codec.decode(buffer.copy_(message), arrived, meta);
          } else {
            ASSERT_TRUE(!shares && (dtype == BorderDtype::Same || !values.is_floating_point() ||
                                    (dtype == BorderDtype::BFloat16 && values.element_size() == 2)));
            arrived.copy_(values);
          }
          ASSERT_TRUE(at::equal(arrived, rounded(values, dtype, ranks)))
              << "dtype " << static_cast<int>(dtype) << ", " << count << " of " << values.dtype();
        }
      }
    });
  }
}

struct PipelineRun {
  std::map<std::string, at::Tensor> gradients;  // by stage and parameter
  at::Tensor loss;
  std::int64_t bytes = 0;  // sent by all ranks
  double error = 0;        // relative, of all ranks
};

// A pipeline of 2 ranks with two stages each, as often as there are equal ranks.
PipelineRun run_pipeline(schedule::ScheduleKind kind, BorderDtype dtype, int equal_ranks) {
  PipelineRun all;
  std::mutex mutex;
  double squared_error = 0, squared_values = 0;
  comm::run_ranks(2 * equal_ranks, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = world.mesh("cpu", {{"pp", 2}, {"tp", equal_ranks}});
    PipelineOptions options{world};
    options.ranks = mesh.mesh().rank_list(0);
    options.borders.dtype = dtype;
    if (equal_ranks > 1) options.borders.equal_ranks = mesh.group("tp");
    const int here = world.rank() / equal_ranks;
    const schedule::Schedule order =
        schedule::generate(kind, {.ranks = 2, .stages_per_rank = 2, .microbatches = 4, .group_size = {}});
    std::vector<PipelineStage> own;
    for (const int stage : order.stages().stages_of(here))
      own.emplace_back(test::two_blocks(stage), stage, order.stages().stages(), at::kCPU);
    PipelineRuntime pipeline(own, order, test::square_loss(), options);
    const test::Batch batch = test::plain_batch(0, 12);
    const StepResult result = pipeline.step(batch.args, {}, batch.target);
    const BorderReport border = pipeline.report().border;
    const std::lock_guard lock(mutex);
    all.bytes += border.bytes;
    squared_error += border.squared_error;
    squared_values += border.squared_values;
    if (!result.losses.empty()) all.loss = at::stack(result.losses);
    for (PipelineStage& stage : pipeline.stages()) {
      int number = 0;
      for (const at::Tensor& parameter : stage.module().parameters()) {
        const std::string name = std::to_string(stage.index()) + "." + std::to_string(number++);
        const auto [at, is_new] = all.gradients.emplace(name, parameter.grad().clone());
        EXPECT_TRUE(is_new || at::equal(at->second, parameter.grad())) << name;
      }
    }
  });
  all.error = squared_values > 0 ? std::sqrt(squared_error / squared_values) : 0;
  return all;
}

TEST(BorderCodec, SharesChangeNoBitInAnySchedule) {
  for (const auto kind : {schedule::ScheduleKind::Interleaved1F1B, schedule::ScheduleKind::ZBVZeroBubble,
                          schedule::ScheduleKind::DualPipeV}) {
    const PipelineRun whole = run_pipeline(kind, BorderDtype::Same, 1);
    const PipelineRun shared = run_pipeline(kind, BorderDtype::Same, 2);
    EXPECT_TRUE(at::equal(whole.loss, shared.loss));
    ASSERT_EQ(whole.gradients.size(), shared.gradients.size());
    for (const auto& [name, gradient] : whole.gradients)
      EXPECT_TRUE(at::equal(gradient, shared.gradients.at(name))) << name;
    // The two ranks send together what one sends alone.
    EXPECT_GT(whole.bytes, 0);
    EXPECT_EQ(shared.bytes, whole.bytes);
    EXPECT_EQ(shared.error, 0);
  }
}

TEST(BorderCodec, NarrowDtypesSendLessAndReportTheirError) {
  const auto kind = schedule::ScheduleKind::ZBVZeroBubble;
  const PipelineRun exact = run_pipeline(kind, BorderDtype::Same, 1);
  const auto off_by = [&](const PipelineRun& run) {
    double error = 0, size = 0;
    for (const auto& [name, gradient] : exact.gradients) {
      error += (run.gradients.at(name) - gradient).pow(2).sum().item<double>();
      size += gradient.pow(2).sum().item<double>();
    }
    return std::sqrt(error / size);
  };
  const PipelineRun bf16 = run_pipeline(kind, BorderDtype::BFloat16, 2);
  EXPECT_EQ(2 * bf16.bytes, exact.bytes);
  EXPECT_GT(bf16.error, 0);
  EXPECT_LT(bf16.error, std::ldexp(1.0, -8));
  EXPECT_LT(off_by(bf16), 0.01);
  EXPECT_GT(off_by(bf16), 0);
  const PipelineRun fp8 = run_pipeline(kind, BorderDtype::Float8, 2);
  EXPECT_GT(fp8.error, bf16.error);
  EXPECT_LT(fp8.error, 1.0 / 16);
  EXPECT_LT(off_by(fp8), 0.1);
}

}  // namespace border_codec_test
}  // namespace penstock
