// Sharding rules: how an operator on distributed tensors runs on the local parts.
//
// A rule sees the call (global shapes, placements, arguments) and returns placements for every input and
// output, such that the operator on local parts computes local parts. Inputs with other placements are
// redistributed first.
//
//   // my::scale_rows(Tensor x, Tensor s): row i of x times s[i]
//   register_sharding_rule("my::scale_rows", [](const ShardingCall& call) {
//     std::vector<AxisStrategy> ways{{{Shard{0}, Shard{0}}, {Shard{0}}},           // rows are independent,
//                                    {{Shard{1}, Replicate{}}, {Shard{1}}},        // so are columns,
//                                    {{Partial{}, Replicate{}}, {Partial{}}}};     // and it is linear in x
//     return choose(call, ways);
//   });
//
// Most operators are described by what is possible along one mesh axis, as here: for every axis, `choose`
// picks the cheapest strategy for the current placements (everything replicated is always possible). Rules
// that consider all axes together, change arguments or communicate fill in a Sharding themselves.
//
// Decisions are cached by operator, specs and arguments (numbers of schema type Scalar or float only by their
// type, since optimizers pass a new one each step), so a rule runs once per kind of call and need not be
// fast. It must depend on the call only and return the same result on every rank.
// Thread safety: registration and use from any thread.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/operator_traits.h"
#include "penstock/placement.h"
#include "penstock/world.h"

namespace penstock {

// The geometry of the whole tensor, as its wrapper reports it.
struct GlobalGeometry {
  std::vector<std::int64_t> shape;    // global
  std::vector<std::int64_t> stride;   // global
  at::ScalarType dtype = at::kFloat;  // of all parts
  at::Device device = at::kCPU;       // of all parts

  // Number of elements.
  std::int64_t numel() const;
  // Compares all fields.
  bool operator==(const GlobalGeometry&) const = default;
};

// A tensor among the arguments, as a rule sees it.
struct ShardingInput {
  int argument = 0;       // position in the schema
  int element = -1;       // and in the list, if it is one
  GlobalGeometry whole;   // of the whole tensor
  Placements placements;  // current
  bool written = false;   // in place or out=: its placement must not change
  bool plain = false;     // a scalar or other plain tensor, treated as replicated: every rank has all of it

  // Number of dims.
  std::int64_t ndim() const { return static_cast<std::int64_t>(whole.shape.size()); }
  // Global size of a dim.
  std::int64_t size(std::int64_t dim) const { return whole.shape[static_cast<std::size_t>(dim)]; }
};

// A call of an operator, as a rule sees it.
struct ShardingCall {
  const OperatorTraits& traits;        // facts about the operator
  c10::OperatorHandle op;              // the operator
  std::vector<c10::IValue> arguments;  // tensors among them are the distributed ones
  std::vector<ShardingInput> inputs;   // every defined tensor, in order
  std::vector<GlobalGeometry>
      outputs;  // every defined tensor that the operator returns, lists flattened, in order
  std::vector<std::int64_t> mesh_shape;  // sizes of the axes
  std::vector<std::int64_t> coordinate;  // of this rank

  // Returns the input at an argument (and element), or null if it is absent or undefined.
  const ShardingInput* input_at(int argument, int element = -1) const;
  // Returns its position in `inputs`, or -1 if it is absent.
  int index_at(int argument, int element = -1) const;
  // Number of mesh axes.
  std::size_t axes() const { return mesh_shape.size(); }

  // Position of an argument by its schema name. Throws InvariantError for a name that the operator does not
  // have.
  int argument_index(std::string_view name) const;
  // Value of an argument by its schema name. Throws like argument_index.
  const c10::IValue& argument(std::string_view name) const {
    return arguments[static_cast<std::size_t>(argument_index(name))];
  }
  // Whether the schema has this argument.
  bool has_argument(std::string_view name) const;
  // Counts a dim from the front, wrapping negative values.
  static std::int64_t wrap_dim(std::int64_t dim, std::int64_t ndim);
};

// Available to a local call while it runs.
struct LocalContext {
  const comm::MeshGroups& mesh;            // of the distributed inputs
  const ShardingCall& call;                // shapes and arguments of the call that the decision was made for
  const std::vector<Placements>& inputs;   // as decided
  const std::vector<Placements>& outputs;  // as decided
};

// Runs instead of the operator: takes local arguments from the stack and pushes local results.
using LocalCall = std::function<void(const LocalContext&, const c10::OperatorHandle&, Stack*)>;

// What a rule returns.
struct Sharding {
  std::vector<Placements> inputs;   // one per ShardingCall::inputs
  std::vector<Placements> outputs;  // one per ShardingCall::outputs
  // Arguments with a different value on this rank, for example sizes of local parts.
  std::vector<std::pair<int, c10::IValue>> arguments;
  LocalCall local;  // empty: the operator itself
};

// A possible placement along one mesh axis. A Shard also matches a StridedShard of that dim if all dims that
// the strategy splits have the same size.
struct AxisStrategy {
  std::vector<Placement> inputs;   // one per input
  std::vector<Placement> outputs;  // one per output
};

// Picks the cheapest strategy for every axis; everything replicated is added as the last one. The first of
// equally cheap ones is taken. Throws ValueError if a written input would have to be redistributed.
Sharding choose(const ShardingCall& call, std::vector<AxisStrategy> strategies);
// Also returns the strategy taken for each axis; strategies.size() means everything replicated.
Sharding choose(const ShardingCall& call, std::vector<AxisStrategy> strategies,
                std::vector<std::size_t>& taken);

// Replicates the whole call: for rare operators.
Sharding replicate_all(const ShardingCall& call);

// Decides how a call runs on local parts.
using ShardingRule = std::function<Sharding(const ShardingCall&)>;

// Options of a rule.
struct RuleOptions {
  // Decide again for every value of numbers, because the rule reads them.
  bool numbers_matter = false;
  // False if the operator cannot be run in shape only (its result depends on values, or it has no tensor
  // result): the rule sees no outputs and must not need them.
  bool shape_known = true;
};

// `op`: "aten::add" for all overloads, their in-place and out= forms, or "aten::add.Tensor" for one, which
// takes precedence. A second rule for the same name throws StateError. Built-in rules may be replaced with
// replace_sharding_rule.
void register_sharding_rule(const std::string& op, ShardingRule rule, const RuleOptions& options = {});
// Replaces a built-in or registered rule.
void replace_sharding_rule(const std::string& op, ShardingRule rule, const RuleOptions& options = {});
// Returns whether an operator ("aten::add.Tensor") has a rule.
bool has_sharding_rule(const std::string& op);
// Names as registered, sorted: for documentation and tests.
std::vector<std::string> sharding_rule_names();

// A handler receives a whole call with its distributed tensors and performs it itself: for operators on many
// tensors at once.
using ShardingHandler = std::function<void(const c10::OperatorHandle&, Stack*)>;
// Registers a handler; names as for register_sharding_rule.
void register_sharding_handler(const std::string& op, ShardingHandler handler);

// Statistics of this thread's decision cache.
struct ShardingCacheStats {
  std::uint64_t hits = 0;    // calls decided before
  std::uint64_t misses = 0;  // calls that ran their rule
  std::size_t entries = 0;   // decisions kept
};
// Returns them.
ShardingCacheStats sharding_cache_stats();
// Forgets all decisions of this thread.
void clear_sharding_cache();

}  // namespace penstock
