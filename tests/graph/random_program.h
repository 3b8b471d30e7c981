// Functions chosen by a number, to compare captured functions with plain ones.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <random>

#include "tests/graph/call_trace.h"

namespace penstock::graph {

// A function made of views, writes and exact arithmetic, chosen by `seed` and by the shapes it meets.
inline Tensors random_program(unsigned seed, const Tensors& inputs) {
  std::mt19937 random(seed);
  const auto choose = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  Tensors pool = inputs;
  const auto any = [&]() -> at::Tensor { return pool[choose(pool.size())]; };
  const auto partner_of = [&](const at::Tensor& tensor) {
    for (int tries = 0; tries < 8; ++tries)
      if (const at::Tensor other = any(); other.sizes() == tensor.sizes()) return other;
    return tensor;
  };
  const std::size_t steps = 3 + choose(8);
  for (std::size_t step = 0; step < steps; ++step) {
    const at::Tensor x = any();
    const auto dim = static_cast<std::int64_t>(x.dim() > 0 ? choose(static_cast<std::size_t>(x.dim())) : 0);
    switch (choose(18)) {
      case 0: pool.push_back(x.dim() > 0 ? x.select(dim, x.size(dim) - 1) : x.unsqueeze(0)); break;
      case 1: pool.push_back(x.dim() > 0 ? x.slice(dim, x.size(dim) > 1 ? 1 : 0) : x.view({1})); break;
      case 2: pool.push_back(x.dim() > 0 ? x.slice(dim, 0, x.size(dim), 2) : x.view({1, 1})); break;
      case 3: pool.push_back(x.dim() > 1 ? x.transpose(0, x.dim() - 1) : x.unsqueeze(0)); break;
      case 4: pool.push_back(x.is_contiguous() ? x.view(-1) : x.reshape(-1)); break;
      case 5: pool.push_back(x.unsqueeze(dim)); break;
      case 6: pool.push_back(x.detach()); break;
      case 7: pool.push_back(x.mul(0.5)); break;
      case 8: pool.push_back(x + partner_of(x)); break;
      case 9: pool.push_back(x * partner_of(x)); break;
      case 10: pool.push_back(x.relu()); break;
      case 11: x.mul_(-0.5); break;
      case 12: {
        // What is read while it is written has no value of its own in eager mode.
        const at::Tensor partner = partner_of(x);
        x.add_(partner.is_alias_of(x) ? partner.clone() : partner);
        break;
      }
      case 13: x.copy_(partner_of(x).neg()); break;
      case 14: x.select(0, 0).zero_(); break;
      case 15: x.relu_(); break;
      case 16: {
        const at::NoGradGuard no_grad;
        x.add_(1);
        break;
      }
      case 17: x.transpose_(0, std::max<std::int64_t>(x.dim() - 1, 0)); break;
    }
  }
  Tensors results;
  const std::size_t count = 1 + choose(3);
  for (std::size_t i = 0; i < count; ++i) results.push_back(pool[pool.size() - 1 - choose(std::min<std::size_t>(pool.size(), 4))]);
  return results;
}

}  // namespace penstock::graph
