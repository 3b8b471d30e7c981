// Reads what blocks of models return that were ported from Python code with tuples as results.
//
//   BlockResult result = from_tuple({hidden, balance, z}, TupleSource::Experts);
//
// Tuples of such models are told apart by their length, and three elements have three meanings. Here the
// caller says which block made the tuple:
//
//   elements  source              meaning
//   1         any                 hidden
//   2         any                 hidden, summary of attention (dropped)
//   3         Experts             hidden, balance, router z
//   3         Depth               hidden, depth router, (dropped)
//   3         DepthOverExperts    hidden, balance, router z
//   5         Depth...            hidden, balance, router z, depth router, rank metric (dropped)
//   other     any                 hidden, (dropped)
//
// An undefined or empty tensor is a loss that is absent. Of five elements, balance and router z count only
// together. A loss with one element becomes a scalar.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "penstock/models/blocks/block_result.h"

namespace penstock::models {

// Which kind of block returned a tuple.
enum class TupleSource {
  Dense,            // attention, feed-forward, state space: no losses
  Experts,          // a mixture of experts
  Depth,            // a mixture of depths around a dense block
  DepthOverExperts  // a mixture of depths whose block inside had losses of experts
};

// Throws ValueError for a tuple without hidden states, for three or five elements from a source that does not
// return so many, and for a loss with more than one element.
BlockResult from_tuple(const std::vector<at::Tensor>& tuple, TupleSource source);

}  // namespace penstock::models
