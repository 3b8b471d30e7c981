#include "penstock/torch/kernels/fused_steps.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"
#include "penstock/torch/kernels/fused_steps_cpu.h"

namespace penstock {
namespace {

// Minimum number of elements per thread.
constexpr std::int64_t kGrain = 1 << 15;

// Dense memory: not a wrapper, not a tensor without values.
bool has_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.key_set().has(c10::DispatchKey::Python) &&
         tensor.has_storage() && !tensor.is_meta();
}

// Returns whether one loop over the memory of each list visits the elements in the same order.
bool alike(at::TensorList parameters, std::initializer_list<at::TensorList> others) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!has_memory(parameter) || !parameter.is_non_overlapping_and_dense() ||
        parameter.scalar_type() != parameters[0].scalar_type() ||
        parameter.device() != parameters[0].device())
      return false;
    for (const at::TensorList& list : others) {
      if (list.empty()) continue;
      const at::Tensor& other = list[i];
      if (!has_memory(other) || other.scalar_type() != parameter.scalar_type() ||
          other.device() != parameter.device() || other.sizes() != parameter.sizes() ||
          other.strides() != parameter.strides())
        return false;
    }
  }
  return true;
}

// The square of a complex number's size is the sum of the squares of its parts.
at::Tensor in_real_numbers(const at::Tensor& tensor) {
  return at::isComplexType(tensor.scalar_type()) ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

void check_lengths(at::TensorList parameters, std::initializer_list<at::TensorList> others) {
  for (const at::TensorList& list : others)
    PENSTOCK_INVARIANT(list.size() == parameters.size(),
                       "the lists of an optimizer step have the same length");
}

bool on_cpu_in_float32(at::TensorList tensors) {
  return tensors[0].is_cpu() && tensors[0].scalar_type() == at::kFloat;
}

#if PENSTOCK_TORCH_AT_LEAST(2, 4)
constexpr bool kLibTorchHasFused = true;
#else
constexpr bool kLibTorchHasFused = false;
#endif

}  // namespace

bool fused_adamw_(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, const AdamWStepOptions& numbers) {
  check_lengths(parameters, {gradients, exp_avgs, exp_avg_sqs});
  if (parameters.empty()) return true;
  const bool here = on_cpu_in_float32(parameters);
  if (!here && !(kLibTorchHasFused && parameters[0].is_cuda())) return false;
  if (!alike(parameters, {gradients, exp_avgs, exp_avg_sqs})) return false;
  if (here) {
    const double correction1 = 1 - std::pow(numbers.beta1, static_cast<double>(numbers.step)),
                 correction2 = 1 - std::pow(numbers.beta2, static_cast<double>(numbers.step));
    const detail::AdamWFactors factors{.keep = static_cast<float>(1 - numbers.lr * numbers.weight_decay),
                                       .beta1 = static_cast<float>(numbers.beta1),
                                       .rest1 = static_cast<float>(1 - numbers.beta1),
                                       .beta2 = static_cast<float>(numbers.beta2),
                                       .rest2 = static_cast<float>(1 - numbers.beta2),
                                       .root = static_cast<float>(1 / std::sqrt(correction2)),
                                       .eps = static_cast<float>(numbers.eps),
                                       .size = static_cast<float>(numbers.lr / correction1)};
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      float* parameter = parameters[i].data_ptr<float>();
      const float* gradient = gradients[i].data_ptr<float>();
      float *exp_avg = exp_avgs[i].data_ptr<float>(), *exp_avg_sq = exp_avg_sqs[i].data_ptr<float>();
      at::parallel_for(0, parameters[i].numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
        detail::adamw_loop(parameter + begin, gradient + begin, exp_avg + begin, exp_avg_sq + begin,
                           end - begin, factors);
      });
    }
    return true;
  }
#if PENSTOCK_TORCH_AT_LEAST(2, 4)
  // All parameters of the call are at the same step: one counter, filled on the device.
  const std::vector<at::Tensor> steps(parameters.size(), at::full({}, static_cast<double>(numbers.step),
                                                                  parameters[0].options().dtype(at::kFloat)));
  at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, {}, steps, numbers.lr, numbers.beta1,
                    numbers.beta2, numbers.weight_decay, numbers.eps, false, false);
  return true;
