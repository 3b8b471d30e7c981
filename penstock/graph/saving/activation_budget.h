// How much forward may keep for backward, as options and configurations write it.
//
//   parse_activation_budget("0.3", "training.activation_budget")       // a fraction of what saving all takes
//   parse_activation_budget("1.5 GiB", "training.activation_budget")   // bytes
//   // "2": training.activation_budget: got "2", expected a fraction from 0 to 1, or bytes with a unit ...
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace penstock::graph {

struct ActivationBudget {
  // Of the bytes that are saved if nothing is recomputed; 0: as little as possible.
  double fraction = 1;
  std::optional<std::int64_t> bytes = {};  // instead

  bool saves_all() const { return !bytes && fraction == 1; }
  // The number of bytes, if saving all takes `all` and as little as possible `least`.
  std::int64_t bytes_of(std::int64_t all, std::int64_t least) const;
  // "0.3", "1.5 GiB".
  std::string text() const;
};

// Throws ConfigError that begins with `what`.
ActivationBudget parse_activation_budget(std::string_view text, std::string_view what);

}  // namespace penstock::graph
