#include "penstock/models/plan/depth_options.h"

#include <algorithm>
#include <cmath>

#include "penstock/models/plan/require_option.h"

namespace penstock::models {

DepthKind depth_kind_from(std::string_view text) {
  if (text == "plain") return DepthKind::Plain;
  require_option(text == "gamma", "depth_kind", fmt::format("'{}'", text), "plain or gamma");
  return DepthKind::Gamma;
}

std::string to_text(DepthKind kind) { return kind == DepthKind::Plain ? "plain" : "gamma"; }

void DepthOptions::check() const {
  require_at_least(1, "width", width);
  require_option(capacity > 0 && capacity <= 1, "depth_capacity", fmt::format("{}", capacity),
                 "more than 0 and at most 1, the fraction of tokens that go through a block",
                 "0.125 and 0.5 are usual");
  require_option(std::isfinite(gamma) && gamma != 0, "depth_gamma", fmt::format("{}", gamma),
                 "a number other than 0", "with 0 the block would get no gradient at first; 0.1 is usual");
}

std::int64_t DepthOptions::chosen(std::int64_t length) const {
  return std::clamp<std::int64_t>(std::llround(capacity * static_cast<double>(length)), 1,
                                  std::max<std::int64_t>(length, 1));
}

std::vector<ParameterShape> DepthOptions::shapes(const std::string& prefix) const {
  std::vector<ParameterShape> all;
  if (kind == DepthKind::Gamma) all.push_back({parameter_name(prefix, "gamma"), {width}});
  all.push_back({parameter_name(prefix, "router.weight"), {1, width}});
  all.push_back({parameter_name(prefix, "router.bias"), {1}});
  return all;
}

std::int64_t DepthOptions::parameter_count() const { return element_count(shapes("")); }

double DepthOptions::flops_per_token(std::int64_t) const { return 2.0 * static_cast<double>(width); }

}  // namespace penstock::models
