// The data-parallel part of a layout as text.
//
//   dp_text(config.layout)             // "4", "4 (shard 2)", "4 (shard 4, ep 2)"
#pragma once

#include <fmt/format.h>

#include <string>

#include "penstock/train_config.h"

namespace penstock::train {

inline std::string dp_text(const LayoutConfig& layout) {
  std::string how;
  if (layout.shard > 1) how = fmt::format("shard {}", layout.shard);
  if (layout.ep > 1) how += fmt::format("{}ep {}", how.empty() ? "" : ", ", layout.ep);
  return how.empty() ? fmt::format("{}", layout.dp) : fmt::format("{} ({})", layout.dp, how);
}

}  // namespace penstock::train
