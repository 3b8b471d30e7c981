#include "penstock/models/plan/norm_options.h"

#include "penstock/models/plan/require_option.h"

namespace penstock::models {

NormKind norm_kind_from(std::string_view text) {
  if (text == "rms_norm") return NormKind::RmsNorm;
  require_option(text == "dynamic_tanh", "norm", fmt::format("'{}'", text), "rms_norm or dynamic_tanh");
  return NormKind::DynamicTanh;
}

std::string to_text(NormKind kind) { return kind == NormKind::RmsNorm ? "rms_norm" : "dynamic_tanh"; }

void NormOptions::check() const {
  require_at_least(1, "width", width);
  require_option(epsilon > 0 && epsilon < 1, "norm_epsilon", fmt::format("{}", epsilon),
                 "a small positive number; 1e-5 is usual");
}

std::vector<ParameterShape> NormOptions::shapes(const std::string& prefix) const {
  std::vector<ParameterShape> all{{parameter_name(prefix, "weight"), {width}}};
  if (kind == NormKind::DynamicTanh) {
    all.push_back({parameter_name(prefix, "bias"), {width}});
    all.push_back({parameter_name(prefix, "alpha"), {1}});
  }
  return all;
}

std::int64_t NormOptions::parameter_count() const { return element_count(shapes("")); }

}  // namespace penstock::models
