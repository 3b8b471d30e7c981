// Options of a mixture of depths: a router sends a fraction of the tokens of each row through a block; the
// others pass by it. See penstock/models/blocks/mixture_of_depths.h for what is computed.
//
//   DepthOptions depth{.width = 1024, .capacity = 0.25};
//   depth.check();
//   depth.chosen(4096);          // 1024 tokens of a row go through the block
//
// Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

enum class DepthKind {
  Plain,  // the router's weight multiplies what the block adds
  Gamma   // so does a learnt scale per element, which is small at first
};

// "plain" or "gamma". Throws ConfigError that names model.depth_kind.
DepthKind depth_kind_from(std::string_view text);
std::string to_text(DepthKind kind);

struct DepthOptions {
  std::int64_t width = 128;           // of a hidden state
  double capacity = 0.5;              // model.depth_capacity: fraction of tokens, more than 0 and at most 1
  DepthKind kind = DepthKind::Plain;  // model.depth_kind
  double gamma = 0.1;                 // model.depth_gamma: the initial scale of DepthKind::Gamma
  bool operator==(const DepthOptions&) const = default;

  // Throws ConfigError that names the key.
  void check() const;
  // How many tokens of a row of this length go through the block: capacity * length, rounded, at least 1.
  std::int64_t chosen(std::int64_t length) const;

  // The parameters of the wrapper alone, without those of the block.
  std::vector<ParameterShape> shapes(const std::string& prefix) const;
  std::int64_t parameter_count() const;
  // Every token uses all of them.
  std::int64_t active_parameter_count() const { return parameter_count(); }
  // Of the router. The block inside costs its own operations for chosen(length) / length of the tokens.
  double flops_per_token(std::int64_t length) const;
};

}  // namespace penstock::models
