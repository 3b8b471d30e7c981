#include "penstock/models/blocks/platform_embedding.h"

#include <ATen/ATen.h>

#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"

namespace penstock::models {

PlatformEmbeddingImpl::PlatformEmbeddingImpl(const PlatformOptions& options) : options_(options) {
  options_.check();
  reset();
}

void PlatformEmbeddingImpl::reset() {
  weight = register_parameter("weight", at::zeros({options_.platforms, options_.width}));
}

void PlatformEmbeddingImpl::initialize(const std::string& name, const BlockInit& init) {
  fill_normal(weight, name + ".weight", init.seed, init.deviation);
}

at::Tensor PlatformEmbeddingImpl::forward(const at::Tensor& x, const at::Tensor& ids) {
  const ModuleScope running(*this);
  check_hidden("PlatformEmbedding: input", x, options_.width);
  const LocalRegion region(x, weight, Rows::BatchAndLength);
  const at::Tensor own = region.enter(x);
  at::Tensor numbers = own_rows(ids);
  if (numbers.defined() && numbers.dim() == 1) {
    check_ids("PlatformEmbedding: ids", numbers, {own.size(0)}, "one for each row");
  } else {
    check_ids("PlatformEmbedding: ids", numbers, {own.size(0), x.size(1)},
              "one for each row [batch], or one for each token");
  }
  check_id_range("PlatformEmbedding: ids", numbers, 0, options_.platforms - 1,
                 "set model.platforms higher, or correct the metadata");
  if (numbers.dim() == 2) numbers = region.own_tokens(numbers);
  const at::ScalarType wide = wide_dtype(own.scalar_type());
  at::Tensor found = at::embedding(region.weight(weight), numbers).to(wide);
  if (numbers.dim() == 1) found = found.unsqueeze(1);
  return region.leave_sum(own.to(wide).add(found).to(own.scalar_type()));
}

}  // namespace penstock::models
