#include "penstock/models/plan/expert_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

void require_of_experts(bool good, const char* field, const std::string& actual, const std::string& expected,
                        const std::string& remedy = {}) {
  if (!good) throw ConfigError(describe(fmt::format("model.{}", field), actual, expected, remedy));
}

std::int64_t swiglu_size(std::int64_t width, std::int64_t inner) { return 3 * width * inner; }

}  // namespace

RouterScores parse_router_scores(std::string_view text) {
  if (text == "softmax") return RouterScores::Softmax;
  if (text == "sigmoid") return RouterScores::Sigmoid;
  throw ConfigError(
      describe("model.router_scores", fmt::format("\"{}\"", text), "\"softmax\" or \"sigmoid\""));
}

std::string to_string(RouterScores scores) {
  switch (scores) {
    case RouterScores::Softmax:
      return "softmax";
    case RouterScores::Sigmoid:
      return "sigmoid";
  }
  return {};
}

void ExpertOptions::check() const {
  const auto positive = [](const char* field, std::int64_t value) {
    require_of_experts(value >= 1, field, fmt::format("{}", value), "at least 1");
  };
  positive("width", width);
  positive("experts", experts);
  positive("top_k", top_k);
  positive("expert_width", expert_width);
  require_of_experts(top_k <= experts, "top_k", fmt::format("{}", top_k),
                     fmt::format("at most the number of experts, {}", experts),
                     "use fewer experts per token or more experts");
  require_of_experts(router_bias_rate >= 0 && router_bias_rate < 1, "router_bias_rate",
                     fmt::format("{}", router_bias_rate), "from 0 to less than 1",
                     "0.001 is usual; 0 turns it off");
  require_of_experts(shared_expert_width >= 0, "shared_expert_width", fmt::format("{}", shared_expert_width),
                     "at least 1, or 0 for no shared expert");
  require_of_experts(capacity_factor >= 0 && std::isfinite(capacity_factor), "capacity_factor",
                     fmt::format("{}", capacity_factor), "0, or a positive factor of the even share",
                     "1.25 is usual; 0 drops no token");
}

void ExpertOptions::check_parallel(std::int64_t ranks) const {
  if (ranks < 1 || experts % ranks != 0)
    throw ConfigError(describe("layout.ep", fmt::format("{}", ranks),
                               fmt::format("a divisor of model.experts, {}", experts),
                               "use another number of expert parallel ranks or of experts"));
}

void ExpertOptions::check_columns(std::int64_t ranks) const {
  const auto divides = [&](const char* field, std::int64_t columns) {
    require_of_experts(ranks >= 1 && columns % ranks == 0, field, fmt::format("{}", columns),
                       fmt::format("a multiple of layout.tp, {}", ranks),
                       "use another width or another number of tensor-parallel ranks");
  };
  divides("expert_width", expert_width);
  divides("shared_expert_width", shared_expert_width);
}

std::int64_t expert_capacity(const ExpertOptions& options, std::int64_t tokens) {
  if (options.capacity_factor == 0) return 0;
  const double share = static_cast<double>(tokens * options.top_k) / static_cast<double>(options.experts);
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(options.capacity_factor * share)));
}

std::vector<ParameterShape> parameter_shapes(const ExpertOptions& options, const std::string& prefix) {
  options.check();
  const std::string at = prefix.empty() ? "" : prefix + ".";
  const std::int64_t width = options.width, experts = options.experts, inner = options.expert_width,
                     shared = options.shared_expert_width;
  std::vector<ParameterShape> all{{at + "gate", {experts, width, inner}, true},
                                  {at + "up", {experts, width, inner}, true},
                                  {at + "down", {experts, inner, width}, true},
                                  {at + "router.weight", {experts, width}}};
  if (shared > 0) {
    all.push_back({at + "shared.gate.weight", {shared, width}});
    all.push_back({at + "shared.up.weight", {shared, width}});
    all.push_back({at + "shared.down.weight", {width, shared}});
  }
  return all;
}

std::int64_t parameter_count(const ExpertOptions& options) {
  options.check();
  return options.experts * options.width +
         options.experts * swiglu_size(options.width, options.expert_width) +
         swiglu_size(options.width, options.shared_expert_width);
}

std::int64_t active_parameter_count(const ExpertOptions& options) {
  options.check();
  return options.experts * options.width + options.top_k * swiglu_size(options.width, options.expert_width) +
         swiglu_size(options.width, options.shared_expert_width);
}

double flops_per_token(const ExpertOptions& options) {
  return 2.0 * static_cast<double>(active_parameter_count(options));
}

}  // namespace penstock::models
