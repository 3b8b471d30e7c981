// Reduces numbers about all parameters of a model that is distributed over ranks: which rank counts what, and
// which groups are summed over. Private to this folder.
//
// Each rank counts its part of a parameter that is split along a mesh axis. A parameter that is not split is
// counted by the first rank along the axis. The sum over the ranks therefore contains everything once, and
// the result has the same bits everywhere even if copies should differ. A plain parameter beside distributed
// ones is a copy along all their axes. Axes may be nested: one parameter may be split over a group of ranks,
// another over two axes that divide this group (experts).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "penstock/group.h"
#include "penstock/optimizer.h"

namespace penstock::optim {

class RankReduction {
 public:
  // [collective over the meshes] `groups` are groups of ranks that hold different parameters (stages of a
  // pipeline), or all ranks at once: a mesh axis whose ranks are within one of them is not reduced
  // separately. Throws ValueError for a group that does not contain this rank, NotImplemented for meshes
  // whose axes overlap in part.
  RankReduction(const std::vector<NamedParameter>& parameters, const std::vector<comm::Group>& groups);

  bool counts_here(const at::Tensor& parameter) const;
  // Reduces in place, one collective per group; `values` is contiguous.
  void all_reduce(const at::Tensor& values, comm::ReduceOp op) const;

 private:
  std::vector<comm::Group> axes_;    // axes that split a parameter or are covered by `groups`
  std::vector<comm::Group> groups_;  // groups to reduce over, axes first
};

}  // namespace penstock::optim
