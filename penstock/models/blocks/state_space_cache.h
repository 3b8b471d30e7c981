// What the state-space blocks remember of the tokens seen so far, for generation: the last inputs of their
// convolutions and their states. Its size does not depend on the number of tokens.
//
//   StateSpaceCache cache;
//   block->forward(prompt, {}, &cache);                 // all its tokens at once
//   cache.advance(prompt.size(1));                      // after all blocks
//   block->forward(next, {}, &cache);                   // one more
//
// The memory of a block belongs to the tokens of its last forward; a forward that throws leaves it unchanged.
// No gradients.
// Thread safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

namespace penstock::models {

// Of one block. Tensors are undefined before the first token.
struct StateSpaceMemory {
  at::Tensor values, keys, queries;  // last inputs of the convolutions: [batch, taps - 1, channels]
  at::Tensor documents;              // their numbers and that of the last token: [batch, max(taps - 1, 1)]
  at::Tensor state;                  // [batch, heads, head width, state size]
};

class StateSpaceCache {
 public:
  // Number of tokens seen.
  std::int64_t length() const { return length_; }
  // Forgets all tokens.
  void clear();

  // ---- for the model ----

  // The memory of a block.
  StateSpaceMemory& memory_of(std::int64_t block) { return blocks_[block]; }
  // Call when the new tokens have been seen by all blocks.
  void advance(std::int64_t tokens) { length_ += tokens; }

 private:
  std::int64_t length_ = 0;
  std::map<std::int64_t, StateSpaceMemory> blocks_;
};

}  // namespace penstock::models
