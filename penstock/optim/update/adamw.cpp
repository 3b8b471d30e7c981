#include "penstock/optimizer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/kernels/fused_steps.h"

namespace penstock::optim {

AdamW::AdamW(std::vector<ParameterGroup> groups, const AdamWOptions& options)
    : Optimizer(std::move(groups), options.lr, options.weight_decay, options.kernels,
                {"exp_avg", "exp_avg_sq"}),
      options_(options) {
  for (const auto& [name, beta] : {std::pair{"beta1", options.beta1}, std::pair{"beta2", options.beta2}})
    if (!(beta >= 0 && beta < 1))
      throw ValueError(describe(fmt::format("AdamW: {}", name), fmt::format("{}", beta),
                                "0 to 1, less than 1", "0.9 and 0.999 are common"));
  if (!(options.eps > 0) || !std::isfinite(options.eps))
    throw ValueError(
        describe("AdamW: eps", fmt::format("{}", options.eps), "a positive number", "1e-8 is common"));
}

AdamW::AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options)
    : AdamW(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

bool AdamW::update_fused(const Bucket& bucket) {
  return fused_adamw_(bucket.parameters, bucket.gradients, bucket.state[0], bucket.state[1],
                      {.lr = bucket.numbers.lr,
                       .beta1 = options_.beta1,
                       .beta2 = options_.beta2,
                       .eps = options_.eps,
                       .weight_decay = bucket.numbers.weight_decay,
                       .step = bucket.step});
}

void AdamW::update_lists(const Bucket& bucket) {
  const auto& [lr, weight_decay] = bucket.numbers;
  const std::vector<at::Tensor>&parameters = bucket.parameters, &gradients = bucket.gradients,
        &exp_avgs = bucket.state[0], &exp_avg_sqs = bucket.state[1];
  const double correction1 = 1 - std::pow(options_.beta1, static_cast<double>(bucket.step)),
               correction2 = 1 - std::pow(options_.beta2, static_cast<double>(bucket.step));
  if (weight_decay != 0) at::_foreach_mul_(parameters, 1 - lr * weight_decay);
  at::_foreach_mul_(exp_avgs, options_.beta1);
  at::_foreach_add_(exp_avgs, gradients, 1 - options_.beta1);
  at::_foreach_mul_(exp_avg_sqs, options_.beta2);
  at::_foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - options_.beta2);
  std::vector<at::Tensor> roots = at::_foreach_sqrt(exp_avg_sqs);
  at::_foreach_div_(roots, std::sqrt(correction2));
  at::_foreach_add_(roots, options_.eps);
  at::_foreach_addcdiv_(parameters, exp_avgs, roots, -lr / correction1);
}

}  // namespace penstock::optim
