// Facts about an operator that handlers need on every call, derived from its schema once and cached.
//
//   const OperatorTraits& traits = traits_of(op);
//   if (traits.returns[0].kind == ReturnAlias::Kind::Same) ...   // in-place or out=: the result IS that argument
//
// Thread safety: `traits_of` may be called from any thread; its result lives until the process ends.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// Where one result of an operator comes from.
struct ReturnAlias {
  enum class Kind : std::uint8_t {
    Fresh,  // new memory
    View,   // other metadata over the memory of argument `argument`
    Same    // argument `argument` itself, written in place
  };
  Kind kind = Kind::Fresh;
  int argument = -1;
};

struct ArgumentTraits {
  enum class Kind : std::uint8_t { Other, Tensor, TensorList, OptionalTensorList };
  Kind kind = Kind::Other;
  bool written = false;
};

struct OperatorTraits {
  explicit OperatorTraits(const c10::OperatorHandle& op);

  std::string name;                      // "aten::add.Tensor"
  std::vector<ArgumentTraits> arguments;
  std::vector<ReturnAlias> returns;
  bool composite = false;                // decomposed into other operators, which autograd sees instead
  bool mutates = false;                  // writes at least one argument
  bool any_alias = false;                // some result is Same or View
  bool pure_view = false;                // every result is a View, nothing is written
  int device_argument = -1;              // position of the argument named `device`, of factories and conversions
  int pin_memory_argument = -1;
};

const OperatorTraits& traits_of(const c10::OperatorHandle& op);

// Small consecutive integers, one per operator in the order of first use: keys for per-operator tables.
std::size_t operator_index(const c10::OperatorHandle& op);

}  // namespace penstock
