// A part of a model that computes on local parts while its parameters are distributed: what is split over an axis of the mesh
// (columns, then rows) is multiplied without the operators of distributed tensors, and one sum is sent each way.
//
//   const LocalRegion region(x, up->weight, Rows::BatchAndLength);
//   at::Tensor h = at::linear(region.enter(x), region.weight(up->weight));      // backward: gradients of x are summed over the axis, once
//   h = at::silu(h);
//   return region.leave_sum(at::linear(h, region.weight(down->weight)));        // forward: the terms are summed over the axis
//
// With plain parameters all of it is nothing. The activation may be plain, the same on all ranks of a mesh of one axis (the result is
// plain then), or distributed over the mesh of the parameters, rows split over axes that do not split the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/placement.h"

namespace penstock::models {

// Which dims of an activation [batch, length, width] may stay split: those whose rows are treated alike.
enum class Rows { Batch, BatchAndLength };

class LocalRegion {
 public:
  // `weight`: the first parameter, which says along which axes the region is split. Throws TypeError for an activation that does not
  // fit it.
  LocalRegion(const at::Tensor& x, const at::Tensor& weight, Rows rows);

  // The rows that are here, in full width.
  at::Tensor enter(const at::Tensor& x) const;
  // The part that is here. Throws ValueError for a parameter that is split along other axes than the first one, unless it is whole.
  at::Tensor weight(const at::Tensor& parameter) const;
  // The local results are terms of a sum over the axes that split the region; shaped like `x`.
  at::Tensor leave_sum(const at::Tensor& local) const;
  // The local results are columns: a distributed tensor split along the last dim, of `columns` in all. As leave_sum where nothing is
  // split.
  at::Tensor leave_split(const at::Tensor& local, std::int64_t columns) const;

 private:
  std::optional<comm::MeshGroups> mesh_;
  std::vector<bool> split_;        // axes that split the first parameter
  Placements inside_;              // of the activation within the region
  bool plain_input_ = true;
  std::vector<std::int64_t> shape_;  // of the whole activation
};

}  // namespace penstock::models