#else
  return false;
#endif
}

bool fused_sgd_(at::TensorList parameters, at::TensorList gradients, at::TensorList momenta,
                const SgdStepOptions& numbers) {
  check_lengths(parameters, {gradients});
  if (numbers.momentum != 0) check_lengths(parameters, {momenta});
  if (parameters.empty()) return true;
  const bool here = on_cpu_in_float32(parameters);
  if (!here && !(kLibTorchHasFused && parameters[0].is_cuda())) return false;
  if (!alike(parameters, {gradients, momenta})) return false;
  const double coupled = numbers.decoupled ? 0 : numbers.weight_decay;
  if (numbers.decoupled && numbers.weight_decay != 0)
    at::_foreach_mul_(parameters, 1 - numbers.lr * numbers.weight_decay);
  if (here) {
    const detail::SgdFactors factors{.lr = static_cast<float>(numbers.lr),
                                     .momentum = static_cast<float>(numbers.momentum),
                                     .weight_decay = static_cast<float>(coupled),
                                     .nesterov = numbers.nesterov};
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      float* parameter = parameters[i].data_ptr<float>();
      const float* gradient = gradients[i].data_ptr<float>();
      float* momentum = momenta.empty() ? nullptr : momenta[i].data_ptr<float>();
      at::parallel_for(0, parameters[i].numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
        detail::sgd_loop(parameter + begin, gradient + begin, momentum ? momentum + begin : nullptr,
                         end - begin, factors);
      });
    }
    return true;
  }
#if PENSTOCK_TORCH_AT_LEAST(2, 4)
  at::_fused_sgd_(parameters, gradients, momenta, coupled, numbers.momentum, numbers.lr, 0, numbers.nesterov,
                  false, false);
  return true;
#else
  return false;
#endif
}

at::Tensor sum_of_squares(at::TensorList tensors) {
  if (tensors.empty()) return at::zeros({}, at::kDouble);
  if (!tensors[0].is_cpu()) {
    // float32 and float64 in one call; norms in lower precisions would be rounded.
    std::vector<at::Tensor> wide, norms;
    for (const at::Tensor& any : tensors) {
      const at::Tensor tensor = in_real_numbers(any);
      if (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble)
        wide.push_back(tensor);
      else
        norms.push_back(at::linalg_vector_norm(tensor, 2, c10::nullopt, false, at::kFloat).to(at::kDouble));
    }
    if (!wide.empty())
      for (const at::Tensor& norm : at::_foreach_norm(wide, 2)) norms.push_back(norm);
    if (std::any_of(norms.begin(), norms.end(),
                    [&](const at::Tensor& norm) { return norm.scalar_type() != norms[0].scalar_type(); }))
      for (at::Tensor& norm : norms) norm = norm.to(at::kDouble);
    const at::Tensor all = at::stack(norms).to(at::kDouble);
    return at::dot(all, all);
  }
  double total = 0;
  for (const at::Tensor& any : tensors) {
    const at::Tensor tensor = in_real_numbers(any);
    if (has_memory(tensor) && tensor.scalar_type() == at::kFloat && tensor.is_non_overlapping_and_dense()) {
      const float* values = tensor.data_ptr<float>();
      total += at::parallel_reduce(
          std::int64_t{0}, tensor.numel(), kGrain, 0.0,
          [&](std::int64_t begin, std::int64_t end, double sum) {
            return sum + detail::square_sum_loop(values + begin, end - begin);
          },
          [](double a, double b) { return a + b; });
    } else {
      const at::Tensor flat = tensor.to(at::kDouble).reshape({-1});
      total += at::dot(flat, flat).item<double>();
    }
  }
  return at::full({}, total, at::kDouble);
}

void scale_(at::TensorList tensors, const at::Tensor& factor) {
  if (tensors.empty()) return;
#if PENSTOCK_TORCH_AT_LEAST(2, 4)
  at::_foreach_mul_(tensors, factor);
#else
  for (const at::Tensor& tensor : tensors) tensor.mul_(factor);
#endif
}

}  // namespace penstock
