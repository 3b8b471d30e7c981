// What Penstock itself needs of a TransformerStage beyond its public interface.
//
//   KvCache cache(options, 256);
//   at::Tensor logits = TransformerAccess::forward_cached(*model, prompt, cache);
#pragma once

#include <ATen/core/Tensor.h>

#include "penstock/models/blocks/kv_cache.h"
#include "penstock/transformer.h"

namespace penstock::models {

struct TransformerAccess {
  // Computes tokens that follow those in the cache, and adds them to it. Records no graph. Works stage by
  // stage: each has its own cache.
  static at::Tensor forward_cached(TransformerStageImpl& stage, const at::Tensor& x, KvCache& cache);
};

}  // namespace penstock::models
