// Keys and values of the tokens seen so far, for every block: a new token is computed alone. Memory is taken once, for `capacity` tokens,
// when the first token comes: batch * key heads * capacity * head width * 2 numbers a block.
//
//   KvCache cache(options, 256);
//   auto logits = model->forward_cached(prompt, cache);          // [batch, prompt length, vocabulary]
//   logits = model->forward_cached(next_token, cache);           // [batch, 1, vocabulary]
//
// Grouped queries keep their few key heads; under tensor parallelism a rank keeps its own. No gradients. One thread uses it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>

#include "penstock/models/plan/options.h"

namespace penstock::models {

class KvCache {
 public:
  // Throws ValueError for a capacity outside of 1 .. context.
  KvCache(const TransformerOptions& options, std::int64_t capacity);

  std::int64_t capacity() const { return capacity_; }
  std::int64_t length() const { return length_; }
  // Forgets the tokens, keeps the memory; a batch of another size takes new memory.
  void clear() { length_ = 0; }

  // ---- for the model ----

  // Writes [batch, key heads, new, head width] of one block behind the tokens that all blocks have; gives all of that block. Throws
  // ValueError when it is full.
  std::pair<at::Tensor, at::Tensor> put(std::int64_t block, const at::Tensor& keys, const at::Tensor& values);
  // The new tokens are in all blocks.
  void advance(std::int64_t tokens) { length_ += tokens; }

 private:
  std::int64_t capacity_;
  std::int64_t length_ = 0;
  std::map<std::int64_t, std::pair<at::Tensor, at::Tensor>> blocks_;
};

}  // namespace penstock::models
