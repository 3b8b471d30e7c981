// Random functions of parameters and inputs, for what treats the two differently: matrices and vectors,
// parameters used several times, composed of others, of an embedding and of a convolution.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <random>
#include <vector>

namespace penstock::test {

class WeightNet {
 public:
  static constexpr std::int64_t kRows = 4, kWidth = 6, kTokens = 5;

  // Equal seeds make equal nets with equal parameters.
  explicit WeightNet(unsigned seed, bool draws = true) : seed_(seed), draws_(draws) {
    auto generator = at::detail::createCPUGenerator(seed);
    std::mt19937 dice(seed + 99);
    const auto add = [&](std::vector<at::Tensor>& list, at::IntArrayRef shape) {
      const bool frozen = dice() % 8 == 0;
      list.push_back((at::randn(shape, generator) * 0.4).set_requires_grad(!frozen));
      parameters_.push_back(list.back());
    };
    for (int i = 0; i < 4; ++i) add(matrices_, {kWidth, kWidth});
    for (int i = 0; i < 4; ++i) add(vectors_, {kWidth});
    add(others_, {kTokens, kWidth});
    add(others_, {1, 1, 3});
    add(others_, {kWidth, 2});
    add(others_, {2, kWidth});
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  // Two tensors of floats, and tokens. Which of them require gradients depends on the seed.
  std::vector<at::Tensor> inputs(unsigned call) const {
    auto generator = at::detail::createCPUGenerator(1000 * seed_ + call);
    return {at::randn({kRows, kWidth}, generator).set_requires_grad(seed_ % 3 != 0),
            at::randn({kRows, kWidth}, generator).set_requires_grad(seed_ % 2 == 0),
            at::randint(kTokens, {kRows}, generator, at::kLong)};
  }

  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs) const {
    std::mt19937 dice(seed_);
    const auto below = [&](std::size_t count) { return static_cast<std::size_t>(dice() % count); };
    std::vector<at::Tensor> pool{inputs[0], inputs[1]};
    const auto any = [&] { return pool[pool.size() - 1 - below(std::min<std::size_t>(pool.size(), 4))]; };
    const auto matrix = [&] { return matrices_[below(4)]; };
    const auto vector = [&] { return vectors_[below(4)]; };
    const std::size_t steps = 3 + below(10);
    for (std::size_t step = 0; step < steps; ++step) {
      const at::Tensor x = any();
      switch (below(19)) {
        case 0:
        case 1:
          pool.push_back(torch::linear(x, matrix(), vector()));
          break;
        case 2:
          pool.push_back(torch::matmul(x, matrix()).tanh());
          break;
        case 3:
          pool.push_back(torch::layer_norm(x, {kWidth}, vector(), vector()));
          break;
        case 4:
          pool.push_back(x * vector());
          break;
        case 5:
          pool.push_back(x * matrix().narrow(0, 1, kRows));
          break;
        case 6:
          pool.push_back(torch::linear(x, others_[2].mm(others_[3])));
          break;
        case 7:
          pool.push_back(torch::gelu(x));
          break;
        case 8:
          pool.push_back(torch::softmax(x, -1));
          break;
        case 9:
          pool.push_back(draws_ ? torch::dropout(x, 0.3, true) : x.sin());
          break;
        case 10:
          pool.push_back(x + any());
          break;
        case 11:
          pool.push_back(x * any().tanh());
          break;
        case 12:
          pool.push_back(torch::embedding(others_[0], inputs[2]) + x);
          break;
        case 13:
          pool.push_back(torch::cat({x.narrow(1, 0, 2), any().narrow(1, 2, kWidth - 2)}, 1));
          break;
        case 14:
          pool.push_back(torch::conv1d(x.unsqueeze(1), others_[1], {}, 1, 1).squeeze(1));
          break;
        case 15:
          pool.push_back(
              torch::linear(x, torch::cat({matrix().narrow(0, 0, 3), matrix().narrow(0, 3, 3)}, 0)));
          break;
        case 16:
          pool.push_back((x * 1.5).mul_(0.5));
          break;
        case 17:
          pool.push_back(torch::linear(x.relu(), matrix().t().contiguous()) + x.detach());
          break;
        default:
          pool.push_back(torch::linear(torch::layer_norm(x, {kWidth}, vector()), matrix(), vector()) + x);
          break;
      }
    }
    std::vector<at::Tensor> results{pool.back()};
    if (below(2) == 0) results.push_back(any());
    if (below(4) == 0) results.push_back(any().detach());
    return results;
  }

 private:
  unsigned seed_;
  bool draws_;
  std::vector<at::Tensor> matrices_, vectors_, others_, parameters_;
};

}  // namespace penstock::test
