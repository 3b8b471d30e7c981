// Builds strategies by schema argument names, and helpers for the local calls of network operators. Private
// to this folder.
//
//   StrategyBuilder(call).in("input", Shard{0}).in("weight", Replicate{}).out(0,
//       Shard{0}).add_to(strategies);
//
// Arguments that the operator does not have and tensors that are not given are skipped, so one rule serves
// all overloads of an operator in all versions. Written arguments (out=) are placed like the result that they
// hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "penstock/mesh/local_shard.h"
#include "penstock/sharding_rule.h"

namespace penstock::detail {

class StrategyBuilder {
 public:
  // Everything replicated.
  explicit StrategyBuilder(const ShardingCall& call);

  StrategyBuilder& in(std::string_view argument, const Placement& placement);
  // By position in call.outputs; -1 means a result that the operator does not return.
  StrategyBuilder& out(int output, const Placement& placement);
  AxisStrategy build();
  void add_to(std::vector<AxisStrategy>& strategies) { strategies.push_back(build()); }

 private:
  const ShardingCall& call_;
  AxisStrategy strategy_;
};

// Returns the input of that name, or null if the operator has none or it is not given.
const ShardingInput* input_named(const ShardingCall& call, std::string_view argument);

// The position in call.outputs of every result of the schema, if only those that are `given` are defined; -1
// for the others.
std::vector<int> output_positions(const std::vector<bool>& given);

// Returns the number of parts into which the mesh splits `dim` of an argument. Strided shards along those
// axes become plain, so that the parts are equal if the size is a multiple of their number.
std::int64_t plain_parts(const ShardingCall& call, Sharding& sharding, std::string_view argument,
                         std::int64_t dim);

// Most kernels that process whole rows, images or heads reject empty inputs. If this rank's part of one of
// these arguments is empty and the whole is not, the operator is not run: its results are empty, or partial
// values of zero. `given` tells which results of the schema are defined. Only for calls whose local form does
// not communicate.
void skip_where_empty(const ShardingCall& call, Sharding& sharding,
                      std::initializer_list<std::string_view> arguments, const std::vector<bool>& given);

// ---- for local calls ----

// Returns the local tensor at an argument; undefined if there is none.
at::Tensor local_argument(const LocalContext& context, const Stack& stack, std::string_view argument);
// Returns the placements that were decided for it; all replicated if there is none.
Placements decided(const LocalContext& context, std::string_view argument);
// Returns the mesh axes that split it at `dim`.
std::vector<int> axes_of(const LocalContext& context, std::string_view argument, std::int64_t dim);

// Replaces the arguments on the stack by `results`; those of out= forms are copied into their tensors.
void store_results(const LocalContext& context, Stack* stack, const std::vector<at::Tensor>& results);

// Half precision is accumulated in float.
at::ScalarType accumulation_type(at::ScalarType dtype);

// The indices of `dim` that this rank holds of a tensor of `shape`.
std::vector<Segment> held_segments(const LocalContext& context, const std::vector<std::int64_t>& shape,
                                   const Placements& placements, std::int64_t dim);

// Checks that every index where `counts` is true is in [0, size): throws ValueError on a CPU, fails a
// device-side assertion elsewhere. If `counts` is undefined, all indices are checked.
void check_indices(const at::Tensor& indices, const at::Tensor& counts, std::int64_t size,
                   std::string_view what);

}  // namespace penstock::detail
