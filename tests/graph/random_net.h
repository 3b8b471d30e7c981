// Random models whose values are used anywhere later: residuals, gates, views, writes in place, user-defined
// autograd functions, values without gradient. Equal seeds make equal models with equal parameters.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "penstock/module_scope.h"

namespace penstock::test {

inline constexpr std::int64_t kNetWidth = 6;

// y = x^3 / 3 with a derivative of its own, so that a replay without it would show.
struct CubeFunction : torch::autograd::Function<CubeFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& scale) {
    context->save_for_backward({x, scale});
    return x * x * x / 3 * scale;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &scale = saved[1];
    return {gradients[0] * x * x * scale * 0.75, (gradients[0] * x.sin()).sum()};
  }
};

// Two results, of which one may be unused.
struct PairFunction : torch::autograd::Function<PairFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& x) {
    const at::Tensor y = x.tanh(), z = x * 0.5;
    context->save_for_backward({y});
    return {y, z};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor y = context->get_saved_variables()[0];
    return {gradients[0] * (1 - y * y) + 0.25 * gradients[1]};
  }
};

struct RandomLayerImpl : torch::nn::Module {
  RandomLayerImpl(int kind_of, std::uint64_t seed) : kind(kind_of) {
    auto generator = at::detail::createCPUGenerator(seed);
    weight = register_parameter("weight", at::randn({kNetWidth, kNetWidth}, generator) * 0.4);
    scale = register_parameter("scale", at::randn({}, generator));
    calls = register_buffer("calls", at::zeros({}));
  }
  at::Tensor forward(const at::Tensor& a, const at::Tensor& b) {
    const ModuleScope scope(*this);
    switch (kind) {
      case 0:
        return torch::tanh(torch::linear(a, weight)) + b;
      case 1:
        return CubeFunction::apply(a.tanh(), scale) + torch::matmul(b.tanh(), weight.t());
      case 2: {
        at::Tensor h = torch::linear(a, weight);
        h.mul_(0.5).add_(b);
        return h.relu_();
      }
      case 3: {
        at::Tensor h = torch::linear(a, weight);
        h.narrow(1, 0, 2).sigmoid_();
        return h.view({-1, 2, kNetWidth / 2}).transpose(1, 2).reshape({-1, kNetWidth}) * b.tanh();
      }
      case 4: {
        const auto both = PairFunction::apply(a);
        calls.add_(1);
        return torch::linear(both[0], weight) + b * 0.5;
      }
      default: {
        const at::NoGradGuard no_grad;  // values without gradient
        return (a + b).cos();
      }
    }
  }
  const int kind;
  at::Tensor weight, scale, calls;
};
TORCH_MODULE(RandomLayer);

struct RandomNetImpl : torch::nn::Module {
  // `stages`: pipe_split() is called at stages - 1 places.
  RandomNetImpl(std::uint64_t seed, int stages) {
    std::mt19937_64 dice(seed);
    const auto below = [&](std::uint64_t count) { return static_cast<int>(dice() % count); };
    const int layers = 2 * stages + below(4);
    for (int i = 0; i < layers; ++i) {
      const int kind = i % 3 == 0 ? 0 : below(6);
      list.push_back(RandomLayer(kind, 1000 * seed + static_cast<std::uint64_t>(i)));
      register_module("layer" + std::to_string(i), list.back());
      // Values that come from far are as likely as near ones.
      left.push_back(below(static_cast<std::uint64_t>(i + 2)));
      right.push_back(below(static_cast<std::uint64_t>(i + 2)));
    }
    while (static_cast<int>(marks.size()) < stages - 1)
      marks.insert(1 + below(static_cast<std::uint64_t>(layers - 1)));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& z) {
    std::vector<at::Tensor> values = {x, z};
    at::Tensor last = x;
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (marks.contains(static_cast<int>(i))) pipe_split();
      values.push_back(list[i]->forward(values[static_cast<std::size_t>(left[i])],
                                        values[static_cast<std::size_t>(right[i])]));
      last = last + 0.1 * values.back();
    }
    return last + 0.3 * values[2];
  }
  std::vector<RandomLayer> list;
  std::vector<int> left, right;
  std::set<int> marks;
};
TORCH_MODULE(RandomNet);

}  // namespace penstock::test
