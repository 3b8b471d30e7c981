// Replaces cuda_code.cpp in builds without CUDA.
#include "penstock/errors.h"
#include "penstock/graph/fused/generated_code.h"

namespace penstock::graph {

std::unique_ptr<const CodeTarget> cuda_code_target(c10::Device device) {
  throw StateError("this build of Penstock has no CUDA, and no code can be generated for " + device.str());
}

std::string cuda_code_version() { return "no CUDA"; }

}  // namespace penstock::graph
