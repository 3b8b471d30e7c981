// Building blocks of rules. Private to this folder.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "penstock/dtensor/tensor/sharding_rule.h"

namespace penstock::detail {

// Dim `dim` of a tensor of `shape` that is broadcast to `ndim` dims: which of its own dims that is, or nothing where it has
// none or is stretched (size 1 against more).
std::optional<std::int64_t> broadcast_dim(const std::vector<std::int64_t>& shape, std::int64_t dim, const std::vector<std::int64_t>& result);

// One strategy for each dim of output 0: every input split along the dim that is broadcast to it, every output of the same
// shape split too. What elementwise operators do.
std::vector<AxisStrategy> elementwise_strategies(const ShardingCall& call);

// Every input whose shape is that of input 0 or of the outputs, split at dim `dim`, for all dims but `except`: rows that are
// worked on independently. Inputs of another shape are replicated.
std::vector<AxisStrategy> independent_dims(const ShardingCall& call, const std::set<std::int64_t>& except);

// The kinds of Partial that the inputs have, on any axis.
std::vector<PartialOp> partial_kinds(const ShardingCall& call);

// All inputs and outputs replicated: to be filled in.
AxisStrategy replicated_strategy(const ShardingCall& call);

// An argument `dim` (int or int[], optional) as a set of dims counted from the front; all dims when it is absent or empty.
std::set<std::int64_t> dims_of(const c10::IValue& value, std::int64_t ndim);

// How many elements of a dim this rank holds when `placements` lay out a tensor of `shape`.
std::vector<std::int64_t> local_shape(const ShardingCall& call, const std::vector<std::int64_t>& shape, const Placements& placements);

// The mesh axes that split `dim`, or any of `dims`.
std::vector<int> axes_splitting(const Placements& placements, std::int64_t dim);
std::vector<int> axes_splitting(const Placements& placements, const std::set<std::int64_t>& dims);

// The model gives its layout and nothing else. A model of terms gives a whole tensor: what is written into it counts once.
Sharding like_model(const ShardingCall& call);

// The value of a dtype that no maximum (or minimum) depends on.
c10::Scalar least_of(at::ScalarType dtype);
c10::Scalar greatest_of(at::ScalarType dtype);

// Whether terms of this kind are added up.
inline bool sums(PartialOp kind) { return kind == PartialOp::Sum || kind == PartialOp::Avg; }

// For operators whose result has a shape that depends on values: which one, and what to use instead.
[[noreturn]] void refuse_unknown_shape(const OperatorTraits& traits);

// Sums (or takes the maximum of) a local tensor over the mesh axes given, in place.
void reduce_over(const comm::MeshGroups& mesh, const std::vector<int>& axes, const at::Tensor& tensor, comm::ReduceOp op);

}  // namespace penstock::detail
