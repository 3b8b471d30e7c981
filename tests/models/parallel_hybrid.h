// Hybrid stages over ranks against one process, in float64: logits, auxiliary losses and gradients of every
// parameter.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/gradients.h"
#include "penstock/hybrid.h"
#include "penstock/language_model.h"
#include "penstock/recompute_plan.h"
#include "penstock/step_context.h"
#include "penstock/world.h"

namespace penstock::models::test {

// Sums over ranks are in another order.
constexpr double kParallelTolerance = 1e-11;

inline HybridOptions small_parallel(const std::string& pattern) {
  HybridOptions options{.pattern = pattern, .vocabulary = 11, .width = 16, .context = 16};
  options.heads = 4;
  options.key_value_heads = 4;
  options.feed_width = 12;
  options.experts = 4;
  options.expert_width = 8;
  options.shared_expert_width = 4;
  options.balance_weight = 0.5;
  options.router_z_weight = 0.1;
  options.state_size = 3;
  options.state_head_width = 4;  // 8 heads
  options.state_chunk = 4;
  return options;
}

// All kinds of blocks, with options that concern several of them.
inline HybridOptions tied_parallel() {
  HybridOptions options = small_parallel("AEMF");
  options.tie_head = true;
  options.embed_scale = true;
  options.norm = "dynamic_tanh";
  options.attention_feed = true;
  return options;
}
inline HybridOptions limited_parallel() {
  HybridOptions options = small_parallel("AEMF");
  options.windows = {3, 0, 0, 0};
  options.router_scores = "sigmoid";
  options.capacity_factor = 0.7;
  return options;
}

// Four rows of at most 9 tokens. In a row no token occurs twice: a router of depths would have to choose
// between equal ones, and rounding would decide.
struct ParallelInput {
  explicit ParallelInput(std::int64_t length = 9)
      : tokens(at::arange(2, 6).unsqueeze(1).mul(at::arange(length)).add(3).remainder(11)),
        documents(at::tensor({0, 0, 0, 1, 1, 1, 1, 2, 2}, at::kLong)
                      .narrow(0, 0, length)
                      .expand({4, length})
                      .contiguous()) {}

  at::Tensor tokens, documents;
};

inline HybridStage double_stage(const HybridOptions& options) {
  HybridStage stage(options);
  stage->to(at::kDouble);
  return stage;
}

// The initial deviation of 0.02 would make sums over ranks that are missing too small to notice.
inline void fill_strongly(HybridStageImpl& stage) {
  stage.set_initial_values(17);
  const at::NoGradGuard no_grad;
  for (const auto& item : stage.named_parameters()) {
    if (item.value().dim() < 2) continue;
    at::Tensor own = is_dtensor(item.value()) ? to_local(item.value()) : item.value();
    own.mul_(12);
  }
}

inline double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

inline std::map<std::string, at::Tensor> whole_gradients(const HybridStageImpl& stage) {
  std::vector<optim::NamedParameter> named;
  for (const auto& item : stage.named_parameters()) named.push_back({item.key(), item.value()});
  optim::settle_gradients(named);
  std::map<std::string, at::Tensor> gradients;
  for (const optim::NamedParameter& parameter : named) {
    const at::Tensor& gradient = parameter.tensor.grad();
    gradients[parameter.name] = is_dtensor(gradient) ? full_tensor(gradient) : gradient.clone();
  }
  return gradients;
}

// What a parallel stage is besides split over ranks.
struct ParallelSetup {
  bool sequence_parallel = false;
  bool recompute = false;
  std::int64_t length = 9;
};

// Every rank has the same tokens.
inline void expect_tensor_parallel(const HybridOptions& options, int ranks, const std::string& what,
                                   HybridMetadata metadata = {}, const ParallelSetup& setup = {}) {
  SCOPED_TRACE(what + ", " + std::to_string(ranks) + " ranks");
  const ParallelInput input(setup.length);
  StepContext step;  // the key of dropout
  step.microbatch = 0;
  metadata.documents = input.documents;
  const double tokens = static_cast<double>(input.tokens.numel());
  HybridStage alone = double_stage(options);
  fill_strongly(*alone);
  at::Tensor expected;
  {
    const StepGuard guard(step);
    expected = alone->forward_with(input.tokens, metadata);
    token_loss(expected, input.tokens, tokens).backward();
  }
  const auto gradients = whole_gradients(*alone);
  std::mutex mutex;
  comm::run_ranks(ranks, std::chrono::seconds(60), [&](comm::World& world) {
    const StepGuard guard(step);
    HybridStage stage = double_stage(options);
    if (setup.sequence_parallel) stage->set_sequence_parallel();
    stage->parallelize(world.mesh("cpu", {{"tp", ranks}}));
    fill_strongly(*stage);
    if (setup.recompute) stage->set_recompute(RecomputePlan::all());
    const at::Tensor logits = stage->forward_with(input.tokens, metadata);
    token_loss(logits, input.tokens, tokens).backward();
    const at::Tensor all = full_tensor(logits.detach());
    const auto own = whole_gradients(*stage);
    const std::lock_guard lock(mutex);
    EXPECT_LT(largest_difference(all, expected.detach()), kParallelTolerance);
    ASSERT_EQ(own.size(), gradients.size());
    for (const auto& [name, gradient] : gradients)
      EXPECT_LT(largest_difference(own.at(name), gradient), kParallelTolerance) << name;
    for (std::size_t i = 0; i < alone->auxiliary_losses().size(); ++i)
      EXPECT_LT(largest_difference(stage->auxiliary_losses()[i].value, alone->auxiliary_losses()[i].value),
                kParallelTolerance);
  });
}

}  // namespace penstock::models::test
