// Numbers about all parameters of a model that is spread over ranks: who counts what, and over whom is summed. Private to this
// folder.
//
// Of a parameter that is split along an axis of its mesh each rank counts its part. Of one that is not, the first rank along the
// axis counts it: so the sum over the ranks has everything once, and the result is the same bits everywhere even if copies should
// differ. A plain parameter beside distributed ones is a copy along all their axes.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "penstock/group.h"
#include "penstock/optim/update/parameters.h"

namespace penstock::optim {

class RankReduction {
 public:
  // [collective over the meshes] `groups`: of ranks that hold other parameters (stages of a pipeline), or all ranks at once: an axis
  // of a mesh whose ranks are within one of them is not reduced by itself.
  // Throws ValueError for a group that this rank is not in, NotImplemented for meshes whose axes overlap in part.
  RankReduction(const std::vector<NamedParameter>& parameters, const std::vector<comm::Group>& groups);

  bool counts_here(const at::Tensor& parameter) const;
  // In place, one collective for each group; contiguous.
  void all_reduce(const at::Tensor& values, comm::ReduceOp op) const;

 private:
  std::vector<comm::Group> axes_;    // along which something is split or which `groups` cover
  std::vector<comm::Group> groups_;  // that are reduced over, axes first
};

}  // namespace penstock::optim
