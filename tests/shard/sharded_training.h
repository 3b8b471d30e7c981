// The small transformer of the distributed tensor tests, trained on a batch that data-parallel ranks share.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "penstock/fully_shard.h"
#include "tests/dtensor/small_transformer.h"

namespace penstock::test {

constexpr std::int64_t kRows = 12;

inline at::Tensor shared_tokens(int step) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step) + 1);
  return at::randint(0, kVocabulary, {kRows, kTokens}, generator, at::TensorOptions(at::kLong));
}

// Ranks that are threads share the generator that initializes modules.
inline Model same_model() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return make_model();
}

struct Share {
  int rank = 0, ranks = 1;  // of the batch
  int microbatches = 1;
  int steps = 3;
  std::function<void(int step, int micro)> before_micro;
  std::function<void(int step)> before_step;  // of the optimizer
  std::function<at::Tensor(const at::Tensor&)> place = [](const at::Tensor& tensor) { return tensor; };
};

// AdamW steps on this rank's rows; the loss is the mean over them.
inline Training train_share(Model model, const Share& share) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  Training result;
  for (int step = 0; step < share.steps; ++step) {
    const at::Tensor mine = shared_tokens(step).chunk(share.ranks)[static_cast<std::size_t>(share.rank)];
    optimizer.zero_grad();
    double loss_sum = 0;
    for (int micro = 0; micro < share.microbatches; ++micro) {
      if (share.before_micro) share.before_micro(step, micro);
      const at::Tensor tokens = mine.chunk(share.microbatches)[static_cast<std::size_t>(micro)];
      const at::Tensor inputs = share.place(tokens), targets = share.place(tokens.roll(1, 1).contiguous());
      const at::Tensor logits = model->forward(inputs);
      const at::Tensor loss =
          nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), targets.reshape({-1})) /
          share.microbatches;
      loss.backward();
      loss_sum += (is_dtensor(loss) ? full_tensor(loss.detach()) : loss).item<double>();
    }
    if (share.before_step) share.before_step(step);
    optimizer.step();
    result.losses.push_back(loss_sum);
  }
  for (const auto& item : model->named_parameters())
    result.parameters[item.key()] =
        is_dtensor(item.value()) ? full_tensor(item.value().detach()) : item.value().detach().clone();
  return result;
}

// The same in one process.
inline const Training& alone() {
  static const Training training = train_share(make_model(), {});
  return training;
}

inline void expect_same_parameters(const Training& ours, const Training& theirs, double tolerance = 1e-9) {
  ASSERT_EQ(ours.parameters.size(), theirs.parameters.size());
  for (const auto& [name, value] : theirs.parameters) {
    const at::Tensor& other = ours.parameters.at(name);
    ASSERT_EQ(other.sizes(), value.sizes()) << name;
    EXPECT_LT((other - value).abs().max().item<double>(), tolerance) << name;
  }
}

// One group for each block and one for the rest.
inline void shard_by_blocks(Model& model, const comm::MeshGroups& mesh, const ShardOptions& options = {}) {
  for (const auto& block : *model->blocks) fully_shard(*block, mesh, options);
  fully_shard(*model, mesh, options);
}

}  // namespace penstock::test
