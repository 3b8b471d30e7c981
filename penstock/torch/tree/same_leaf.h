// Whether two leaves of trees have the same kind and value.
#pragma once

#include "penstock/pytree.h"

namespace penstock {

// Tensors are the same if sizes, dtype and every element are (a NaN equals nothing); objects as c10::IValue
// compares them. All containers are the same here: what they contain are leaves of their own.
bool same_leaf(const Tree& a, const Tree& b);

}  // namespace penstock
