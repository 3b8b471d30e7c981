// Plain values among the arguments of operators: when two are the same.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>

namespace penstock::graph {

// Bit for bit: 0.0 and -0.0 differ, a NaN is the same as itself; 1 and 1.0 differ. Numbers that became tensors compare by dtype and value,
// lists and tuples element by element, everything else by identity.
bool same_constant(const c10::IValue& a, const c10::IValue& b);

// Equal for equal constants.
std::size_t hash_of_constant(const c10::IValue& value);

}  // namespace penstock::graph
