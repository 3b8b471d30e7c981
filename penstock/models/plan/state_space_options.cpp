#include "penstock/models/plan/state_space_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

void require_state_space(bool good, const char* field, const std::string& actual, const std::string& expected,
                         const std::string& remedy = {}) {
  if (!good) throw ConfigError(describe(fmt::format("model.{}", field), actual, expected, remedy));
}

}  // namespace

void StateSpaceOptions::check() const {
  const auto positive = [](const char* field, std::int64_t value) {
    require_state_space(value >= 1, field, fmt::format("{}", value), "at least 1");
  };
  positive("width", width);
  positive("state_size", state_size);
  positive("state_head_width", state_head_width);
  positive("state_expand", state_expand);
  positive("state_groups", state_groups);
  positive("state_kernel", state_kernel);
  positive("state_chunk", state_chunk);
  require_state_space(inner() % state_head_width == 0, "state_head_width",
                      fmt::format("{}", state_head_width),
                      fmt::format("a divisor of the inner width, state_expand * width = {}", inner()),
                      "64 is usual; choose a width that is a multiple of it");
  require_state_space(
      heads() % state_groups == 0, "state_groups", fmt::format("{}", state_groups),
      fmt::format("a divisor of the number of heads, state_expand * width / state_head_width = {}", heads()),
      "1 fits always");
  require_state_space(norm_epsilon > 0 && norm_epsilon < 1, "norm_epsilon", fmt::format("{}", norm_epsilon),
                      "a small positive number; 1e-5 is usual");
}

void StateSpaceOptions::check_tensor_parallel(std::int64_t ranks) const {
  const auto refuse = [&](const std::string& expected) {
    throw ConfigError(describe("layout.tp", fmt::format("{}", ranks), expected,
                               "change layout.tp, model.state_head_width or model.state_groups"));
  };
  if (ranks < 1 || heads() % ranks != 0)
    refuse(fmt::format("a divisor of the heads of M blocks, state_expand * width / state_head_width = {}",
                       heads()));
  if (state_groups % ranks != 0 && ranks % state_groups != 0)
    refuse(fmt::format("a divisor or a multiple of model.state_groups, {}", state_groups));
}

std::vector<ParameterShape> parameter_shapes(const StateSpaceOptions& options, const std::string& prefix) {
  options.check();
  const std::int64_t width = options.width, inner = options.inner(), keys = options.key_width(),
                     heads = options.heads(), taps = options.state_kernel;
  return {{prefix + "step_bias", {heads}},
          {prefix + "decay_log", {heads}},
          {prefix + "skip", {heads}},
          {prefix + "gate.weight", {inner, width}},
          {prefix + "value.weight", {inner, width}},
          {prefix + "key.weight", {keys, width}},
          {prefix + "query.weight", {keys, width}},
          {prefix + "step.weight", {heads, width}},
          {prefix + "value_convolution.weight", {inner, taps}},
          {prefix + "value_convolution.bias", {inner}},
          {prefix + "key_convolution.weight", {keys, taps}},
          {prefix + "key_convolution.bias", {keys}},
          {prefix + "query_convolution.weight", {keys, taps}},
          {prefix + "query_convolution.bias", {keys}},
          {prefix + "norm.weight", {inner}},
          {prefix + "output.weight", {width, inner}}};
}

std::int64_t parameter_count(const StateSpaceOptions& options) {
  std::int64_t count = 0;
  for (const ParameterShape& parameter : parameter_shapes(options, "")) {
    std::int64_t elements = 1;
    for (const std::int64_t size : parameter.shape) elements *= size;
    count += elements;
  }
  return count;
}

double flops_per_token(const StateSpaceOptions& options, std::int64_t length) {
  options.check();
  const auto real = [](std::int64_t value) { return static_cast<double>(value); };
  const double width = real(options.width), inner = real(options.inner()), keys = real(options.key_width()),
               chunk = real(std::min(options.state_chunk, length));
  const double projections = width * (2 * inner + 2 * keys + real(options.heads())) + inner * width;
  const double convolutions = real(options.state_kernel) * (inner + 2 * keys);
  // Queries times keys and weights times values within the chunk; into the state, and out of it.
  const double scan = chunk * (keys + inner) + 2 * real(options.state_size) * inner;
  return 2 * (projections + convolutions + scan);
}

}  // namespace penstock::models
