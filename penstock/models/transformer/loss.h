// Cross entropy over tokens, so that microbatches and data-parallel ranks add up to what one process computes.
//
// A mean of means is not the mean where microbatches differ in their numbers of targets that count (ignored ones are padding, or prompts
// that are not learned). So the sum is divided by a number that is the same for all of them. With N targets that count in the whole
// batch of a step, M microbatches and D data-parallel ranks:
//
//   const double each = N / (M * D);                                            // known on the host, where the batch is made
//   PipelineLoss loss([=](at::Tensor logits, at::Tensor targets) { return token_loss(logits, targets, each); });
//
// The mean over microbatches (which a pipeline takes of losses and gradients) and over ranks is then the sum over all tokens / N: what
// token_loss(all logits, all targets, N) gives in one process, up to the order of sums.
//
// Logits may be distributed, split over the vocabulary: one number a token is sent, and the loss is plain. Logits of 16 bits are summed in
// float32. No function here waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::models {

inline constexpr std::int64_t kIgnoredTarget = -100;

// Sum over the targets that count, without dims. logits [..., vocabulary], targets [...] Long. Throws ValueError for shapes that do not
// fit.
at::Tensor token_loss_sum(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored = kIgnoredTarget);

// The sum divided by a fixed number of tokens. Throws ValueError unless that is positive.
at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& targets, double tokens, std::int64_t ignored = kIgnoredTarget);

// Targets that count: a Long without dims, on the device of the targets.
at::Tensor counted_targets(const at::Tensor& targets, std::int64_t ignored = kIgnoredTarget);

}  // namespace penstock::models
