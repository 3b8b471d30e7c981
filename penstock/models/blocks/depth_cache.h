// Which of the tokens seen so far went through each attention block that a mixture of depths wraps, for
// generation: a new token must not see the keys of the others, which are in the cache all the same.
//
//   DepthCache cache;
//   at::Tensor all = cache.put(3, seen, active);          // active [batch, new] -> [batch, seen + new]
//
// Thread safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

namespace penstock::models {

class DepthCache {
 public:
  // Adds bool [batch, new] of a block after the first `seen` tokens, and returns those of all. What a forward
  // that did not complete had added after them is forgotten. Throws ValueError for another batch, or if the
  // block has not seen so many.
  at::Tensor put(std::int64_t block, std::int64_t seen, const at::Tensor& active);

 private:
  std::map<std::int64_t, at::Tensor> blocks_;
};

}  // namespace penstock::models
