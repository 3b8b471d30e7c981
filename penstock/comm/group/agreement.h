// Checks that all ranks of a group hold the same values before they rely on it, for example the layout of a
// buffer that they reduce together.
//
//   require_agreement(group, "parameters of the replicas", lines, "build the same model on all replicas");
//
// Normally costs one all-gather of two numbers. The lines themselves are exchanged only if the numbers
// differ, so that the error can quote the difference.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "penstock/group.h"

namespace penstock::comm {

// [collective] Throws ValueError on every rank, with the same text, unless all ranks pass the same lines. The
// message quotes the first line that differs, from the group's first rank and from the first rank that
// differs from it. A group of one rank always agrees.
void require_agreement(const Group& group, std::string_view what, const std::vector<std::string>& lines,
                       std::string_view remedy);

}  // namespace penstock::comm
