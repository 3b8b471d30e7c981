#include "penstock/graph/saving/activation_budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock::graph {

std::int64_t ActivationBudget::bytes_of(std::int64_t all, std::int64_t least) const {
  if (bytes) return *bytes;
  if (fraction == 0) return least;
  return static_cast<std::int64_t>(std::floor(fraction * static_cast<double>(all)));
}

std::string ActivationBudget::text() const {
  return bytes ? format_bytes(static_cast<std::uint64_t>(*bytes)) : number_text(fraction);
}

ActivationBudget parse_activation_budget(std::string_view text, std::string_view what) {
  if (const std::optional<double> fraction = parse_number(text); fraction && *fraction >= 0 && *fraction <= 1)
    return {.fraction = *fraction};
  // A number above 1 without a unit is more likely a mistake than so few bytes.
  const bool has_unit = !text.empty() && (text.back() < '0' || text.back() > '9') && text.back() != '.';
  std::string joined(text);
  std::erase(joined, ' ');
  if (const std::optional<std::int64_t> bytes = parse_bytes(joined); bytes && has_unit)
    return {.bytes = *bytes};
  throw ConfigError(
      describe(what, quote(text),
               "a fraction from 0 (recompute all) to 1 (save all), or bytes with a unit such as "
               "\"1.5 GiB\"",
               "change it, or leave it out to save all"));
}

}  // namespace penstock::graph
