// A part of a model that computes on local tensors while its parameters are distributed: products with
// parameters split over a mesh axis (columns, then rows) bypass the distributed operators, and one sum is
// sent in each direction.
//
//   const LocalRegion region(x, up->weight, Rows::BatchAndLength);
//   // backward: gradients of x are summed over the axis, once
//   at::Tensor h = at::linear(region.enter(x), region.weight(up->weight));
//   h = at::silu(h);
//   // forward: the terms are summed over the axis
//   return region.leave_sum(at::linear(h, region.weight(down->weight)));
//
// With plain parameters all of it is a no-op. The activation may be plain and equal on all ranks of a mesh
// with one axis (the result is then plain), or distributed over the mesh of the parameters. Rows that axes
// which do not split the parameters divide stay divided. Rows that are divided over an axis which splits the
// parameters (split_rows.h) are gathered on entry, and the sums are scattered over that axis again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/placement.h"
#include "penstock/world.h"

namespace penstock::models {

// Which dims of an activation [batch, length, width] may stay split: those whose rows are computed
// independently.
enum class Rows { Batch, BatchAndLength };

class LocalRegion {
 public:
  // `weight` is the first parameter; it determines along which axes the region is split. Throws TypeError for
  // an activation that does not match it.
  LocalRegion(const at::Tensor& x, const at::Tensor& weight, Rows rows);
  // Nothing is split.
  LocalRegion() = default;
  // Of parameters that the axis of `mesh`, its only one, splits. An activation is plain and equal on all
  // ranks, or distributed over the mesh.
  LocalRegion(const at::Tensor& x, const comm::MeshGroups& mesh);

  // Returns the local rows, in full width.
  at::Tensor enter(const at::Tensor& x) const;
  // Returns the local part. Throws ValueError for a parameter that is split along other axes than the first
  // one.
  at::Tensor weight(const at::Tensor& parameter) const;
  // Returns a parameter that every rank of the axes that split the region holds whole and uses for its own
  // columns: its gradients are terms of a sum over them. Throws ValueError for one that is split along them.
  at::Tensor shared_weight(const at::Tensor& parameter) const;
  // Takes local results that are terms of a sum over the axes that split the region; the result is shaped
  // like `x`, with rows divided as those of `x` are.
  at::Tensor leave_sum(const at::Tensor& local) const;
  // [collective] Returns the sum of local values over the axes that split the region, for computations within
  // it that need all columns. Gradients are summed in the same way.
  at::Tensor sum_over_ranks(const at::Tensor& local) const;
  // Takes local results that are columns; returns a distributed tensor split along the last dim, with
  // `columns` in total. Like leave_sum if nothing is split.
  at::Tensor leave_split(const at::Tensor& local, std::int64_t columns) const;

  // The tokens of this rank within the region, of a plain tensor that has `length` tokens along `dim`.
  at::Tensor own_tokens(const at::Tensor& per_token, std::int64_t dim = 1) const;

  // Whether an axis with several ranks splits the region.
  bool is_split() const;

 private:
  void place(const at::Tensor& x, std::int64_t kept_dims);

  std::optional<comm::MeshGroups> mesh_;
  std::vector<bool> split_;  // axes that split the first parameter
  Placements inside_;        // of the activation within the region
  Placements outside_;       // of the activation and of the result
  bool plain_input_ = true;
  std::vector<std::int64_t> shape_;  // of the whole activation; empty: that of the local one
};

}  // namespace penstock::models
