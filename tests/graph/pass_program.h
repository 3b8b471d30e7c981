// Random functions with something to do for every pass: neutral arithmetic, copies, casts there and back,
// views of views, equal subexpressions, constants, dropout, and writes.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <random>

#include "penstock/graph/ir/graph.h"
#include "tests/graph/call_trace.h"

namespace penstock::graph {

// Determined by `seed` and the shapes it encounters. Takes tensors of float32 and int64.
inline Tensors pass_program(unsigned seed, const Tensors& inputs) {
  std::mt19937 random(seed);
  const auto choose = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  Tensors pool = inputs;
  const auto any = [&]() -> at::Tensor { return pool[choose(pool.size())]; };
  const auto partner_of = [&](const at::Tensor& tensor) {
    for (int tries = 0; tries < 8; ++tries)
      if (const at::Tensor other = any();
          other.sizes() == tensor.sizes() && other.scalar_type() == tensor.scalar_type())
        return other;
    return tensor;
  };
  const auto may_be_written = [](const at::Tensor& x) { return !overlaps_itself(geometry_of(x)); };
  const std::size_t steps = 4 + choose(14);
  for (std::size_t step = 0; step < steps; ++step) {
    const at::Tensor x = any();
    const auto dim = static_cast<std::int64_t>(x.dim() > 0 ? choose(static_cast<std::size_t>(x.dim())) : 0);
    const bool floating = x.is_floating_point();
    switch (choose(34)) {
      case 0:
        pool.push_back(x * 1);
        break;
      case 1:
        pool.push_back(1.0 * x);
        break;
      case 2:
        pool.push_back(x / 1);
        break;
      case 3:
        pool.push_back(x + 0);
        break;
      case 4:
        pool.push_back(x - 0.0);
        break;
      case 5:
        pool.push_back(floating ? x + (-0.0) : 0 + x);
        break;
      case 6:
        pool.push_back(x.neg().neg());
        break;
      case 7:
        pool.push_back(x.clone());
        break;
      case 8:
        pool.push_back(x.dim() == 2 ? x.t().contiguous() : x.contiguous());
        break;
      case 9:
        pool.push_back(floating ? x.to(at::kDouble).to(at::kFloat) : x.to(at::kInt).to(at::kLong));
        break;
      case 10:
        pool.push_back(floating ? x.to(at::kBFloat16).to(at::kFloat) : x.to(at::kFloat).to(at::kLong));
        break;
      case 11: {
        const at::Tensor narrow = x.to(floating ? at::kHalf : at::kShort);
        pool.push_back(narrow.to(at::kFloat).to(floating ? at::kHalf : at::kShort).to(x.scalar_type()) *
                       narrow.to(x.scalar_type()));
        break;
      }
      case 12:
        pool.push_back(x.dim() > 1 ? x.transpose(0, 1).transpose(0, 1) : x.unsqueeze(0).squeeze(0));
        break;
      case 13:
        pool.push_back(x.expand(x.sizes()));
        break;
      case 14:
        pool.push_back(x.is_contiguous() ? x.view(-1).view(x.sizes()) : x.unsqueeze(dim));
        break;
      case 15:
        pool.push_back(x.is_contiguous() ? x.view({1, -1}).view({-1, 1}) : x.reshape(-1));
        break;
      case 16:
        pool.push_back(x.tanh() * x.tanh());
        break;
      case 17:
        pool.push_back(x + torch::ones({}, x.options().requires_grad(false)) * 2);
        break;
      case 18:
        pool.push_back(x * (torch::arange(3, at::kLong) + 1).sum() + torch::zeros({1}, at::kLong));
        break;
      case 19:
        pool.push_back(torch::where(torch::full({}, true, at::kBool), x, partner_of(x)));
        break;
      case 20:
        pool.push_back(floating ? torch::dropout(x, 0.5, true) : x);
        break;
      case 21:
        pool.push_back(x.dim() > 0 ? x.select(dim, x.size(dim) - 1) : x.unsqueeze(0));
        break;
      case 22:
        pool.push_back(x.dim() > 0 ? x.slice(dim, x.size(dim) > 1 ? 1 : 0) : x.view({1}));
        break;
      case 23:
        pool.push_back(x.detach());
        break;
      case 24:
        pool.push_back(x + partner_of(x));
        break;
      case 25:
        pool.push_back(x * partner_of(x));
        break;
      case 26:
        pool.push_back(x.relu());
        break;
      case 27:
        pool.push_back(x.dim() == 2 && floating ? x.mm(x.t()) : x * 3);
        break;
      case 28:
        if (may_be_written(x)) x.mul_(1);
        break;
      case 29: {
        const at::Tensor partner = partner_of(x);
        if (may_be_written(x)) x.add_(partner.is_alias_of(x) ? partner.clone() : partner);
        break;
      }
      case 30:
        if (may_be_written(x) && floating) x.relu_();
        break;
      case 31: {
        const at::NoGradGuard no_grad;
        if (may_be_written(x)) x.add_(1);
        break;
      }
      case 32:
        // Two views of one result for backward.
        if (floating && x.dim() == 2) {
          const at::Tensor y = x.sigmoid();
          pool.push_back(y.mm(y.t()));
        }
        break;
      default:
        pool.push_back(floating ? x.sin().clone().cos() * 1 : x.clone() + 0);
        break;
    }
    // What grows without a bound is of no use.
    if (pool.back().numel() > 256) pool.pop_back();
  }
  Tensors results;
  const std::size_t count = 1 + choose(3);
  for (std::size_t i = 0; i < count; ++i)
    results.push_back(pool[pool.size() - 1 - choose(std::min<std::size_t>(pool.size(), 5))]);
  return results;
}

}  // namespace penstock::graph
