#include "penstock/transformer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <cmath>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/random.h"

namespace penstock::models {
namespace {

void fill(const at::Tensor& parameter, const RandomKey& key, double deviation) {
  if (!is_dtensor(parameter)) {
    keyed_normal_(parameter, key, 0, deviation);
    return;
  }
  const at::Tensor local = to_local(parameter);
  for (const ShardBox& box :
       local_boxes(parameter.sizes().vec(), mesh_of(parameter).mesh(), placements_of(parameter))) {
    at::Tensor piece = local;
    for (std::size_t dim = 0; dim < box.shape.size(); ++dim)
      piece = piece.narrow(static_cast<std::int64_t>(dim), box.local_offset[dim], box.shape[dim]);
    keyed_normal_(piece, key, 0, deviation, {.global_shape = parameter.sizes().vec(), .offset = box.offset});
  }
}

}  // namespace

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
    fill(item.value(), {.seed = how.seed, .layer = layer_from_name(name), .purpose = purpose::kInit},
         writes_residual ? residual : how.deviation);
  }
}

}  // namespace penstock::models
