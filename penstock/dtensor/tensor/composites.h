// Replacements for composite operators that create plain tensors internally, which would then be mixed with
// distributed ones. Used when they are called on distributed tensors. Private to this folder.
#pragma once

namespace penstock::detail {

// Does nothing; calling it links these operators into the program.
void link_composites();

}  // namespace penstock::detail
