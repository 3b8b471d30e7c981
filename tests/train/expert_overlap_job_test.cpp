// Exchanges of experts under the computation of the other half of a unit (layout.overlap_experts): training
// has the same bits as with one after the other, in every layout.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/config/expert_overlap.h"
#include "penstock/train/job/job.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace expert_overlap_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::has_text;
using penstock::test::Layout;
using penstock::test::message_of;
using penstock::test::Options;
using penstock::test::small_data;
using penstock::test::with;

// Everything in which the order of things could matter: random numbers, loads and biases of routers,
// auxiliary losses, a shared expert, weights that are used several times.
const Options kModel = {"--pattern",
                        "EAEE",
                        "--attention_feed",
                        "false",
                        "--experts",
                        "4",
                        "--expert_width",
                        "16",
                        "--shared_expert_width",
                        "8",
                        "--balance_weight",
                        "0.5",
                        "--router_z_weight",
                        "0.1",
                        "--router_bias_rate",
                        "0.002",
                        "--depth_layers",
                        "0,2",
                        "--multi_token_depth",
                        "1",
                        "--multi_token_block",
                        "E",
                        "--tie_head",
                        "true",
                        "--dropout",
                        "0.1",
                        "--lr",
                        "0.01"};

struct Ended {
  std::vector<double> losses, norms;
  std::map<std::string, double> auxiliary;    // of the last step
  std::map<std::string, at::Tensor> tensors;  // by rank and name: parameters and buffers
  int exchanges = 0;                          // that were overlapped, on all ranks in all steps
  std::optional<StepTrace> trace;             // of the last step, on rank 0
};

TrainConfig config_with(const Layout& layout, const Options& more, int ep = 2) {
  return config_of(layout, with(with(kModel, {"--ep", std::to_string(ep)}), more));
}

Ended train(const Layout& layout, const Options& more, bool overlaps) {
  const TrainConfig config = config_with(layout, overlaps ? more : with(more, {"--overlap_experts", "off"}));
  Ended ended;
  std::mutex mutex;
  comm::run_ranks(static_cast<int>(config.layout.ranks), 120s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    for (int step = 0; step < 2; ++step) {
      const StepOutcome outcome = job.train_step();
      const std::lock_guard lock(mutex);
      ended.exchanges += job.pipeline().report().overlapped_exchanges;
      if (world.rank() != 0) continue;
      ended.losses.push_back(outcome.loss);
      ended.norms.push_back(outcome.grad_norm);
      for (const auto& each : outcome.auxiliary) ended.auxiliary[each.name] = each.value;
    }
    std::optional<StepTrace> trace = trace_last_step(job.pipeline(), false);
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) ended.trace = std::move(trace);
    int number = 0;
    // Stages of one rank may have parameters of the same name.
    const at::NoGradGuard no_grad;
    const auto keep = [&](const std::string& name, const at::Tensor& tensor) {
      ended.tensors[std::to_string(world.rank()) + "." + std::to_string(number++) + " " + name] =
          (is_dtensor(tensor) ? to_local(tensor) : tensor).detach().clone();
    };
    for (const optim::NamedParameter& parameter : job.model().parameters())
      keep(parameter.name, parameter.tensor);
    for (const models::StateBuffer& buffer : job.model().state_buffers()) keep(buffer.name, buffer.tensor);
  });
  return ended;
}

Layout layout_of(const std::string& schedule) {
  return {.name = schedule, .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = schedule};
}

void expect_same_bits(const Layout& layout, const Options& more) {
  SCOPED_TRACE(layout.name);
  const Ended apart = train(layout, more, false), overlapped = train(layout, more, true);
  EXPECT_EQ(apart.exchanges, 0);
  EXPECT_GT(overlapped.exchanges, 0);
  EXPECT_EQ(overlapped.losses, apart.losses);
  EXPECT_EQ(overlapped.norms, apart.norms);
  EXPECT_EQ(overlapped.auxiliary, apart.auxiliary);
  EXPECT_FALSE(apart.auxiliary.empty());
  ASSERT_EQ(overlapped.tensors.size(), apart.tensors.size());
  for (const auto& [name, tensor] : apart.tensors)
    EXPECT_TRUE(at::equal(overlapped.tensors.at(name), tensor)) << name;
}

