#include "penstock/models/blocks/relation_bias_table.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"

namespace penstock::models {

RelationBiasTableImpl::RelationBiasTableImpl(const RelationOptions& options) : options_(options) {
  options_.check();
  reset();
}

void RelationBiasTableImpl::reset() {
  weight = register_parameter("weight", at::zeros({options_.relations, options_.heads}));
}

void RelationBiasTableImpl::initialize(const std::string&, const BlockInit&) {
  const c10::AutoGradMode no_grad(false);
  weight.fill_(0);
}

at::Tensor RelationBiasTableImpl::forward(const at::Tensor& mask) {
  const ModuleScope running(*this);
  if (!mask.defined() || mask.dim() != 4 || mask.size(1) != options_.relations || mask.is_complex())
    throw ValueError(describe("RelationBiasTable: mask", shown(mask),
                              fmt::format("[batch, {}, i, j], Bool or numbers", options_.relations),
                              "set model.relations to the number of relations in the metadata"));
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const LocalRegion region(mask, weight, Rows::Batch);
  const at::Tensor table = region.weight(weight), own = region.enter(mask);
  const std::int64_t batch = own.size(0), rows = own.size(2), columns = own.size(3);
  // [heads, relations] x [batch, relations, i * j]
  return at::matmul(table.t(),
                    own.to(table.scalar_type()).reshape({batch, options_.relations, rows * columns}))
      .view({batch, table.size(1), rows, columns});
}

}  // namespace penstock::models
