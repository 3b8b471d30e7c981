#include "penstock/dropout.h"

#include <fmt/format.h>

#include <limits>
#include <ostream>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"

namespace penstock {

KeyedDropoutOptions::KeyedDropoutOptions(double p, std::int64_t layer) : p(p), layer(layer) {
  if (!(p >= 0 && p <= 1))
    throw ValueError(describe("KeyedDropout: probability", fmt::format("{}", p), "a number from 0 to 1"));
}

void KeyedDropoutImpl::pretty_print(std::ostream& stream) const {
  stream << "penstock::KeyedDropout(p=" << options.p << ", layer=" << options.layer << ")";
}

RandomKey KeyedDropoutImpl::key(std::int64_t use) const {
  if (use < 0 || use > std::numeric_limits<std::int32_t>::max())
    throw ValueError(describe("KeyedDropout: use", fmt::format("{}", use), "0 to 2^31 - 1"));
  return StepContext::current()->key(options.layer, purpose::kDropout | (use << 32));
}

torch::Tensor KeyedDropoutImpl::forward(const torch::Tensor& input, const GlobalBox& box, std::int64_t use) {
  if (!is_training() || options.p == 0) return input;
  const RandomKey now = key(use);
  return keyed_dropout(input, options.p, now,
                       box.whole() ? StepContext::current()->box_of(input.sizes()) : box);
}

}  // namespace penstock
