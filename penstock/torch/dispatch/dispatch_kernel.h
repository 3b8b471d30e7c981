// The dispatcher kernel that implements wrappers and modes. Private to this folder.
#pragma once

namespace penstock::detail {

// Replaces LibTorch's kernel for DispatchKey::Python by ours, once per process. Called when the first wrapper
// is created or the first mode is entered; cheap afterwards.
void install_dispatch_kernel();

}  // namespace penstock::detail
