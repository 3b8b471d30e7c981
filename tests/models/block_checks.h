// Checks that every block of a model has to pass: parameters as planned, gradients of a plain reference, the
// same numbers as a captured graph, shapes on fake tensors.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/compile.h"
#include "penstock/fake.h"
#include "penstock/transformer_options.h"

namespace penstock::models::test {

using Tensors = std::vector<at::Tensor>;

inline at::Tensor random_tensor(at::IntArrayRef sizes, std::uint64_t seed,
                                at::ScalarType dtype = at::kDouble) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble)).to(dtype);
}
inline at::Tensor random_ids(std::int64_t end, at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randint(0, end, sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
}
inline at::Tensor leaf(const at::Tensor& value) { return value.detach().clone().set_requires_grad(true); }

// The largest difference, relative to the size of the expected values; infinite for NaN and other sizes.
inline double apart(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.defined() != expected.defined()) return INFINITY;
  if (!actual.defined()) return 0;
  if (actual.sizes() != expected.sizes()) return INFINITY;
  if (actual.numel() == 0) return 0;
  const at::Tensor a = actual.detach().to(at::kDouble), b = expected.detach().to(at::kDouble);
  const double difference = (a - b).abs().max().item<double>() / (1 + b.abs().max().item<double>());
  return std::isnan(difference) ? INFINITY : difference;
}

// The same data in memory with gaps and in another order of dims.
inline at::Tensor scattered(const at::Tensor& dense) {
  const at::Tensor wide = at::zeros({dense.size(1), dense.size(0), 2 * dense.size(2)}, dense.options());
  const at::Tensor view = wide.transpose(0, 1).slice(2, 0, 2 * dense.size(2), 2);
  view.copy_(dense);
  return view;
}

// A scalar in which every element of the results counts differently.
inline at::Tensor mixed_loss(const Tensors& results) {
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (const at::Tensor& result : results)
    if (result.defined() && result.is_floating_point())
      sum = sum +
            (result.to(at::kDouble) *
             at::linspace(-1, 1.5, result.numel(), result.options().dtype(at::kDouble)).view(result.sizes()))
                .sum();
  return sum;
}

inline Tensors gradients(const Tensors& results, const Tensors& of) {
  return torch::autograd::grad({mixed_loss(results)}, of, {}, /*retain_graph=*/true, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

// Results and gradients of two computations.
inline void expect_gradients(const Tensors& actual, const Tensors& expected, const Tensors& of,
                             double tolerance = 1e-11) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_LT(apart(actual[i], expected[i]), tolerance) << "result " << i;
  const Tensors mine = gradients(actual, of), theirs = gradients(expected, of);
  for (std::size_t i = 0; i < of.size(); ++i) {
    EXPECT_TRUE(theirs[i].defined()) << "the reference does not use tensor " << i;
    EXPECT_LT(apart(mine[i], theirs[i]), tolerance) << "gradient " << i;
  }
}

inline void expect_shapes(const torch::nn::Module& module, const std::vector<ParameterShape>& planned) {
  std::map<std::string, std::vector<std::int64_t>> expected, actual;
  for (const ParameterShape& shape : planned) expected[shape.name] = shape.shape;
  for (const auto& item : module.named_parameters()) actual[item.key()] = item.value().sizes().vec();
  EXPECT_EQ(actual, expected);
}

// A copy has the values of the original and its own parameters.
template <class Holder, class Call>
void expect_copies(Holder& module, const Call& call) {
  const auto copy = std::dynamic_pointer_cast<typename Holder::ContainedType>(module->clone());
  const at::Tensor before = call(*module);
  EXPECT_TRUE(at::equal(call(*copy), before));
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module->parameters()) parameter.add_(0.5);
  EXPECT_TRUE(at::equal(call(*copy), before));
  EXPECT_FALSE(at::equal(call(*module), before));
}

// Modules and a function that calls them, as one module that can be captured. An input [0] stands for an
// undefined tensor, which a vector of arguments cannot contain.
class CalledModule : public torch::nn::Module {
 public:
  using Call = std::function<Tensors(const Tensors&)>;
  CalledModule(const std::vector<std::shared_ptr<torch::nn::Module>>& parts, Call call)
      : call_(std::move(call)) {
    for (std::size_t i = 0; i < parts.size(); ++i) register_module("part" + std::to_string(i), parts[i]);
  }
  Tensors forward(Tensors inputs) {
    for (at::Tensor& input : inputs)
      if (input.sizes() == at::IntArrayRef{0}) input = at::Tensor();
    return call_(inputs);
  }

 private:
  Call call_;
};

// What one training step does: results, and gradients of inputs and parameters. Parameters are then changed.
template <class Module>
std::pair<Tensors, Tensors> training_step(Module& module, const Tensors& inputs) {
  Tensors fresh;
  for (const at::Tensor& input : inputs)
    fresh.push_back(input.detach().clone().set_requires_grad(input.requires_grad()));
  module.zero_grad();
  const Tensors results = module.forward(fresh);
  mixed_loss(results).backward();
  Tensors all;
  for (const at::Tensor& input : fresh)
    all.push_back(input.grad().defined() ? input.grad().clone() : at::Tensor());
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module.parameters()) {
    all.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.01);
  }
  return {results, all};
}

// `make` returns equal modules. Three steps of one and of a captured one match bit for bit, from one capture;
// fake inputs get results of the same sizes and dtypes.
inline void expect_captured(const std::function<std::shared_ptr<CalledModule>()>& make, Tensors inputs) {
  for (at::Tensor& input : inputs)
    if (!input.defined()) input = at::empty({0});
  const auto plain = make(), original = make();
  const auto fast = graph::compile(original);
  for (int step = 0; step < 3; ++step) {
    const auto expected = training_step(*plain, inputs), actual = training_step(*fast, inputs);
    ASSERT_EQ(actual.first.size(), expected.first.size());
    for (std::size_t i = 0; i < expected.first.size(); ++i)
      EXPECT_TRUE(at::equal(actual.first[i], expected.first[i])) << "result " << i << ", step " << step;
    ASSERT_EQ(actual.second.size(), expected.second.size());
    for (std::size_t i = 0; i < expected.second.size(); ++i) {
      ASSERT_EQ(actual.second[i].defined(), expected.second[i].defined()) << "gradient " << i;
      if (expected.second[i].defined()) {
        EXPECT_TRUE(at::equal(actual.second[i], expected.second[i])) << "gradient " << i << ", step " << step;
      }
    }
  }
  EXPECT_EQ(fast->captures(), 1u);
  Tensors fake;
  for (const at::Tensor& input : inputs) fake.push_back(to_fake(input));
  const Tensors real = plain->forward(inputs), shapes = plain->forward(fake);
  for (std::size_t i = 0; i < real.size(); ++i) {
    EXPECT_TRUE(is_fake(shapes[i])) << "result " << i;
    EXPECT_EQ(shapes[i].sizes(), real[i].sizes()) << "result " << i;
    EXPECT_EQ(shapes[i].scalar_type(), real[i].scalar_type()) << "result " << i;
  }
}

}  // namespace penstock::models::test
