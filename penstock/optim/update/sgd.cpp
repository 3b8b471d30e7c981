#include "penstock/optimizer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/kernels/fused_steps.h"

namespace penstock::optim {

SGD::SGD(std::vector<ParameterGroup> groups, const SGDOptions& options)
    : Optimizer(std::move(groups), options.lr, options.weight_decay, options.kernels,
                options.momentum != 0 ? std::vector<std::string>{"momentum"} : std::vector<std::string>{}),
      options_(options) {
  if (!(options.momentum >= 0 && options.momentum < 1))
    throw ValueError(describe("SGD: momentum", fmt::format("{}", options.momentum), "0 to 1, less than 1",
                              "0.9 is common"));
  if (options.nesterov && options.momentum == 0)
    throw ValueError(
        describe("SGD: nesterov", "momentum 0", "a momentum", "set the momentum or leave nesterov out"));
}

SGD::SGD(std::vector<NamedParameter> parameters, const SGDOptions& options)
    : SGD(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

bool SGD::update_fused(const Bucket& bucket) {
  const auto& [lr, weight_decay] = bucket.numbers;
  const at::TensorList momenta = bucket.state.empty() ? at::TensorList() : at::TensorList(bucket.state[0]);
  return fused_sgd_(bucket.parameters, bucket.gradients, momenta,
                    {.lr = lr,
                     .momentum = options_.momentum,
                     .weight_decay = weight_decay,
                     .nesterov = options_.nesterov,
                     .decoupled = options_.decoupled});
}

void SGD::update_lists(const Bucket& bucket) {
  const double lr = bucket.numbers.lr, coupled = options_.decoupled ? 0 : bucket.numbers.weight_decay;
  const std::vector<at::Tensor>& parameters = bucket.parameters;
  const std::vector<at::Tensor> momenta = bucket.state.empty() ? std::vector<at::Tensor>() : bucket.state[0];
  if (options_.decoupled && bucket.numbers.weight_decay != 0)
    at::_foreach_mul_(parameters, 1 - lr * bucket.numbers.weight_decay);
  std::vector<at::Tensor> gradients = bucket.gradients;
  if (coupled != 0) gradients = at::_foreach_add(gradients, parameters, coupled);
  if (!momenta.empty()) {
    at::_foreach_mul_(momenta, options_.momentum);
    at::_foreach_add_(momenta, gradients);
    gradients = options_.nesterov ? at::_foreach_add(gradients, momenta, options_.momentum) : momenta;
  }
  at::_foreach_add_(parameters, gradients, -lr);
}

}  // namespace penstock::optim
