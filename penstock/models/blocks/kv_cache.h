// Caches keys and values of the tokens seen so far, for every block, so that only new tokens are computed.
// Memory for `capacity` tokens is allocated once, at the first token: batch * key heads * capacity * head
// width * 2 numbers per block. A block with a window keeps only the tokens that it can still see, in memory
// for about twice as many, so that they are moved once in a while and not for every token.
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
  KvCache(std::int64_t context, std::int64_t capacity);
  KvCache(const TransformerOptions& options, std::int64_t capacity) : KvCache(options.context, capacity) {}

  std::int64_t capacity() const { return capacity_; }
  std::int64_t length() const { return length_; }
  // Discards the tokens and keeps the memory; a batch of another size allocates new memory.
  void clear() { length_ = 0; }

  // ---- for the model ----

  // Appends [batch, key heads, new, head width] of one block after the tokens that all blocks have; returns
  // the keys and values of that block, valid until the next call: all of them, or with a window (0: none)
  // those that the new tokens see, the last min(length + new, window - 1 + new). A block must always pass the
  // same window. Throws ValueError if the cache is full, StateError if a forward before did not complete.
  std::pair<at::Tensor, at::Tensor> put(std::int64_t block, const at::Tensor& keys, const at::Tensor& values,
                                        std::int64_t window = 0);
  // Call when the new tokens have been put into all blocks.
  void advance(std::int64_t tokens) { length_ += tokens; }

 private:
  struct Stored {
    at::Tensor keys, values;    // [batch, key heads, room, head width]
    std::int64_t used = 0;      // tokens in them, from the first on; only with a window
    std::int64_t position = 0;  // one past the last token, in the row; only with a window
  };
  void make_room(Stored& stored, const at::Tensor& keys, std::int64_t room) const;
  std::pair<at::Tensor, at::Tensor> put_in_window(Stored& stored, const at::Tensor& keys,
                                                  const at::Tensor& values, std::int64_t window) const;

  std::int64_t capacity_;
  std::int64_t length_ = 0;
  std::map<std::int64_t, Stored> blocks_;
};

}  // namespace penstock::models
