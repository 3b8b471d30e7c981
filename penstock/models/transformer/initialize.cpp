#include "penstock/transformer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <cmath>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/initial_values.h"

namespace penstock::models {

void initialize(TransformerStageImpl& stage, const InitOptions& how) {
  if (!(how.deviation > 0))
    throw ValueError(describe("initialize: deviation", fmt::format("{}", how.deviation),
                              "a positive number; 0.02 is usual"));
  const c10::AutoGradMode no_grad(false);
  const double residual = how.scale_residual
                              ? how.deviation / std::sqrt(2.0 * static_cast<double>(stage.options().layers))
                              : how.deviation;
  for (const auto& item : stage.named_parameters()) {
    const std::string& name = item.key();
    if (name.ends_with("norm.weight")) {
      at::Tensor parameter = item.value();
      parameter.fill_(1);
      continue;
    }
    const bool writes_residual = name.ends_with(".output.weight") || name.ends_with(".down.weight");
    fill_normal(item.value(), name, how.seed, writes_residual ? residual : how.deviation);
  }
}

}  // namespace penstock::models
