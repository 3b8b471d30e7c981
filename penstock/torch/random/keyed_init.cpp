#include "penstock/random.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <cmath>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

Fans fans(const at::Tensor& weight, const GlobalBox& box) {
  return fans_of(box.whole() ? weight.sizes() : at::IntArrayRef(box.global_shape));
}

void check_gain(double gain) {
  if (!std::isfinite(gain) || gain < 0)
    throw ValueError(describe("initialization: gain", fmt::format("{}", gain), "a finite number, 0 or more"));
}

// No division: the weight has no elements.
double inverse_root(double fan) { return fan > 0 ? 1 / std::sqrt(fan) : 0; }

double kaiming_deviation(const at::Tensor& weight, const KaimingOptions& options, const GlobalBox& box) {
  check_gain(options.gain);
  const Fans both = fans(weight, box);
  return options.gain * inverse_root(static_cast<double>(options.mode == FanMode::In ? both.in : both.out));
}

double xavier_deviation(const at::Tensor& weight, double gain, const GlobalBox& box) {
  check_gain(gain);
  const Fans both = fans(weight, box);
  return gain * std::sqrt(2.0) * inverse_root(static_cast<double>(both.in + both.out));
}

void uniform(const at::Tensor& tensor, const RandomKey& key, double bound, const GlobalBox& box) {
  const at::NoGradGuard no_grad;
  keyed_uniform_(tensor, key, -bound, bound, box);
}

void normal(const at::Tensor& tensor, const RandomKey& key, double deviation, const GlobalBox& box) {
  const at::NoGradGuard no_grad;
  keyed_normal_(tensor, key, 0.0, deviation, box);
}

}  // namespace

Fans fans_of(at::IntArrayRef global_shape) {
  if (global_shape.size() < 2)
    throw ValueError(describe("initialization: dims of a weight whose fans are needed",
                              fmt::format("{}", global_shape.size()), "2 or more",
                              "use keyed_uniform_ or keyed_normal_ with a bound of your own"));
  std::int64_t kernel = 1;
  for (std::size_t d = 2; d < global_shape.size(); ++d) kernel *= global_shape[d];
  return {global_shape[1] * kernel, global_shape[0] * kernel};
}

void keyed_kaiming_uniform_(const at::Tensor& weight, const RandomKey& key, const KaimingOptions& options,
                            const GlobalBox& box) {
  uniform(weight, key, std::sqrt(3.0) * kaiming_deviation(weight, options, box), box);
}

void keyed_kaiming_normal_(const at::Tensor& weight, const RandomKey& key, const KaimingOptions& options,
                           const GlobalBox& box) {
  normal(weight, key, kaiming_deviation(weight, options, box), box);
}

void keyed_xavier_uniform_(const at::Tensor& weight, const RandomKey& key, double gain,
                           const GlobalBox& box) {
  uniform(weight, key, std::sqrt(3.0) * xavier_deviation(weight, gain, box), box);
}

void keyed_xavier_normal_(const at::Tensor& weight, const RandomKey& key, double gain, const GlobalBox& box) {
  normal(weight, key, xavier_deviation(weight, gain, box), box);
}

void keyed_linear_weight_(const at::Tensor& weight, const RandomKey& key, const GlobalBox& box) {
  uniform(weight, key, inverse_root(static_cast<double>(fans(weight, box).in)), box);
}

void keyed_linear_bias_(const at::Tensor& bias, const RandomKey& key, std::int64_t fan_in,
                        const GlobalBox& box) {
  if (fan_in < 0)
    throw ValueError(
        describe("initialization: fan_in of a bias", fmt::format("{}", fan_in), "the weight's, 0 or more"));
  uniform(bias, key, inverse_root(static_cast<double>(fan_in)), box);
}

}  // namespace penstock
