// What a batch says about its rows, for attention: documents, padding, and relations between chunks.
//
//   AttentionMetadata metadata{.documents = documents, .row_valid_tokens = counts};
//   AttentionMask mask = metadata.mask(batch, length);
//   if (relations.defined()) mask = mask.with_bias(relation_bias(relations, table));
//
// Nothing here waits for the device, and counts are not compared with the length of the rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "penstock/models/plan/attention_options.h"
#include "penstock/torch/kernels/attention_mask.h"

namespace penstock::models {

// Undefined tensors and zeros: not given. A row may be counted in tokens, in blocks of `base_block_tokens`
// tokens and in slots of `row_block_tokens` tokens; the smallest of the counts that are given applies.
struct AttentionMetadata {
  at::Tensor documents;                // integers [batch, length]: the document of each token
  at::Tensor row_valid_tokens;         // integers [batch]: tokens of a row before its padding
  at::Tensor row_valid_blocks;         // integers [batch]: the same in blocks
  at::Tensor row_valid_slots;          // integers [batch]: the same in slots
  std::int64_t base_block_tokens = 0;  // tokens in a block
  std::int64_t row_block_tokens = 0;   // tokens in a slot

  // Whether it restricts attention at all.
  bool is_empty() const;
  // Throws ValueError that names the field.
  void check(std::int64_t batch, std::int64_t length) const;
  // Valid tokens of each row, [batch] int64; undefined if no count is given. Checks nothing.
  at::Tensor valid_tokens() const;
  // Causal attention of whole rows under these restrictions. Throws as check().
  AttentionMask mask(std::int64_t batch, std::int64_t length) const;
};

// The number of BOS tokens up to each token: int32 [batch, length], for tokens [batch, length]. A document
// begins with its BOS token. Throws ValueError for tokens of another shape or dtype and bos < 0.
at::Tensor documents_from_bos(const at::Tensor& tokens, std::int64_t bos);

// The documents of a forward: the argument, else those of the metadata, else counted from BOS tokens if the
// options say so and no cache is used; undefined if there are none. `tokens` may be undefined (a later
// stage); it must then get the documents of the first stage as an argument.
at::Tensor choose_documents(const AttentionOptions& options, const at::Tensor& argument,
                            const at::Tensor& of_metadata, const at::Tensor& tokens, bool uses_cache);

// What relations between tokens or chunks add to the scores of each head: relations [batch, relation, i, j]
// (any dtype, weights or 0 and 1) and table [relation, head] give [batch, head, i, j] in the dtype of the
// table. Differentiable. Throws ValueError for other ranks and sizes.
at::Tensor relation_bias(const at::Tensor& relations, const at::Tensor& table);

}  // namespace penstock::models
