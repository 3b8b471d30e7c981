#include "penstock/torch/shape_functions.h"

namespace penstock::detail {

void add_own_shape_functions() {
  add_normalization_shapes();
}

}  // namespace penstock::detail
