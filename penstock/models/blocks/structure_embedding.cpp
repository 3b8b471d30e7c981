#include "penstock/models/blocks/structure_embedding.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <limits>

#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"

namespace penstock::models {
namespace {

// Ids that select rows of one table, checked.
at::Tensor structure_rows(const StructureTable& table, const at::Tensor& ids, at::IntArrayRef sizes) {
  const std::string what = fmt::format("StructureEmbedding: {}", table.key);
  check_ids(what, ids, sizes, "ids");
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  check_id_range(what, ids, 0, table.ordinal ? kAny : table.entries - 1,
                 table.ordinal ? "" : fmt::format("set model.{} higher, or correct the metadata", table.key));
  return table.ordinal ? ids.clamp_max(table.entries - 1) : ids;
}

}  // namespace

StructureEmbeddingImpl::StructureEmbeddingImpl(const StructureOptions& options) : options_(options) {
  options_.check();
  reset();
}

void StructureEmbeddingImpl::reset() {
  tables.clear();
  for (const StructureTable& table : options_.tables())
    tables.push_back(register_module(
        table.name, torch::nn::Embedding(torch::nn::EmbeddingOptions(table.entries, options_.width))));
}

void StructureEmbeddingImpl::initialize(const std::string& name, const BlockInit& init) {
  const auto described = options_.tables();
  for (std::size_t i = 0; i < tables.size(); ++i)
    fill_normal(tables[i]->weight, fmt::format("{}.{}.weight", name, described[i].name), init.seed,
                init.deviation);
}

at::Tensor StructureEmbeddingImpl::forward(const at::Tensor& x, const StructureIds& ids) {
  const ModuleScope running(*this);
  check_hidden("StructureEmbedding: input", x, options_.width);
  const LocalRegion region(x, tables[0]->weight, Rows::BatchAndLength);
  const at::Tensor own = region.enter(x);
  const std::array<at::Tensor, 5> given{ids.structure_kinds, ids.dependency_levels, ids.syntax_depths,
                                        ids.sibling_indices, ids.node_types};
  const auto described = options_.tables();
  const at::ScalarType wide = wide_dtype(own.scalar_type());
  at::Tensor sum = own.to(wide);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    if (!given[i].defined()) continue;
    const at::Tensor rows =
        region.own_tokens(structure_rows(described[i], own_rows(given[i]), {own.size(0), x.size(1)}));
    sum = sum.add(at::embedding(region.weight(tables[i]->weight), rows).to(wide));
  }
  return region.leave_sum(sum.to(own.scalar_type()));
}

}  // namespace penstock::models
