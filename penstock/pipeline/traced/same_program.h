// Whether two traces of a model compute the same, and whether a stage can tell which of them it is to run.
//
// Thread safety: pure functions of their arguments.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "penstock/pipeline/traced/pipe_state.h"

namespace penstock {

// Whether both, which may be of different modes, run the same operators with the same numbers on tensors of
// the same sizes, and return the same. False for traces with functions of a user, which may look at more than
// their arguments.
bool same_operators(const PipeVariant& a, const PipeVariant& b);

// The first node that is not the same in both, or follows the last one of the other; the number of nodes if
// something else is not the same: a result, a function of a user. Tensors that the forward found are the same
// if their values are. Empty if both compute the same.
std::optional<std::size_t> first_other_node(const PipeVariant& a, const PipeVariant& b);

// Whether one stage computes the same in two traces, with its functions of a user, and returns the same.
bool same_stage(const PipeVariant& a, const PipeVariant& b, std::size_t stage);

// Whether some modes of the modules belong to both.
bool in_same_mode(const PipeVariant& a, const PipeVariant& b);

// Whether the tensors that a stage other than the first gets in one trace could be those of the other: from
// other stages, and keyword arguments that are tensors in both.
bool same_tensors(const PipeVariant& a, const PipeVariant& b, std::size_t stage);

// The names of the keyword arguments that are a tensor in one example only, have another structure, or other
// plain values. One that an example does not have is None in it.
std::vector<std::string> telling_keywords(const PipeVariant& a, const PipeVariant& b);

// "kwargs['mask'][0]" -> "mask"
std::string keyword_of(const std::string& path);

}  // namespace penstock
