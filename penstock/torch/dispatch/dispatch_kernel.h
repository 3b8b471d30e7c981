// The one kernel that wrappers and modes hang on. Private to this folder.
#pragma once

namespace penstock::detail {

// Puts our kernel in the place of LibTorch's for DispatchKey::Python, once per process. Called by whatever makes the first
// wrapper or enters the first mode; cheap afterwards.
void install_dispatch_kernel();

}  // namespace penstock::detail
