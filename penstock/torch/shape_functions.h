// The library's own shape functions, one file per family of operators. Private to this folder.
#pragma once

namespace penstock::detail {

// All families; called once, at the first fake operator.
void add_own_shape_functions();

void add_normalization_shapes();
void add_convolution_shapes();
void add_embedding_shapes();
void add_random_shapes();

}  // namespace penstock::detail
