#include "penstock/models/blocks/auxiliary_loss.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"

namespace penstock::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct InjectLoss : torch::autograd::Function<InjectLoss> {
  // LibTorch makes a view of an input that is returned.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor&,
                            const at::Tensor& scale) {
    context->save_for_backward({scale});
    return hidden;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    // A copy: autograd may keep a gradient as it is and add to it later, which must not change the scale.
    return {gradients[0], context->get_saved_variables()[0].clone(), at::Tensor()};
  }
};

void check_loss(const char* what, const at::Tensor& loss) {
  if (!loss.defined() || loss.dim() != 0 || !loss.is_floating_point())
    throw ValueError(describe(what, shown(loss), "a floating-point scalar []"));
}

}  // namespace

at::Tensor inject_loss(const at::Tensor& hidden, const at::Tensor& loss, const at::Tensor& scale) {
  check_loss("inject_loss: loss", loss);
  check_loss("inject_loss: scale", scale);
  if (scale.device() != loss.device())
    throw ValueError(describe("inject_loss: scale", fmt::format("on {}", scale.device().str()),
                              fmt::format("on {}, like the loss", loss.device().str())));
  if (!loss.requires_grad()) return hidden;
  return InjectLoss::apply(hidden, loss, scale.detach().to(loss.scalar_type()));
}

at::Tensor inject_loss(const at::Tensor& hidden, const at::Tensor& loss, double scale) {
  check_loss("inject_loss: loss", loss);
  return inject_loss(hidden, loss, at::full({}, scale, loss.options()));
}

std::vector<NamedLoss> mean_by_name(const std::vector<NamedLoss>& losses) {
  std::vector<NamedLoss> means;
  std::vector<std::int64_t> counts;
  for (const NamedLoss& loss : losses) {
    check_loss(fmt::format("auxiliary loss '{}'", loss.name).c_str(), loss.value);
    std::size_t at = 0;
    while (at < means.size() && means[at].name != loss.name) ++at;
    if (at == means.size()) {
      means.push_back(loss);
      counts.push_back(1);
    } else {
      means[at].value = means[at].value.add(loss.value);
      ++counts[at];
    }
  }
  for (std::size_t at = 0; at < means.size(); ++at)
    if (counts[at] > 1) means[at].value = means[at].value.div(counts[at]);
  return means;
}

at::Tensor weighted_sum(const std::vector<NamedLoss>& losses, const LossWeights& weights) {
  at::Tensor sum;
  for (const NamedLoss& loss : mean_by_name(losses)) {
    const at::Tensor term = loss.value.mul(weights.of(loss.name));
    sum = sum.defined() ? sum.add(term) : term;
  }
  return sum;
}

at::Tensor inject_losses(const at::Tensor& hidden, const std::vector<NamedLoss>& losses,
                         const LossWeights& weights, double scale) {
  const at::Tensor sum = weighted_sum(losses, weights);
  return sum.defined() ? inject_loss(hidden, sum, scale) : hidden;
}

at::Tensor inject_losses(const at::Tensor& hidden, const std::vector<NamedLoss>& losses,
                         const LossWeights& weights, const at::Tensor& scale) {
  const at::Tensor sum = weighted_sum(losses, weights);
  return sum.defined() ? inject_loss(hidden, sum, scale) : hidden;
}

}  // namespace penstock::models
