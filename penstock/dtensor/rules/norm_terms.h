// Norms of tensors that are split over ranks: each rank's term, the reduction of terms, and the norm computed
// from them. Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "penstock/world.h"

namespace penstock::detail {

// Terms are in float32, or float64 for float64 values.
class NormTerms {
 public:
  explicit NormTerms(double order) : order_(order) {}

  // Over `dims`, which are kept with size 1. Without elements: the neutral value.
  at::Tensor of(const at::Tensor& local, const std::vector<std::int64_t>& dims) const;
  // Over all ranks along the given axes, one collective each. In place.
  void reduce(const comm::MeshGroups& mesh, const std::vector<int>& axes, at::Tensor& terms) const;
  at::Tensor norm(const at::Tensor& terms) const;

 private:
  bool largest() const;
  bool smallest() const;
  double order_;
};

}  // namespace penstock::detail
