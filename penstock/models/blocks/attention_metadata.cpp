#include "penstock/models/blocks/attention_metadata.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

std::string tensor_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

bool has_integers(const at::Tensor& tensor) { return at::isIntegralType(tensor.scalar_type(), false); }

void check_field(const char* field, const at::Tensor& tensor, at::IntArrayRef sizes) {
  if (tensor.defined() && (!has_integers(tensor) || tensor.sizes() != sizes))
    throw ValueError(describe(fmt::format("attention metadata: {}", field), tensor_text(tensor),
                              fmt::format("integers [{}]", fmt::join(sizes, ", "))));
}

void check_unit(const char* counts, const at::Tensor& tensor, const char* unit, std::int64_t tokens) {
  if (tokens < 0 || (tensor.defined() && tokens == 0))
    throw ValueError(describe(fmt::format("attention metadata: {}", unit), fmt::format("{}", tokens),
                              "at least 1 token", fmt::format("it is the unit of {}", counts)));
}

}  // namespace

bool AttentionMetadata::is_empty() const {
  return !documents.defined() && !row_valid_tokens.defined() && !row_valid_blocks.defined() &&
         !row_valid_slots.defined();
}

void AttentionMetadata::check(std::int64_t batch, std::int64_t length) const {
  check_field("documents", documents, {batch, length});
  check_field("row_valid_tokens", row_valid_tokens, {batch});
  check_field("row_valid_blocks", row_valid_blocks, {batch});
  check_field("row_valid_slots", row_valid_slots, {batch});
  check_unit("row_valid_blocks", row_valid_blocks, "base_block_tokens", base_block_tokens);
  check_unit("row_valid_slots", row_valid_slots, "row_block_tokens", row_block_tokens);
}

at::Tensor AttentionMetadata::valid_tokens() const {
  std::vector<at::Tensor> counts;
  if (row_valid_tokens.defined()) counts.push_back(row_valid_tokens.to(at::kLong));
  if (row_valid_blocks.defined()) counts.push_back(row_valid_blocks.to(at::kLong).mul(base_block_tokens));
  if (row_valid_slots.defined()) counts.push_back(row_valid_slots.to(at::kLong).mul(row_block_tokens));
  if (counts.empty()) return {};
  at::Tensor least = counts[0];
  for (std::size_t i = 1; i < counts.size(); ++i) least = at::minimum(least, counts[i]);
  return least;
}

AttentionMask AttentionMetadata::mask(std::int64_t batch, std::int64_t length) const {
  check(batch, length);
  AttentionMask made = AttentionMask::causal(length, length);
  if (documents.defined()) made = made.with_documents(documents);
  const at::Tensor valid = valid_tokens();
  return valid.defined() ? made.with_valid(valid) : made;
}

at::Tensor documents_from_bos(const at::Tensor& tokens, std::int64_t bos) {
  if (!tokens.defined() || tokens.dim() != 2 || !has_integers(tokens))
    throw ValueError(describe("documents_from_bos: tokens", tensor_text(tokens), "integers [batch, length]"));
  if (bos < 0)
    throw ValueError(describe("documents_from_bos: bos", fmt::format("{}", bos), "the number of a token"));
  return tokens.eq(bos).to(at::kInt).cumsum(1, at::kInt);
}

at::Tensor choose_documents(const AttentionOptions& options, const at::Tensor& argument,
                            const at::Tensor& of_metadata, const at::Tensor& tokens, bool uses_cache) {
  if (options.documents == DocumentSource::None) return {};
  if (argument.defined()) return argument;
  if (of_metadata.defined()) return of_metadata;
  if (options.documents != DocumentSource::BosTokens || uses_cache || !tokens.defined()) return {};
  return documents_from_bos(tokens, options.bos_token);
}

at::Tensor relation_bias(const at::Tensor& relations, const at::Tensor& table) {
  if (!table.defined() || table.dim() != 2 || !table.is_floating_point())
    throw ValueError(describe("relation_bias: table", tensor_text(table), "floating point [relation, head]"));
  if (!relations.defined() || relations.dim() != 4 || relations.size(1) != table.size(0))
    throw ValueError(
        describe("relation_bias: relations", tensor_text(relations),
                 fmt::format("[batch, {}, i, j], one plane for each row of the table", table.size(0))));
  // In the dtype of the table, also under autocast.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const at::Tensor planes = relations.to(table.scalar_type()).flatten(2);  // [batch, relation, i * j]
  return at::matmul(table.t(), planes)
      .view({relations.size(0), table.size(1), relations.size(2), relations.size(3)});
}

}  // namespace penstock::models
