// Strategies by the names of the schema, and what the local calls of network operators share. Private to this folder.
//
//   StrategyBuilder(call).in("input", Shard{0}).in("weight", Replicate{}).out(0, Shard{0}).add_to(strategies);
//
// Names that the operator does not have and tensors that are not given are skipped, so one rule serves all forms of an
// operator in all versions. Arguments that are written (out=) are placed as the result that they hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "penstock/dtensor/tensor/sharding_rule.h"
#include "penstock/mesh/local_shard.h"

namespace penstock::detail {

class StrategyBuilder {
 public:
  // Everything replicated.
  explicit StrategyBuilder(const ShardingCall& call);

  StrategyBuilder& in(std::string_view argument, const Placement& placement);
  // By position in call.outputs; -1 stands for a result that the operator does not give.
  StrategyBuilder& out(int output, const Placement& placement);
  AxisStrategy build();
  void add_to(std::vector<AxisStrategy>& strategies) { strategies.push_back(build()); }

 private:
  const ShardingCall& call_;
  AxisStrategy strategy_;
};

// The input of that name; null when the operator has none, or it is not given.
const ShardingInput* input_named(const ShardingCall& call, std::string_view argument);

// Position in call.outputs of every result of the schema, when only those that are `given` are defined; -1 for the others.
std::vector<int> output_positions(const std::vector<bool>& given);

// In how many parts the mesh cuts `dim` of an argument. Whatever is strided along those axes becomes plain, so that the parts
// are equal where the size is a multiple of their number.
std::int64_t plain_parts(const ShardingCall& call, Sharding& sharding, std::string_view argument, std::int64_t dim);

// Kernels that work on whole rows, images or heads mostly refuse to work on none. Where this rank's part of one of these
// arguments is empty and the whole is not, the operator is not run: its results are empty, or terms of zero. `given` says
// which results of the schema are defined. Only for calls whose local form does not communicate.
void skip_where_empty(const ShardingCall& call, Sharding& sharding, std::initializer_list<std::string_view> arguments, const std::vector<bool>& given);

// ---- in local calls ----

// The local tensor that stands at an argument; undefined when there is none.
at::Tensor local_argument(const LocalContext& context, const Stack& stack, std::string_view argument);
// The placements that were decided for it; all replicated when there is none.
Placements decided(const LocalContext& context, std::string_view argument);
// The mesh axes along which it is split at `dim`.
std::vector<int> axes_of(const LocalContext& context, std::string_view argument, std::int64_t dim);

// Leaves `results` on the stack in place of the arguments; those of out= forms are copied into their tensors.
void give_results(const LocalContext& context, Stack* stack, const std::vector<at::Tensor>& results);

// Half precision is added up in float.
at::ScalarType accumulation_type(at::ScalarType dtype);

// The indices of `dim` that this rank holds, of a tensor of `shape`.
std::vector<Segment> held_segments(const LocalContext& context, const std::vector<std::int64_t>& shape, const Placements& placements, std::int64_t dim);

// Every index where `counts` holds must be in [0, size): ValueError on a CPU, a device-side assertion elsewhere. `counts` may
// be undefined: all.
void check_indices(const at::Tensor& indices, const at::Tensor& counts, std::int64_t size, std::string_view what);

}  // namespace penstock::detail
