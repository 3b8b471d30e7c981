// Lets fake CUDA tensors go backward on a machine without CUDA. Private to this folder.
#pragma once

namespace penstock::detail {

// Autograd asks the guard of a tensor's device for its stream and starts one worker thread per device at the first
// backward of the process. Where LibTorch has no CUDA, a stand-in guard for eight devices is registered when the program
// starts: later would be too late for a process that already went backward. The engine of older LibTorch without CUDA
// cannot run such nodes at all; there fake CUDA tensors go forward only.

// Throws StateError where fake CUDA tensors cannot require gradients.
void check_cuda_can_require_grad();

}  // namespace penstock::detail
