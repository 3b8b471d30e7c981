// Equality and hashes of non-tensor arguments of operators.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>

namespace penstock::graph {

// Compares bit for bit: 0.0 and -0.0 differ, a NaN equals itself, 1 and 1.0 differ. Numbers wrapped in
// tensors compare by dtype and value, lists and tuples element by element, everything else by identity.
bool same_constant(const c10::IValue& a, const c10::IValue& b);

// Equal for equal constants.
std::size_t hash_of_constant(const c10::IValue& value);

}  // namespace penstock::graph
