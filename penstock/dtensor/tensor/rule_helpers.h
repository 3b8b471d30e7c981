// Building blocks of rules. Private to this folder.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "penstock/sharding_rule.h"

namespace penstock::detail {

// For dim `dim` of a tensor of `shape` broadcast to `ndim` dims: returns the tensor's own dim, or
// std::nullopt if it has none or is expanded (size 1 to more).
std::optional<std::int64_t> broadcast_dim(const std::vector<std::int64_t>& shape, std::int64_t dim,
                                          const std::vector<std::int64_t>& result);

// One strategy for each dim of output 0: every input is split along the dim that is broadcast to it, every
// output of the same shape is split too. For elementwise operators.
std::vector<AxisStrategy> elementwise_strategies(const ShardingCall& call);

// Splits every input whose shape is that of input 0 or of the outputs at dim `dim`, for all dims except
// `except`: rows that are processed independently. Inputs of another shape are replicated.
std::vector<AxisStrategy> independent_dims(const ShardingCall& call, const std::set<std::int64_t>& except);

// The kinds of Partial among the inputs, on any axis.
std::vector<PartialOp> partial_kinds(const ShardingCall& call);

// All inputs and outputs replicated, as a starting point.
AxisStrategy replicated_strategy(const ShardingCall& call);

// An argument `dim` (int or int[], optional) as a set of dims counted from the front; all dims if it is
// absent or empty.
std::set<std::int64_t> dims_of(const c10::IValue& value, std::int64_t ndim);

// The shape of this rank's part of a tensor of `shape` placed as `placements`.
std::vector<std::int64_t> local_shape(const ShardingCall& call, const std::vector<std::int64_t>& shape,
                                      const Placements& placements);

// The mesh axes that split `dim`, or any of `dims`.
std::vector<int> axes_splitting(const Placements& placements, std::int64_t dim);
std::vector<int> axes_splitting(const Placements& placements, const std::set<std::int64_t>& dims);
// Whether any mesh axis splits `dim`.
inline bool splits_dim(const Placements& placements, std::int64_t dim) {
  return !axes_splitting(placements, dim).empty();
}

// Results are placed like the model tensor (input 0). If the model is Partial, the result is replicated, so
// that what is written into it counts once.
Sharding placed_like_first_input(const ShardingCall& call);

// The value of a dtype that no maximum (or minimum) depends on.
c10::Scalar lowest_value(at::ScalarType dtype);
c10::Scalar highest_value(at::ScalarType dtype);

// Returns whether partial values of this kind are added up.
inline bool sums(PartialOp kind) { return kind == PartialOp::Sum || kind == PartialOp::Avg; }

// For operators whose result shape depends on values: throws an error with the alternatives.
[[noreturn]] void refuse_unknown_shape(const OperatorTraits& traits);

// Reduces a local tensor (sum or maximum) over the given mesh axes, in place.
void reduce_over(const comm::MeshGroups& mesh, const std::vector<int>& axes, const at::Tensor& tensor,
                 comm::ReduceOp op);

}  // namespace penstock::detail
