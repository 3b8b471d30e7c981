#include "penstock/models/blocks/ngram_embedding.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"

namespace penstock::models {
namespace {

// Multiples of the golden ratio, whose fractions are spread evenly: the constants of the tables are
// unrelated.
constexpr std::int64_t hash_constant(std::uint64_t number) {
  constexpr std::int64_t kSmallest = std::int64_t{1} << 20;
  const std::uint64_t range = static_cast<std::uint64_t>(NgramHash::kPrime - kSmallest - 1);
  const std::uint64_t bits = ((number + 1) * 0x9e3779b97f4a7c15ULL) >> 32;  // wraps by definition
  return (kSmallest + static_cast<std::int64_t>(bits % range)) | 1;
}

}  // namespace

NgramHash NgramHash::of_table(std::int64_t table) {
  const auto number = static_cast<std::uint64_t>(table);
  return {.step = hash_constant(2 * number), .spread = hash_constant(2 * number + 1)};
}

NgramEmbeddingImpl::NgramEmbeddingImpl(const NgramOptions& options) : options_(options) {
  options_.check();
  reset();
}

void NgramEmbeddingImpl::reset() {
  weight = register_parameter("weight", at::zeros({static_cast<std::int64_t>(options_.orders.size()),
                                                   options_.buckets, options_.width}));
}

void NgramEmbeddingImpl::initialize(const std::string& name, const BlockInit& init) {
  fill_normal(weight, name + ".weight", init.seed, init.deviation);
}

at::Tensor NgramEmbeddingImpl::rows_of(const at::Tensor& tokens, const at::Tensor& documents,
                                       std::int64_t length) const {
  const std::int64_t reach = options_.reach(),
                     missing = std::max<std::int64_t>(0, reach - (tokens.size(1) - length));
  const auto with_history = [&](const at::Tensor& row) {
    return at::constant_pad_nd(row.to(at::kLong), {missing, 0});
  };
  // 0 is the padding token.
  const at::Tensor values = with_history(tokens.add(1)),
                   owners = documents.defined() ? with_history(documents) : at::Tensor();
  const std::int64_t first = values.size(1) - length;
  // Entry j: the tokens j places before.
  std::vector<at::Tensor> before;
  for (std::int64_t back = 0; back <= reach; ++back) {
    at::Tensor value = values.narrow(1, first - back, length);
    if (owners.defined() && back > 0)
      value = value.mul(owners.narrow(1, first - back, length).eq(owners.narrow(1, first, length)));
    before.push_back(value);
  }
  std::vector<at::Tensor> tables;
  for (std::size_t table = 0; table < options_.orders.size(); ++table) {
    const NgramHash hash = NgramHash::of_table(static_cast<std::int64_t>(table));
    at::Tensor sum;
    for (std::int64_t back = options_.orders[table] - 1; back >= 0; --back) {
      const at::Tensor& value = before[static_cast<std::size_t>(back)];
      sum = (sum.defined() ? sum.mul(hash.step).add(value) : value).remainder(NgramHash::kPrime);
    }
    tables.push_back(sum.mul(hash.spread)
                         .remainder(NgramHash::kPrime)
                         .remainder(options_.buckets)
                         .add(static_cast<std::int64_t>(table) * options_.buckets));
  }
  return at::stack(tables);
}

at::Tensor NgramEmbeddingImpl::forward(const at::Tensor& x, const at::Tensor& tokens,
                                       const at::Tensor& documents) {
  const ModuleScope running(*this);
  check_hidden("NgramEmbedding: input", x, options_.width);
  const LocalRegion region(x, weight, Rows::BatchAndLength);
  const at::Tensor own = region.enter(x), ids = own_rows(tokens), owners = own_rows(documents);
  const std::int64_t batch = own.size(0), length = x.size(1);
  if (!ids.defined() || ids.dim() != 2 || ids.size(0) != batch || ids.size(1) < length ||
      (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt))
    throw ValueError(describe(
        "NgramEmbedding: tokens", shown(ids),
        fmt::format("tokens [{}, {} or more], Long or Int, those before the row first", batch, length)));
  if (owners.defined()) check_ids("NgramEmbedding: documents", owners, ids.sizes(), "one for each token");
  const at::Tensor table = region.weight(weight);
  const at::Tensor rows = region.own_tokens(rows_of(ids, owners, length), 2);
  const at::Tensor found =
      at::embedding(table.view({-1, options_.width}), rows);  // [tables, batch, own tokens, width]
  const at::ScalarType wide = wide_dtype(own.scalar_type());
  return region.leave_sum(own.to(wide).add(found.sum(0, false, wide)).to(own.scalar_type()));
}

}  // namespace penstock::models
