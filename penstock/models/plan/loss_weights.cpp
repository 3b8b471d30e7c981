#include "penstock/models/plan/loss_weights.h"

#include <fmt/ranges.h>

#include <cmath>
#include <vector>

#include "penstock/models/plan/require_option.h"

namespace penstock::models {

LossWeights::LossWeights()
    : weights_{{"balance", 0.01}, {"router_z", 0.001}, {"depth_router", 1.0}, {"multi_token", 0.3}} {}

void LossWeights::set(const std::string& name, double weight) {
  require_option(std::isfinite(weight) && weight >= 0, fmt::format("loss_weights.{}", name),
                 fmt::format("{}", weight), "a finite number, 0 or more", "use 0 to switch the loss off");
  weights_[name] = weight;
}

double LossWeights::of(const std::string& name) const {
  const auto found = weights_.find(name);
  if (found != weights_.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [each, weight] : weights_) known.push_back(each);
  throw ValueError(describe("auxiliary loss", fmt::format("'{}'", name),
                            fmt::format("one with a weight: {}", fmt::join(known, ", ")),
                            "set its weight with LossWeights::set()"));
}

}  // namespace penstock::models
