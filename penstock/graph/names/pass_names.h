// The names of graph passes, for options and configurations: known without LibTorch.
//
//   check_pass_names({"algebriac"}, "training.disable_passes");
//   // ... got "algebriac", expected passes out of ...; did you mean 'algebraic'?
//
// The passes themselves are in graph/passes; a pass that a program registers (graph_pass.h) is entered here.
// Thread safety: any thread.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::graph {

// Those of the library, in the order in which they run.
inline constexpr std::array<std::string_view, 8> kStandardPasses = {
    "constant-folding",      "views",        "algebraic", "cast-removal",
    "common-subexpressions", "view-sinking", "dead-code", "collectives"};

// All names that exist now, in the order in which the passes run.
std::vector<std::string> known_pass_names();
// Enters a name before another one, or at the end if `before` is empty. Returns false if it exists already.
// Throws ValueError for an unknown `before`.
bool add_pass_name(const std::string& name, std::string_view before = {});

// Returns an empty string if all names exist, otherwise what is wrong with the first one that does not; the
// nearest name is part of it. `what` names the setting.
std::string unknown_pass(const std::vector<std::string>& names, std::string_view what);

}  // namespace penstock::graph