TEST(ExpertOverlapJob, HasTheSameBits) {
  for (const char* schedule : {"DualPipeV", "DualPipe"}) expect_same_bits(layout_of(schedule), {});
}

// Exchanges of forwards that are computed again take place in the backward.
TEST(ExpertOverlapJob, HasTheSameBitsWithRecomputation) {
  for (const char* schedule : {"DualPipeV", "DualPipe"})
    expect_same_bits(layout_of(schedule), {"--recompute", "experts"});
  expect_same_bits(layout_of("DualPipeV"), {"--recompute", "block", "--precision", "bf16"});
}

// Other collectives inside of the halves keep their order on all ranks.
TEST(ExpertOverlapJob, HasTheSameBitsWithShardsAndTensorParallelism) {
  expect_same_bits(layout_of("DualPipeV"), {"--shard", "2"});
  Layout tensors = layout_of("DualPipeV");
  tensors.name = "tp 2";
  tensors.tp = 2;
  expect_same_bits(tensors, {});
}

TEST(ExpertOverlapJob, TheTraceShowsIt) {
  const Ended ended = train(layout_of("DualPipeV"), {}, true);
  ASSERT_TRUE(ended.trace);
  int forward_hides = 0, backward_hides = 0;
  for (const auto& events : ended.trace->ranks)
    for (const TraceEvent& unit : events)
      for (const UnitPiece& exchange : unit.pieces)
        for (const UnitPiece& piece : unit.pieces) {
          if (exchange.kind != UnitPiece::Kind::Exchange || piece.kind != UnitPiece::Kind::Compute ||
              piece.member == exchange.member || piece.begin_ns < exchange.begin_ns ||
              piece.begin_ns >= exchange.end_ns)
            continue;
          const bool forward =
              unit.actions[static_cast<std::size_t>(exchange.member)].kind() == schedule::ActionKind::Forward;
          ++(forward ? backward_hides : forward_hides);
        }
  EXPECT_GT(backward_hides, 0);
  EXPECT_GT(forward_hides, 0);
}

TEST(ExpertOverlap, SaysWhetherAndWhy) {
  const auto text = [](const Layout& layout, const Options& more, int ep = 2) {
    const TrainConfig config = config_with(layout, more, ep);
    return ExpertOverlap(config.layout, configured_schedule(config.layout)).text();
  };
  EXPECT_TRUE(has_text(text(layout_of("DualPipeV"), {}), "overlap with computation in"));
  EXPECT_TRUE(has_text(text(layout_of("DualPipe"), {}), "units of DualPipe"));
  EXPECT_TRUE(has_text(text(layout_of("DualPipeV"), {"--overlap_experts", "off"}),
                       "do not overlap with computation: layout.overlap_experts"));
  EXPECT_TRUE(has_text(text(layout_of("ZBVZeroBubble"), {}), "ZBVZeroBubble pairs no forward"));
  EXPECT_EQ(text(layout_of("DualPipeV"), {}, 1), "");
}

TEST(ExpertOverlap, AKeyWithoutEffectIsRefused) {
  const auto refusal = [](const Layout& layout, const Options& more, int ep = 2) {
    return message_of<ConfigError>([&] { config_with(layout, more, ep); });
  };
  EXPECT_TRUE(has_text(refusal(layout_of("DualPipeV"), {"--overlap_experts", "off"}, 1),
                       "because no rows of experts are exchanged"));
  EXPECT_TRUE(has_text(refusal(layout_of("ZBVZeroBubble"), {"--overlap_experts", "off"}),
                       "pairs no forward with a backward"));
  EXPECT_TRUE(has_text(refusal(layout_of("DualPipeV"), {"--overlap_experts", "on"}), "auto, off"));
}

}  // namespace expert_overlap_job_test
}  // namespace penstock::train
