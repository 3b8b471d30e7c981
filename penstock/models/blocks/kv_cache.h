// Caches keys and values of the tokens seen so far, for every block, so that only new tokens are computed.
// Memory for `capacity` tokens is allocated once, at the first token: batch * key heads * capacity * head
// width * 2 numbers per block.
//
//   KvCache cache(options, 256);
//   // [batch, prompt length, vocabulary]
//   auto logits = TransformerAccess::forward_cached(*model, prompt, cache);
//   logits = TransformerAccess::forward_cached(*model, next_token, cache);   // [batch, 1, vocabulary]
//
// Grouped queries store only their key heads; under tensor parallelism a rank stores its own. No gradients.
// Thread safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>

#include "penstock/transformer_options.h"

namespace penstock::models {

class KvCache {
 public:
  // Throws ValueError for a capacity outside 1 .. context.
  KvCache(const TransformerOptions& options, std::int64_t capacity);

  std::int64_t capacity() const { return capacity_; }
  std::int64_t length() const { return length_; }
  // Discards the tokens and keeps the memory; a batch of another size allocates new memory.
  void clear() { length_ = 0; }

  // ---- for the model ----

  // Appends [batch, key heads, new, head width] of one block after the tokens that all blocks have; returns
  // all keys and values of that block. Throws ValueError if the cache is full.
  std::pair<at::Tensor, at::Tensor> put(std::int64_t block, const at::Tensor& keys, const at::Tensor& values);
  // Call when the new tokens have been put into all blocks.
  void advance(std::int64_t tokens) { length_ += tokens; }

 private:
  std::int64_t capacity_;
  std::int64_t length_ = 0;
  std::map<std::int64_t, std::pair<at::Tensor, at::Tensor>> blocks_;
};

}  // namespace penstock::models
