// Cross entropy over tokens, normalized so that microbatches and data-parallel ranks add up to the result of
// one process.
//
// A mean of means is not the mean if microbatches have different numbers of counted targets (ignored targets
// are padding, or prompts that are not learned). The sum is therefore divided by a number that is the same
// for all of them. With N counted targets in the whole batch of a step, M microbatches and D data-parallel
// ranks:
//
//   const double each = N / (M * D);                                            // known on the host, where the batch is made
//   PipelineLoss loss([=](at::Tensor logits, at::Tensor targets) { return token_loss(logits, targets, each); });
//
// The mean over microbatches (which a pipeline takes of losses and gradients) and over ranks is then the sum
// over all tokens / N, the result of token_loss(all logits, all targets, N) in one process, up to summation
// order.
//
// Logits may be distributed, split over the vocabulary: one number per token is sent, and the loss is plain.
// 16-bit logits are summed in float32. No function here waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::models {

inline constexpr std::int64_t kIgnoredTarget = -100;

// Returns the sum over the counted targets, a scalar tensor. logits [..., vocabulary], targets [...] Long.
// Throws ValueError for shapes that do not match.
at::Tensor token_loss_sum(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored = kIgnoredTarget);

// Returns the sum divided by a fixed number of tokens. Throws ValueError unless that number is positive.
at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& targets, double tokens, std::int64_t ignored = kIgnoredTarget);

// Returns the number of counted targets: a Long scalar tensor on the device of the targets.
at::Tensor counted_targets(const at::Tensor& targets, std::int64_t ignored = kIgnoredTarget);

}  // namespace penstock::models
