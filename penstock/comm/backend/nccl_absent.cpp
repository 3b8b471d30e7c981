// Compiled instead of nccl_backend.cpp where LibTorch has no CUDA.
#include "penstock/comm/backend/backend.h"
#include "penstock/errors.h"

namespace penstock::comm {

bool nccl_available() { return false; }

std::string nccl_version() { return "absent"; }

std::string gpu_identity(int, int&) { return {}; }

std::shared_ptr<Backend> make_nccl_backend(const Store&, const BackendOptions&) {
  throw ConfigError("this build has no NCCL backend; build against a LibTorch with CUDA");
}

}  // namespace penstock::comm
