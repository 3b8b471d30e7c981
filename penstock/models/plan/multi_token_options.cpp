#include "penstock/models/plan/multi_token_options.h"

#include "penstock/models/plan/require_option.h"

namespace penstock::models {

void MultiTokenOptions::check() const {
  require_at_least(1, "multi_token_depth", depth);
  norm.check();
}

std::vector<ParameterShape> MultiTokenOptions::shapes(const std::string& prefix) const {
  std::vector<ParameterShape> all;
  for (std::int64_t step = 0; step < depth; ++step) {
    const std::string at = parameter_name(prefix, fmt::format("steps.{}", step));
    for (const ParameterShape& shape : norm.shapes(parameter_name(at, "hidden_norm"))) all.push_back(shape);
    for (const ParameterShape& shape : norm.shapes(parameter_name(at, "token_norm"))) all.push_back(shape);
    all.push_back({parameter_name(at, "project.weight"), {norm.width, 2 * norm.width}});
  }
  return all;
}

std::int64_t MultiTokenOptions::parameter_count() const { return element_count(shapes("")); }

double MultiTokenOptions::flops_per_token(std::int64_t) const {
  return 4.0 * static_cast<double>(depth) * static_cast<double>(norm.width) * static_cast<double>(norm.width);
}

}  // namespace penstock::models
