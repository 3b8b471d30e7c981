// Composite operators that make plain tensors on their way, which would then meet distributed ones: here they are made otherwise
// when they are called on distributed tensors. Private to this folder.
#pragma once

namespace penstock::detail {

// Does nothing, but what calls it has these operators.
void link_composites();

}  // namespace penstock::detail
