// Operator rules: how an operator on distributed tensors becomes the same operator on local parts.
//
// A rule sees the call (shapes of the whole tensors, placements, arguments) and answers with placements for every input and
// output, such that the operator on local parts gives local parts. Inputs that lie otherwise are redistributed first.
//
//   // my::scale_rows(Tensor x, Tensor s): row i of x times s[i]
//   register_sharding_rule("my::scale_rows", [](const ShardingCall& call) {
//     std::vector<AxisStrategy> ways{{{Shard{0}, Shard{0}}, {Shard{0}}},           // rows are independent,
//                                    {{Shard{1}, Replicate{}}, {Shard{1}}},        // so are columns,
//                                    {{Partial{}, Replicate{}}, {Partial{}}}};     // and it is linear in x
//     return choose(call, ways);
//   });
//
// Most operators are described by what may happen along one axis of the mesh, as here: `choose` picks for every axis the way
// that costs least to get to (everything replicated is always one). Rules that look at all axes together, or that must
// change arguments or communicate, fill in a Sharding themselves.
//
// Decisions are kept by operator, specs and arguments (numbers of schema type Scalar or float only by their type, since
// optimizers pass a new one each step), so a rule runs once per kind of call and may take its time. It must depend on
// nothing but the call, and give the same answer on every rank.
// Thread rule: registration and use from any thread.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/dtensor/tensor/spec.h"
#include "penstock/torch/dispatch/operator_traits.h"
#include "penstock/torch/dispatch/stack_tensors.h"

namespace penstock {

// A tensor among the arguments, as a rule sees it.
struct ShardingInput {
  int argument = 0;       // position in the schema
  int element = -1;       // and in the list, when it is one
  GlobalGeometry whole;
  Placements placements;
  bool written = false;   // in place or out=: it must stay as it is placed
  bool plain = false;     // a number or another plain tensor that counts as replicated: every rank has all of it

  std::int64_t ndim() const { return static_cast<std::int64_t>(whole.shape.size()); }
  std::int64_t size(std::int64_t dim) const { return whole.shape[static_cast<std::size_t>(dim)]; }
};

struct ShardingCall {
  const OperatorTraits& traits;
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;       // tensors among them are the distributed ones
  std::vector<ShardingInput> inputs;        // every defined tensor, in order
  std::vector<GlobalGeometry> outputs;      // every defined tensor that the operator gives, lists flat, in order
  std::vector<std::int64_t> mesh_shape, coordinate;

  // The input that stands at an argument (and element), or null: it is absent or undefined.
  const ShardingInput* input_at(int argument, int element = -1) const;
  // Its position in `inputs`; -1 when it is absent.
  int index_at(int argument, int element = -1) const;
  std::size_t axes() const { return mesh_shape.size(); }

  // Arguments by schema name. Throw InvariantError for a name that the operator does not have.
  int argument_index(std::string_view name) const;
  const c10::IValue& argument(std::string_view name) const { return arguments[static_cast<std::size_t>(argument_index(name))]; }
  bool has_argument(std::string_view name) const;
  // A dim given as an argument or anything like it, counted from the front.
  static std::int64_t wrap_dim(std::int64_t dim, std::int64_t ndim);
};

// What a local call may ask while it runs.
struct LocalContext {
  const comm::MeshGroups& mesh;
  const ShardingCall& call;                  // shapes and arguments of the call that was decided on
  const std::vector<Placements>& inputs;     // as decided
  const std::vector<Placements>& outputs;
};

// Runs in place of the operator: local arguments on the stack, local results in their place.
using LocalCall = std::function<void(const LocalContext&, const c10::OperatorHandle&, Stack*)>;

struct Sharding {
  std::vector<Placements> inputs;   // one per ShardingCall::inputs
  std::vector<Placements> outputs;  // one per ShardingCall::outputs
  // Arguments with another value on this rank: sizes of local parts, for example.
  std::vector<std::pair<int, c10::IValue>> arguments;
  LocalCall local;                  // empty: the operator itself
};

// What may happen along one axis of the mesh. A Shard also stands for a StridedShard of that dim where all dims that the
// strategy splits have one size.
struct AxisStrategy {
  std::vector<Placement> inputs;
  std::vector<Placement> outputs;
};

// Every axis with the strategy that is cheapest to get to; everything replicated is added as the last one. The first of
// equals is taken. Throws ValueError when a written input would have to move.
Sharding choose(const ShardingCall& call, std::vector<AxisStrategy> strategies);
// Which strategy was taken, for each axis; strategies.size() stands for everything replicated.
Sharding choose(const ShardingCall& call, std::vector<AxisStrategy> strategies, std::vector<std::size_t>& taken);

// The whole call replicated: for operators that are too rare to deserve more.
Sharding replicate_all(const ShardingCall& call);

using ShardingRule = std::function<Sharding(const ShardingCall&)>;

struct RuleOptions {
  // Decide anew for every value of numbers, because the rule looks at them.
  bool numbers_matter = false;
  // The operator cannot be run in shape only (its result depends on values, or it has no tensor result): the rule sees no
  // outputs and must not need them.
  bool shape_known = true;
};

// `op`: "aten::add" for all overloads, their in-place and out= forms, or "aten::add.Tensor" for one, which goes first.
// A second rule for the same name is a StateError. Rules of this library may be replaced with replace_sharding_rule.
void register_sharding_rule(const std::string& op, ShardingRule rule, const RuleOptions& options = {});
void replace_sharding_rule(const std::string& op, ShardingRule rule, const RuleOptions& options = {});
// Whether an operator ("aten::add.Tensor") has a rule.
bool has_sharding_rule(const std::string& op);
// Names as registered, sorted: for documentation and tests.
std::vector<std::string> sharding_rule_names();

// A handler takes a whole call, distributed tensors included, and does what it likes: for operators on many tensors at once.
using ShardingHandler = std::function<void(const c10::OperatorHandle&, Stack*)>;
void register_sharding_handler(const std::string& op, ShardingHandler handler);

// The decisions kept by this thread.
struct ShardingCacheStats {
  std::uint64_t hits = 0, misses = 0;
  std::size_t entries = 0;
};
ShardingCacheStats sharding_cache_stats();
void clear_sharding_cache();

}  // namespace penstock
