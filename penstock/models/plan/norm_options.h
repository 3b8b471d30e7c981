// Which norm the blocks of a model use. See penstock/models/blocks/any_norm.h.
//
//   NormOptions norm{.kind = norm_kind_from("dynamic_tanh"), .width = 1024};
//
// Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

enum class NormKind { RmsNorm, DynamicTanh };

// "rms_norm" or "dynamic_tanh". Throws ConfigError that names model.norm.
NormKind norm_kind_from(std::string_view text);
std::string to_text(NormKind kind);

struct NormOptions {
  NormKind kind = NormKind::RmsNorm;  // model.norm
  std::int64_t width = 128;
  double epsilon = 1e-5;  // model.norm_epsilon, of NormKind::RmsNorm
  bool operator==(const NormOptions&) const = default;

  // Throws ConfigError that names the key.
  void check() const;
  std::vector<ParameterShape> shapes(const std::string& prefix) const;
  std::int64_t parameter_count() const;
};

}  // namespace penstock::models
