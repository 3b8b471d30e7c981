// Checks that all ranks of a group see the same thing before they rely on it, such as the layout of a buffer that they reduce together.
//
//   require_agreement(group, "parameters of the replicas", lines, "build the same model on all replicas");
//
// Usually one all-gather of two numbers. Only when they differ do the lines travel, so that the error can say what differs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "penstock/group.h"

namespace penstock::comm {

// [collective] Throws ValueError on every rank, with the same text, unless all ranks pass the same lines: it quotes the first line
// that differs, of the group's first rank and of the first rank that differs from it. A group of one rank always agrees.
void require_agreement(const Group& group, std::string_view what, const std::vector<std::string>& lines, std::string_view remedy);

}  // namespace penstock::comm
