#include "penstock/models/blocks/initial_values.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cstddef>

#include "penstock/dtensor.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/random.h"

namespace penstock::models {
namespace {

// Calls fill(piece, box) for each part of a parameter that this rank holds.
template <class Fill>
void fill_parts(const at::Tensor& parameter, const Fill& fill) {
  const c10::AutoGradMode no_grad(false);
  if (!is_dtensor(parameter)) {
    fill(parameter, GlobalBox{});
    return;
  }
  const at::Tensor local = to_local(parameter);
  for (const ShardBox& box :
       local_boxes(parameter.sizes().vec(), mesh_of(parameter).mesh(), placements_of(parameter))) {
    at::Tensor piece = local;
    for (std::size_t dim = 0; dim < box.shape.size(); ++dim)
      piece = piece.narrow(static_cast<std::int64_t>(dim), box.local_offset[dim], box.shape[dim]);
    fill(piece, GlobalBox{.global_shape = parameter.sizes().vec(), .offset = box.offset});
  }
}

RandomKey key_of(const std::string& name, std::uint64_t seed) {
  return {.seed = seed, .layer = layer_from_name(name), .purpose = purpose::kInit};
}

}  // namespace

void fill_normal(const at::Tensor& parameter, const std::string& name, std::uint64_t seed, double deviation) {
  fill_parts(parameter, [&](const at::Tensor& piece, const GlobalBox& box) {
    keyed_normal_(piece, key_of(name, seed), 0, deviation, box);
  });
}

void fill_uniform(const at::Tensor& parameter, const std::string& name, std::uint64_t seed, double from,
                  double to) {
  fill_parts(parameter, [&](const at::Tensor& piece, const GlobalBox& box) {
    keyed_uniform_(piece, key_of(name, seed), from, to, box);
  });
}

}  // namespace penstock::models
