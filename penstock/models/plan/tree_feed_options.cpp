#include "penstock/models/plan/tree_feed_options.h"

#include "penstock/models/plan/require_option.h"

namespace penstock::models {

void TreeFeedOptions::check() const {
  require_at_least(1, "width", width);
  require_at_least(1, "feed_width", feed_width);
}

std::vector<ParameterShape> TreeFeedOptions::shapes(const std::string& prefix) const {
  return {{parameter_name(prefix, "mix"), {width}},
          {parameter_name(prefix, "gate.weight"), {feed_width, width}},
          {parameter_name(prefix, "up.weight"), {feed_width, width}},
          {parameter_name(prefix, "down.weight"), {width, feed_width}}};
}

std::int64_t TreeFeedOptions::parameter_count() const { return element_count(shapes("")); }

double TreeFeedOptions::flops_per_token(std::int64_t) const {
  return 2.0 * static_cast<double>(parameter_count());
}

}  // namespace penstock::models
