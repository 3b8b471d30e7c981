// Operators whose dependence on a state outside of the graph is an argument and a result.
//
//   const c10::OperatorHandle bernoulli = ...;                       // aten::bernoulli.p
//   operator_with_state(bernoulli, StateKind::Generator);            // penstock_random::aten__bernoulli.p
//   // (Tensor self, float p, *, Generator? generator=None, Tensor state, Device state_of) -> (Tensor,
//   Tensor) operator_with_state(print, StateKind::Token);                    // penstock_effect::mine__print
//   // (Tensor x, *, Tensor token) -> Tensor
//
// The arguments and results of the operator keep their places; the state comes after them.
// Generator: draws from the given state (torch/random/generator_state.h), returns the state afterwards, and
// leaves the generators of the process as they were. Such an operator is a function of its arguments: it may
// be removed, merged and computed twice like any other. `state_of` is the device of the generator.
// Token: runs the operator and returns the token. A token holds nothing: it only makes the next operator of
// the same effect depend on this one.
//
// The operators are registered on first use; files find them by their names (find_operator).
// Thread safety: any thread.
#pragma once

#include <c10/util/Optional.h>

#include <cstdint>
#include <optional>
#include <string>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

enum class StateKind : std::uint8_t { Token, Generator };

// Throws NotImplemented, naming it, for an operator that writes arguments, or whose results share their
// memory if it draws random numbers.
c10::OperatorHandle operator_with_state(const c10::OperatorHandle& op, StateKind kind);

// The operator inside, and what its state is; nullopt for any other operator.
struct OperatorInside {
  c10::OperatorHandle op;
  StateKind kind;
};
std::optional<OperatorInside> operator_inside(const c10::OperatorHandle& op);

// Finds an operator by its name, registering it if it is one of the above. Returns nullopt if there is none.
c10::optional<c10::OperatorHandle> find_operator(const std::string& name, const std::string& overload);

// What a value that is a state looks like.
Geometry geometry_of_token();
Geometry geometry_of_generator(at::Device device);
// The value of every token.
at::Tensor make_token();

}  // namespace penstock::graph
