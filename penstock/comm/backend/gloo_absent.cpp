// Compiled instead of gloo_backend.cpp where Gloo's headers are missing.
#include "penstock/comm/backend/backend.h"
#include "penstock/errors.h"

namespace penstock::comm {

bool gloo_available() { return false; }

std::shared_ptr<Backend> make_gloo_backend(const Store&, const BackendOptions&) {
  throw ConfigError(
      "this build has no Gloo backend, which CPU tensors need; install libgloo-dev, or set "
      "PENSTOCK_EXTRA_INCLUDE to the folder of its headers, and rebuild");
}

}  // namespace penstock::comm
