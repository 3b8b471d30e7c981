// The passes of the library, each in a file of its own, in the order in which they run.
//
// All of them keep the bits of every result, with two exceptions that no arithmetic of LibTorch makes
// visible: which NaN a NaN is (a signalling NaN that a product with 1 would make quiet, the payload that a
// cast to bfloat16 drops), and numbers that the processor was told to flush to zero. Private to this folder.
// Thread safety: passes are immutable.
#pragma once

#include <memory>
#include <vector>

#include "penstock/graph_pass.h"

namespace penstock::graph {

using PassPointer = std::shared_ptr<const GraphPass>;

PassPointer constant_folding_pass();
PassPointer views_pass();
PassPointer algebraic_pass();
PassPointer cast_removal_pass();
PassPointer common_subexpressions_pass();
PassPointer view_sinking_pass();
PassPointer dead_code_pass();
PassPointer collectives_pass();

// All of these.
const std::vector<PassPointer>& standard_passes();

}  // namespace penstock::graph
