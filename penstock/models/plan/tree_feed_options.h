// Options of a feed-forward block that mixes every token with its parent in the syntax tree. See
// penstock/models/blocks/tree_feed_forward.h.
//
//   TreeFeedOptions feed{.width = 1024, .feed_width = 2816};
//
// Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

struct TreeFeedOptions {
  std::int64_t width = 128;
  std::int64_t feed_width = 352;  // model.feed_width
  bool operator==(const TreeFeedOptions&) const = default;

  // Throws ConfigError that names the key.
  void check() const;
  std::vector<ParameterShape> shapes(const std::string& prefix) const;
  std::int64_t parameter_count() const;
  std::int64_t active_parameter_count() const { return parameter_count(); }
  // Of the three products and of the mixture.
  double flops_per_token(std::int64_t length) const;
};

}  // namespace penstock::models
