#include "penstock/models/plan/ngram_options.h"

#include <algorithm>

#include "penstock/models/plan/require_option.h"

namespace penstock::models {
namespace {

constexpr std::int64_t kLargestOrder = 16;
// The hash has 2^31 - 2 values or fewer; a larger table would have rows that no n-gram can select.
constexpr std::int64_t kMostBuckets = (std::int64_t{1} << 31) - 1;

}  // namespace

void NgramOptions::check() const {
  require_at_least(1, "width", width);
  require_option(!orders.empty(), "ngram_orders", "no orders", "at least one, for example 2,3");
  for (const std::int64_t order : orders)
    require_option(order >= 2 && order <= kLargestOrder, "ngram_orders", fmt::format("{}", order),
                   fmt::format("orders from 2 to {}", kLargestOrder),
                   "order 1 is the embedding of tokens itself");
  require_option(buckets >= 1 && buckets <= kMostBuckets, "ngram_buckets", fmt::format("{}", buckets),
                 fmt::format("1 to {}", kMostBuckets));
}

std::int64_t NgramOptions::reach() const {
  return orders.empty() ? 0 : *std::max_element(orders.begin(), orders.end()) - 1;
}

std::vector<ParameterShape> NgramOptions::shapes(const std::string& prefix) const {
  return {{parameter_name(prefix, "weight"), {static_cast<std::int64_t>(orders.size()), buckets, width}}};
}

std::int64_t NgramOptions::parameter_count() const { return element_count(shapes("")); }

std::int64_t NgramOptions::active_parameter_count() const {
  return static_cast<std::int64_t>(orders.size()) * width;
}

}  // namespace penstock::models
